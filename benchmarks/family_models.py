"""Models of three families with random weights, for `benchmarks/families.py`.

Shapes are those of released models; gpt-oss-20b is cut from 24 layers to 3 and its vocabulary to 16 Ki tokens, so
that the output layer keeps about its share of a step. Its experts are stored in MXFP4, as released. llama.cpp's file
of it holds the same codes: `PYTHON benchmarks/family_models.py MODEL OUT` writes it in an environment with gguf, its
attention and output layer in BF16 (OUT-BF16.gguf) and in Q8_0 (OUT-Q8_0.gguf).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
}
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}
QWEN_3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SHAPES = {"gpt-oss": GPT_OSS, "gemma-3-1b": GEMMA_3, "qwen3.5-0.8b": QWEN_3_5}
#: Bits of a weight of llama.cpp's embedding, of which a step reads only one row.
GGUF_BITS = {"BF16": 16, "Q8_0": 8.5}


def make(folder: Path, name: str) -> Path:
    """Write the BF16 model (gpt-oss: with MXFP4 experts) of a shape, if it is not there, and return its folder."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / name
    if path.exists():
        return path
    values = dict(SHAPES[name])
    config = AutoConfig.for_model(values.pop("model_type"), dtype="bfloat16", **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call, unused-ignore]
    config.architectures = [type(model).__name__]
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    written = dict(_tensors(model, config, pool))
    path.mkdir(parents=True)
    save_file(written, path / "model.safetensors", {"format": "pt"})
    stored = config.to_dict()
    if config.model_type == "gpt_oss":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        stored["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (path / "config.json").write_text(json.dumps(stored, indent=1, default=str))
    _write_tokenizer(path, config.vocab_size)
    return path


def _tensors(model: Any, config: Any, pool: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random tensors under the names of the model; norms are ones, experts of gpt-oss are MXFP4."""
    import torch

    start = 0
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape, count = tuple(parameter.shape), parameter.numel()
        if config.model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            experts, cols, rows = shape
            yield (
                f"{name}_blocks",
                torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8, generator=generator),
            )
            yield (
                f"{name}_scales",
                torch.randint(118, 122, (experts, rows, cols // 32), dtype=torch.uint8, generator=generator),
            )
            continue
        if "norm" in name:
            yield name, torch.full(shape, 0.0 if "gemma" in config.model_type else 1.0, dtype=torch.bfloat16)
            continue
        pieces, left = [], count
        while left:
            piece = pool[start : start + left]
            pieces.append(piece)
            left -= len(piece)
            start = (start + len(piece)) % len(pool)
        yield name, torch.cat(pieces).view(shape)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocab)}, unk_token="t0"))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_GGUF_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(module: str) -> str:
    """Return llama.cpp's name of a module of gpt-oss."""
    if module in _GGUF_ENDS:
        return _GGUF_ENDS[module]
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[rest]}"


def write_gguf(model: Path, out: str, kind: str) -> None:
    """Write a gpt-oss model as OUT-KIND.gguf: experts in MXFP4 with the same codes, other matrices in `kind`."""
    import gguf
    import numpy as np
    from decode_models import finish_gguf

    quantized = getattr(gguf.GGMLQuantizationType, kind)
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(f"{out}-{kind}.gguf", "gpt-oss")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rotary = config["rope_parameters"]
    writer.add_rope_freq_base(rotary["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rotary["factor"])
    writer.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    blocks: dict[str, Any] = {}
    for name, bits in _with_bytes(model):
        if name.endswith(("_blocks", "_scales")):
            blocks[name] = bits
            continue
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        module, _, leaf = name.rpartition(".")
        if leaf.endswith("gate_up_proj_bias"):
            base = _gguf_name(name.removesuffix("gate_up_proj_bias") + "down_proj").replace("down", "{}")
            writer.add_tensor(base.format("gate") + ".bias", np.ascontiguousarray(values[:, ::2]))
            writer.add_tensor(base.format("up") + ".bias", np.ascontiguousarray(values[:, 1::2]))
        elif leaf == "down_proj_bias":
            writer.add_tensor(_gguf_name(name.removesuffix("_bias")) + ".bias", values)
        elif leaf == "sinks":
            writer.add_tensor(_gguf_name(name) + ".weight", values)
        elif bits.ndim == 1 or "router" in name:
            writer.add_tensor(f"{_gguf_name(module)}.{leaf}", values)
        elif kind == "BF16":
            writer.add_tensor(f"{_gguf_name(module)}.{leaf}", bits, raw_dtype=quantized)
        else:
            writer.add_tensor(
                f"{_gguf_name(module)}.{leaf}", gguf.quants.quantize(values, quantized), raw_dtype=quantized
            )
    for name in [key for key in blocks if key.endswith("_blocks")]:
        module = name.removesuffix("_blocks")
        packed = _ggml_mxfp4(blocks[name], blocks[f"{module}_scales"])
        base = _gguf_name(module.replace("gate_up_proj", "down_proj"))
        parts = {base: packed}
        if "gate_up" in module:
            parts = {base.replace("down", part): packed[:, offset::2] for offset, part in enumerate(("gate", "up"))}
        for part, values in parts.items():
            writer.add_tensor(f"{part}.weight", np.ascontiguousarray(values), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    finish_gguf(writer)
    nbytes = int(config["vocab_size"] * config["hidden_size"] * GGUF_BITS[kind] / 8)
    Path(f"{out}-{kind}.gguf.embedding").write_text(str(nbytes))


def _ggml_mxfp4(blocks: Any, scales: Any) -> Any:
    """Return uint8 ``[E, rows, cols / 32 * 17]``: the scale, then codes i and i + 16 of each group in one byte."""
    import numpy as np

    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*blocks.shape[:2], -1).astype(np.uint8)


def _with_bytes(model: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names of a checkpoint's tensors and their bits, as uint16 arrays (BF16) or uint8 arrays."""
    import struct

    import numpy as np

    data = np.memmap(model / "model.safetensors", np.uint8, "r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    for name, info in json.loads(data[8 : 8 + length].tobytes()).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            dtype = np.uint8 if info["dtype"] == "U8" else np.uint16
            yield name, data[8 + length + first : 8 + length + last].view(dtype).reshape(info["shape"])


if __name__ == "__main__":
    for each in GGUF_BITS:
        write_gguf(Path(sys.argv[1]), sys.argv[2], each)
