"""The structure that decoders are built from is that of transformers' models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minifloat.checkpoint import Checkpoint
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.engine.blueprint import Blueprint, blueprint_of, rotary_frequencies
from minifloat.errors import CheckpointError, ConfigError, ShapeError, UnsupportedTensorError
from minifloat.kernels.decoder_layout import ExpertsLayout, NotNative
from minifloat.model.layouts import describe
from minifloat.model.runtime.config import plain_config
from minifloat.model.runtime.load import load
from minifloat.model.runtime.names import empty_model
from minifloat.model.runtime.tensors import StoredTensors
from minifloat.model.runtime.weights import WeightSource
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 20, "head_dim": 32}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    ("mixtral", {"sliding_window": 20}),
    ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    ("qwen2_moe", {"num_experts": 4, "qkv_bias": False, "mlp_only_layers": [0], "use_sliding_window": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 20}),
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def both(folder: Path) -> tuple[Blueprint, Any]:
    """The blueprint of a folder, and transformers' empty model."""
    with Checkpoint.open(folder) as checkpoint:
        return blueprint_of(plain_config(checkpoint), torch.bfloat16), empty_model(checkpoint, torch.bfloat16)


@pytest.mark.parametrize(("model_type", "config"), CONFIGS)
def test_parameters_have_the_names_and_shapes_that_transformers_gives_them(
    model_type: str, config: dict[str, Any], make_model: MakeModel, tmp_path: Path
) -> None:
    blueprint, model = both(make_model(tmp_path / "m", model_type, **config))
    parameters = blueprint.parameters()
    parts = {part for fused in parameters.fused.values() for names in fused.parts for part in names}
    shapes = {name: shape for name, shape in parameters.shapes.items() if name not in parts}
    shapes |= {name: fused.shape for name, fused in parameters.fused.items()}
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == shapes
    assert parameters.architecture == type(model).__name__
    assert (parameters.tied is not None) == bool(model.all_tied_weights_keys)


@pytest.mark.parametrize(("model_type", "config"), CONFIGS)
def test_layers_are_those_of_transformers(
    model_type: str, config: dict[str, Any], make_model: MakeModel, tmp_path: Path
) -> None:
    blueprint, model = both(make_model(tmp_path / "m", model_type, **config))
    assert len(blueprint.layout.layers) == len(model.model.layers)
    for plan, layer in zip(blueprint.layout.layers, model.model.layers, strict=True):
        attention = layer.self_attn
        assert (plan.attention.head_dim, plan.attention.scale) == (attention.head_dim, attention.scaling)
        in_config = model.config.sliding_window if model_type in ("mistral", "mixtral") else None
        assert plan.attention.window == getattr(attention, "sliding_window", in_config)
        assert isinstance(plan.mlp, ExpertsLayout) == hasattr(layer.mlp, "experts")
        if isinstance(plan.mlp, ExpertsLayout):
            assert plan.mlp.router.top_k == layer.mlp.gate.top_k
            assert plan.mlp.router.normalize == getattr(layer.mlp.gate, "norm_topk_prob", True)
        assert plan.input_norm is not None
        assert plan.input_norm.eps == layer.input_layernorm.variance_epsilon


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize(("model_type", "config"), CONFIGS[::2])
def test_rotary_frequencies_are_those_of_transformers(
    model_type: str, config: dict[str, Any], rope: dict[str, Any], make_model: MakeModel, tmp_path: Path
) -> None:
    blueprint, model = both(make_model(tmp_path / "m", model_type, rope_scaling=rope, **config))
    rotary = blueprint.layout.layers[0].attention.rotary
    assert rotary is not None
    inv_freq, attention_scaling = rotary_frequencies(rotary)
    assert torch.equal(inv_freq, model.model.rotary_emb.inv_freq)
    assert attention_scaling == model.model.rotary_emb.attention_scaling
    assert inv_freq.dtype == torch.float32


def test_rope_parameters_that_are_missing_are_an_error(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    with Checkpoint.open(folder) as checkpoint:
        config = plain_config(checkpoint)
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"config\.json: no llama model can be built of it: .*factor"):
        blueprint_of(config, torch.bfloat16)


def test_what_the_decoders_do_not_know_is_not_native(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    with Checkpoint.open(folder) as checkpoint:
        config = plain_config(checkpoint)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(NotNative, match="its rotary embedding is 'dynamic', not one of default, linear"):
        blueprint_of(config, torch.bfloat16)

    @dataclass
    class Newer(type(config)):  # type: ignore[misc]
        residual_multiplier: float = 1.0

    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    newer = Newer(**{k: v for k, v in config.to_dict().items() if k in type(config).__dataclass_fields__})
    assert blueprint_of(newer, torch.bfloat16)
    newer.residual_multiplier = 0.5
    with pytest.raises(NotNative, match="its config sets 'residual_multiplier', which minifloat does not know"):
        blueprint_of(newer, torch.bfloat16)


# ------------------------------------------------------------------------------------- everything is accounted for


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def continuation(folder: Path) -> tuple[int, ...]:
    engine = Engine(folder, EngineOptions(dtype="float32"))
    assert engine.info.runner == "native"
    return engine.generate([tuple(range(40))], GREEDY)[0].tokens


@pytest.fixture
def folder(make_llama: MakeModel, tmp_path: Path) -> Path:
    return make_llama(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            CheckpointError,
            r"1 parameters of LlamaForCausalLM have no tensor: model\.layers\.1\.mlp\.up_proj\.weight$",
        ),
        (
            lambda t: t.update({"model.layers.1.extra.weight": torch.ones(2)}),
            CheckpointError,
            r"no place in LlamaForCausalLM: model\.layers\.1\.extra\.weight",
        ),
        (
            lambda t: t.update({"norm.weight": torch.ones(64)}),
            CheckpointError,
            r"norm\.weight are all the parameter model\.norm\.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(65)}),
            ShapeError,
            r"model\.norm\.weight: the config expects \[64\], the checkpoint holds \[65\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
            UnsupportedTensorError,
            r"model\.norm\.weight: .*float.* found I64",
        ),
    ],
)
@pytest.mark.parametrize("opened", [Engine, load])
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    folder: Path, change: Callable[..., object], error: type[Exception], message: str, opened: Callable[..., object]
) -> None:
    edit_tensors(folder, change)
    with pytest.raises(error, match=message):
        opened(folder)


def test_an_expert_that_is_missing_is_named(make_mixtral: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_mixtral(tmp_path / "plain"), tmp_path / "q", "fp8")
    expert = "model.layers.0.block_sparse_moe.experts.1.w2"
    edit_tensors(tmp_path / "q", lambda t: [t.pop(f"{expert}.{kind}") for kind in ("weight", "weight_scale")])
    with pytest.raises(CheckpointError, match=r"no tensor: model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight$"):
        Engine(tmp_path / "q")


def test_rotary_buffers_of_old_checkpoints_are_dropped_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = continuation(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    with caplog.at_level(logging.WARNING, "minifloat"):
        assert continuation(folder) == tokens
    assert name in caplog.text


def test_a_checkpoint_of_the_base_model_has_its_prefix_added(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", tie_word_embeddings=True)
    tokens = continuation(folder)
    edit_tensors(folder, lambda t: t.update({name.removeprefix("model."): t.pop(name) for name in list(t)}))
    assert continuation(folder) == tokens


def test_experts_that_are_fused_on_disk_make_the_same_tokens(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3_moe")
    tokens = continuation(folder)

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts"
            gates, ups, downs = (
                [tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(4)]
                for part in ("gate", "up", "down")
            )
            pairs = zip(gates, ups, strict=True)
            tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{name}.down_proj"] = torch.stack(downs)

    edit_tensors(folder, fuse)
    assert continuation(folder) == tokens


def test_a_quantized_weight_is_read_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(folder, tmp_path / "q", "fp8")
    with Checkpoint.open(tmp_path / "q") as checkpoint:
        tensors = StoredTensors(checkpoint, describe(checkpoint))
        blueprint = blueprint_of(plain_config(checkpoint), torch.bfloat16)
        weights = WeightSource(tensors, blueprint.parameters(), torch.bfloat16, torch.device("cpu"))
        reads: list[str] = []
        read = checkpoint.read_into
        monkeypatch.setattr(
            checkpoint, "read_into", lambda info, *rest: (reads.append(info.name), read(info, *rest))[1]
        )
        with weights.reading_ahead():
            for name in blueprint.parameters().shapes:
                weights.matrix(name)
    assert sorted(reads) == sorted(checkpoint.tensors)
