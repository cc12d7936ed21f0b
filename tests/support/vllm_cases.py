"""Small checkpoints on which the rules of `check` for vLLM on a CPU are tested against vLLM itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools import ROOT

from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

STORYBOOK = ROOT / "examples" / "storybook-4m"
STORIES = ROOT / "examples" / "texts" / "stories_calibration.txt"
FIXTURES = ROOT / "tests" / "data" / "interop"

#: Heads of 64, since vLLM's attention on a CPU supports none of 16; sizes that blocks of 128 divide.
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

Config = dict[str, Any]
MakeModel = Callable[..., Path]
Make = Callable[[Path, MakeModel], object]
Change = Callable[[Config, dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Case:
    """A checkpoint with the expected verdicts."""

    make: Make
    rules: tuple[str, ...] = ()
    refusal: str = ""
    amx: bool = False
    as_if_amx: bool = False
    tp: int = 1
    compared: bool = True


def quantized(
    scheme: str, model_type: str | None = None, *, layout: str = "compressed-tensors", overrides: Any = (), **sizes: Any
) -> Make:
    """Return a function that quantizes storybook, or a random model, to a scheme."""

    def make(folder: Path, make_model: MakeModel) -> object:
        source = STORYBOOK if model_type is None else random_model(folder, make_model, model_type, **sizes)
        return quantize_checkpoint(
            source, folder, scheme, QuantizeOptions(layout=layout, overrides=overrides, allow_partial=True)
        )

    return make


def random_model(folder: Path, make_model: MakeModel, model_type: str, **sizes: Any) -> Path:
    """Write a random BF16 model into a folder beside `folder`."""
    return make_model(folder.with_name(f"{folder.name}-base"), model_type, **(_SIZES | sizes))


def calibrated(scheme: str, *options: str) -> Make:
    """Return a function that quantizes storybook to a scheme with calibrated scales."""

    def make(folder: Path, _: MakeModel) -> object:
        from minifloat.commands.main import main

        data = ["--calibration", str(STORIES), "--calibration-samples", "8", "--calibration-seq-len", "64"]
        return main(
            ["quantize", str(STORYBOOK), str(folder), "--scheme", scheme, *data, *options, "--quiet"],
            standalone_mode=False,
        )

    return make


def changed(make: Make, change: Change) -> Make:
    """Return a function that makes a checkpoint and then changes its config and tensors."""

    def make_and_change(folder: Path, make_model: MakeModel) -> None:
        make(folder, make_model)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, tensors)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return make_and_change


def fixture(name: str) -> Make:
    """Return a function that copies a checkpoint of `tests/data/interop` without `expected.*`.

    vLLM would take those files for weights.
    """
    return lambda folder, _: shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("expected.*"))


def target_names(*names: str) -> Change:
    """Return a change of the targets of the only config group."""

    def change(config: Config, _: dict[str, torch.Tensor]) -> None:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["targets"] = list(names)

    return change


def plain_queries(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Dequantize q_proj to BF16, beside k and v in FP8."""
    for name in [name for name in tensors if name.endswith("q_proj.weight_scale")]:
        module = name.removesuffix(".weight_scale")
        weight, scale = tensors[f"{module}.weight"].float(), tensors.pop(name).float()
        tensors[f"{module}.weight"] = (weight * scale).bfloat16()
        config["quantization_config"]["ignore"].append(module)


def called_mxfp4(config: Config, _: dict[str, torch.Tensor]) -> None:
    """Declare a dense model with the quant_method of gpt-oss."""
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def called_modelopt(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Name the tensors and the config of MXFP4 as ModelOpt does."""
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        tensors[name.removesuffix("_packed")] = tensors.pop(name)
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP4", "exclude_modules": ["lm_head"]}


def without_kv_scales(_: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Remove the scales of a declared FP8 KV cache."""
    for name in [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]:
        del tensors[name]


def unlisted_experts(config: Config, _: dict[str, torch.Tensor]) -> None:
    """Remove the experts from the list of exceptions."""
    listed = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [name for name in listed if "experts" not in name]


def gpt_oss_mxfp4(config: Config, tensors: dict[str, torch.Tensor]) -> None:
    """Quantize fused experts ``[E, in, out]`` to blocks ``[E, out, in / 32, 16]`` and scales."""
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts = [quantize_tensor(weight.T, SCHEMES["mxfp4"].weight) for weight in tensors.pop(name)]
        scales = torch.stack([expert.scale for expert in experts])
        codes = torch.stack([expert.codes for expert in experts])
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes.unflatten(-1, (scales.shape[-1], -1)), scales
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}


def plain(model_type: str, **sizes: Any) -> Make:
    """Return a function that writes a random BF16 model."""
    return lambda folder, make_model: make_model(folder, model_type, **(_SIZES | sizes))


_STATIC = r"static_scaled_fp8_quant\(\) expected at most 0 argument"
_NO_KERNEL = "Failed to find a kernel that can implement the {} linear layer"
_AMX_LINEAR = "CPUFp8BlockScaledMMKernel requires AMX tile support"
_AMX_EXPERTS = "Unsupported FP8 MoE backend: NONE|No MXFP4 MoE backend supports"
_HEAD_SCALE = "There is no module or parameter named 'lm_head.weight_scale"
WORKER_DIED = "WorkerProc initialization failed"
_NO_HEADS = "Unsupported CPU attention configuration"

_KV = ("--kv-cache", "fp8")
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "overrides": ["self_attn=bf16"]}
_HEAD = ["^lm_head$=fp8-dynamic"]
_HEAD_ALONE = [".*=bf16", "^lm_head$=fp8-block"]
#: Sizes that vLLM's latent attention is compiled for on a CPU, and a name of the router that it asks for.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "topk_method": "noaux_tc",
}
_GPT_OSS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}


def experts(scheme: str, **changes: Any) -> Make:
    """Return a function that quantizes only the experts of a model, so that only they can be refused."""
    return quantized(scheme, "qwen3_moe", **(_EXPERTS | changes))


CASES: dict[str, Case] = {
    # ------------------------------------------------------------------------------------ every scheme
    "bf16": Case(lambda folder, _: shutil.copytree(STORYBOOK, folder)),
    "fp8-block": Case(quantized("fp8-block"), (), _AMX_LINEAR, amx=True),
    "fp8-block-fp8-layout": Case(quantized("fp8-block", layout="fp8"), (), _AMX_LINEAR, amx=True),
    "fp8": Case(quantized("fp8"), ("vllm-weight-only-fp8",), _NO_KERNEL.format("ScaledMM")),
    "fp8-dynamic": Case(quantized("fp8-dynamic"), ("vllm-cpu-dynamic",)),
    "fp8-static": Case(calibrated("fp8-static"), ("vllm-cpu-static",), _STATIC),
    "fp8-static-weights": Case(quantized("fp8-static"), ("vllm-weight-only-fp8",), _NO_KERNEL.format("ScaledMM")),
    "mxfp8": Case(quantized("mxfp8"), ("vllm-cpu-small-formats",), _NO_KERNEL.format("MXFP8")),
    "mxfp4": Case(quantized("mxfp4"), ("vllm-cpu-mxfp4",), _NO_KERNEL.format("MXFP4")),
    "nvfp4": Case(quantized("nvfp4"), ("vllm-cpu-small-formats",), "MarlinNvFp4LinearKernel is not supported"),
    # ------------------------------------------------------------------------------------ KV cache
    "kv": Case(calibrated("fp8-dynamic", *_KV), ("vllm-cpu-dynamic",), compared=False),
    "kv-without-scales": Case(
        changed(calibrated("fp8-dynamic", *_KV), without_kv_scales),
        ("vllm-cpu-dynamic", "kv-scales-missing"),
        compared=False,
    ),
    # ------------------------------------------------------------------------------------ blocks, fused layers
    "gate-160": Case(
        quantized("fp8-block", "llama", intermediate_size=160, overrides=[".*=bf16", "(gate|up)_proj=fp8-block"]),
        ("blocks-128",),
        "output_partition_size = 160 is not divisible by weight quantization block_n = 128",
    ),
    "queries-in-bf16": Case(
        changed(quantized("fp8-dynamic", "llama"), plain_queries),
        ("fused-layers-mixed", "vllm-cpu-dynamic"),
        "Found different quantization schemes for the shards of model.layers.0.self_attn.qkv_proj",
    ),
    "blocks-of-32": Case(
        fixture("deepseek-block32-ue8m0"),
        ("vllm-cpu-block-size", "vllm-cpu-head-size"),
        "CPU FP8 kernel requires K-dimension block size of 128",
        as_if_amx=True,
    ),
    # ------------------------------------------------------------------------------------ experts
    "experts-bf16": Case(plain("qwen3_moe", moe_intermediate_size=128)),
    "experts-fp8-block": Case(experts("fp8-block"), (), _AMX_EXPERTS, amx=True),
    "experts-fp8-block-192": Case(
        experts("fp8-block", moe_intermediate_size=192),
        ("blocks-128-experts",),
        "gate's and up's weight = 192 is not divisible by weight quantization block_n = 128",
    ),
    "experts-fp8": Case(
        experts("fp8"), ("vllm-weight-only-fp8", "experts-weight-only-fp8"), "For Fused MoE layers, only format"
    ),
    "experts-fp8-dynamic": Case(
        experts("fp8-dynamic"), ("vllm-cpu-experts", "vllm-cpu-dynamic"), "Unsupported FP8 MoE backend: NONE"
    ),
    "experts-mxfp4": Case(experts("mxfp4"), ("vllm-cpu-mxfp4",), "has no attribute 'gptq_marlin_repack'"),
    "experts-mxfp8": Case(experts("mxfp8"), ("vllm-cpu-small-formats",), "triton"),
    "experts-nvfp4": Case(experts("nvfp4"), ("vllm-cpu-small-formats",), "No NvFp4 MoE backend supports"),
    "gpt-oss-bf16": Case(plain("gpt_oss", **_GPT_OSS)),
    "gpt-oss-mxfp4": Case(changed(plain("gpt_oss", **_GPT_OSS), gpt_oss_mxfp4), (), _AMX_EXPERTS, amx=True),
    "gpt-oss-unlisted-experts": Case(
        changed(quantized("fp8-dynamic", "gpt_oss", overrides=["experts=bf16"], **_GPT_OSS), unlisted_experts),
        ("vllm-experts-unlisted", "vllm-cpu-dynamic"),
        r"experts\.w2_bias",
    ),
    # ------------------------------------------------------------------------------------ lm_head
    "head-bf16": Case(quantized("fp8-dynamic", "llama"), ("vllm-cpu-dynamic",)),
    "head": Case(quantized("fp8-dynamic", "llama", overrides=_HEAD), ("vllm-cpu-dynamic",)),
    "head-by-class": Case(
        changed(quantized("fp8-dynamic", "llama", overrides=_HEAD), target_names("Linear")),
        ("vllm-head-not-named", "vllm-cpu-dynamic"),
        _HEAD_SCALE,
    ),
    "head-by-pattern": Case(
        changed(quantized("fp8-dynamic", "llama", overrides=_HEAD), target_names("Linear", "re:.*lm_head")),
        ("vllm-cpu-dynamic",),
    ),
    "head-in-blocks": Case(
        quantized("fp8-block", "llama", overrides=_HEAD_ALONE),
        ("head-blocks",),
        "^AssertionError",
        as_if_amx=True,
    ),
    "head-fp8-layout": Case(
        quantized("fp8-block", "llama", layout="fp8", overrides=_HEAD_ALONE, vocab_size=384),
        ("vllm-fp8-layout-head",),
        _HEAD_SCALE,
    ),
    # ------------------------------------------------------------------------------------ names of other layouts
    "dense-mxfp4": Case(
        changed(quantized("mxfp4"), called_mxfp4), ("vllm-dense-mxfp4",), "There is no module or parameter named"
    ),
    "modelopt-mxfp4": Case(
        changed(quantized("mxfp4"), called_modelopt), ("vllm-modelopt-mxfp4",), "ModelOpt currently only supports"
    ),
    # ------------------------------------------------------------------------------------ attention
    "heads-of-16": Case(plain("llama", head_dim=16), ("vllm-cpu-head-size",), _NO_HEADS),
    "heads-of-40": Case(plain("llama", head_dim=40), ("vllm-cpu-head-size",), _NO_HEADS),
    "heads-of-48": Case(plain("llama", head_dim=48)),
    "heads-of-288": Case(plain("llama", head_dim=288), ("vllm-cpu-head-size",), _NO_HEADS),
    "latent": Case(
        quantized("fp8-dynamic", "deepseek_v3", overrides=[r"\.experts\.=bf16"], **_LATENT),
        ("vllm-cpu-latent", "vllm-cpu-dynamic"),
    ),
    "latent-of-40": Case(
        plain("deepseek_v3", num_key_value_heads=4, head_dim=8, topk_method="noaux_tc"),
        ("vllm-cpu-latent-size",),
        "Head dimension 40 is not supported by MLA",
    ),
    # ------------------------------------------------------------------------------------ tensor parallelism
    "8-heads-tp3": Case(
        plain("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=32, intermediate_size=384),
        ("tp-attention-heads", "tp-kv-heads", "tp-matrices"),
        r"number of attention heads \(8\) must be divisible by tensor parallel size \(3\)",
        tp=3,
    ),
    "1-kv-head-tp2": Case(plain("llama", num_key_value_heads=1), ("tp-kv-heads-copied",), tp=2),
    "3-kv-heads-tp2": Case(
        plain("llama", hidden_size=384, num_attention_heads=6, num_key_value_heads=3),
        ("tp-kv-heads",),
        WORKER_DIED,
        tp=2,
    ),
    "97-rows-tp2": Case(plain("llama", intermediate_size=97), ("tp-matrices",), WORKER_DIED, tp=2),
}

#: Rules for vLLM on a CPU that no case covers -> reason.
NOT_STARTED = {
    "groups-across-gpus": "MXFP4, MXFP8 and NVFP4 have no kernel on a CPU, whatever the number of processes",
    "head-unquantized": "applies to every model with an untied head",
    **dict.fromkeys(
        (
            "vllm-expert-dtype",
            "vllm-indexer",
            "vllm-mamba-1",
            "vllm-mtp-projection",
            "vllm-router",
            "vllm-single-experts",
        ),
        "read from vLLM's source; no checkpoint was made for it",
    ),
}

#: Checkpoints of other tools. vLLM refuses all of them for their heads of 16, and most of them earlier.
FIXTURE_NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
