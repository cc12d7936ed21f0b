"""The simulated FP8 KV cache: rounding, attention, the scales of checkpoints, and refused models."""

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from minifloat.checkpoint import Checkpoint
from minifloat.engine.blueprint import blueprint_of
from minifloat.engine.native_decoder import build_native_decoder
from minifloat.errors import CheckpointError, UnsupportedTensorError, UsageError
from minifloat.evaluate.compare import transformers_model
from minifloat.evaluate.compare.transformers_model import kv_cache_factory, round_to_cache
from minifloat.kernels.decoder import BLOCK_TOKENS, KVCache, StepBatch, step
from minifloat.model.layouts import describe
from minifloat.model.runtime.config import plain_config
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tensors import KVScales, StoredTensors, kv_scales
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.formats import E4M3

MakeModel = Callable[..., Path]

INTEROP = Path(__file__).parents[2] / "data" / "interop"
TOKENS = 24

#: Architectures, and configs with windows shorter than the text.
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}),
    ("gemma2", {"sliding_window": 6, "head_dim": 16}),
    ("gemma3_text", {"sliding_window": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gpt_oss", {"sliding_window": 6}),
    ("mixtral", {}),
]


def windowed(function: Any) -> Any:
    return pytest.mark.parametrize(("model_type", "config"), WINDOWED, ids=[name for name, _ in WINDOWED])(function)


def opened(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load a model, by default in float64, where rounding to E4M3 does not depend on the order of sums."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.set_experts_implementation("eager")  # the grouped experts do not support float64
    return model


def scales_of(model: Any) -> KVScales:
    layers = model.config.get_text_config().num_hidden_layers
    return {f"model.layers.{index}.self_attn": (0.011 + index / 100, 0.007) for index in range(layers)}


def ids(rows: int = 2) -> Tensor:
    return torch.randint(0, 256, (rows, TOKENS), generator=torch.Generator().manual_seed(5))


def nearest(x: np.ndarray) -> np.ndarray:
    """Return the nearest E4M3 values in float64 by search, ties to the even code."""
    values = np.array(E4M3.values[: E4M3.max_code + 1])
    above = np.searchsorted(values, np.abs(x)).clip(1, E4M3.max_code)
    low, high = values[above - 1], values[above]
    distance = (high - np.abs(x)) - (np.abs(x) - low)
    code = np.where((distance < 0) | ((distance == 0) & (above % 2 == 0)), above, above - 1)
    return np.copysign(values[code], x)


@pytest.mark.parametrize("scale", [1.0, 2.0**-6, 0.0354352667927742])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_rounded_to_the_nearest_of_e4m3(dtype: torch.dtype, scale: float) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    step = np.float32(scale)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(nearest(x.float().numpy() / step).astype(np.float32) * step).to(dtype)
    found = round_to_cache(x, scale)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_values_beyond_the_largest_are_clamped_and_nan_stays() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30, 2 * E4M3.max])
    expected = torch.tensor([1, -1, math.nan, 1, 1]) * 0.5 * E4M3.max
    torch.testing.assert_close(round_to_cache(x, 0.5), expected, rtol=0, atol=0, equal_nan=True)


def by_hand(model: Any, tokens: Tensor, scales: KVScales) -> Tensor:
    """Compute the logits of a Llama in float64 step by step, with keys and values rounded by `nearest`."""
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    size = config.hidden_size // heads
    theta = config.rope_parameters["rope_theta"]
    angles = torch.arange(len(tokens)).double()[:, None] * theta ** (-torch.arange(0, size, 2).double() / size)
    hidden = weights["model.embed_tokens.weight"][tokens]
    later = torch.ones(len(tokens), len(tokens)).triu(1).bool()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[name]

    def turned(x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (2, -1)).unbind(-2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def stored(x: Tensor, scale: float) -> Tensor:
        return torch.from_numpy(nearest(x.numpy() / scale)) * scale

    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        x = norm(hidden, f"{name}.input_layernorm.weight")
        q, k, v = ((x @ weights[f"{name}.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, size)) for p in "qkv")
        k_scale, v_scale = scales[f"{name}.self_attn"]
        k, v = stored(turned(k), k_scale), stored(v, v_scale)
        q, attended = turned(q), []
        for head in range(heads):
            group = head // (heads // groups)
            scores = (q[:, head] @ k[:, group].T / math.sqrt(size)).masked_fill(later, -math.inf)
            attended.append(scores.softmax(-1) @ v[:, group])
        hidden = hidden + torch.cat(attended, -1) @ weights[f"{name}.self_attn.o_proj.weight"].T
        x = norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        hidden = hidden + (functional.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T


@torch.inference_mode()
def test_the_logits_of_a_window_equal_a_float64_calculation(llama_folder: Path) -> None:
    model = opened(llama_folder)
    tokens, scales = ids(), scales_of(model)
    factory = kv_cache_factory(model, scales)
    found = model(input_ids=tokens, past_key_values=factory(), use_cache=True).logits
    expected = torch.stack([by_hand(model, row, scales) for row in tokens])
    assert torch.allclose(found, expected, atol=1e-5)
    assert (model(input_ids=tokens, use_cache=False).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(("model_type", "config"), [("llama", {}), ("mistral", {"sliding_window": 9})])
@torch.inference_mode()
def test_the_logits_of_a_window_equal_those_of_the_native_decoder_with_an_fp8_cache(
    make_model: MakeModel, tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m", model_type, **config)
    model = load(folder, LoadOptions(dtype=torch.float32))
    scales, tokens = scales_of(model), ids(1)
    found = model(input_ids=tokens, past_key_values=kv_cache_factory(model, scales)(), use_cache=True).logits[0]
    with Checkpoint.open(folder) as checkpoint:
        blueprint = blueprint_of(plain_config(checkpoint), torch.float32)
        tensors = StoredTensors(checkpoint, describe(checkpoint))
        weights = WeightSource(tensors, blueprint.parameters(), torch.float32, torch.device("cpu"))
        decoder = build_native_decoder(blueprint, weights, scales)
    blocks, positions = -(-TOKENS // BLOCK_TOKENS), torch.arange(TOKENS, dtype=torch.int32)
    batch = StepBatch(
        tokens=tokens[0].int(),
        positions=positions,
        starts=torch.tensor([0, TOKENS], dtype=torch.int32),
        contexts=torch.tensor([TOKENS], dtype=torch.int32),
        blocks=torch.arange(blocks, dtype=torch.int32)[None],
        logits=positions,
    )
    cache = KVCache(decoder.cache_shapes, blocks, E4M3.name)
    assert torch.allclose(found, step(decoder, cache, batch, impl="reference"), atol=1e-4)


@windowed
@torch.inference_mode()
def test_a_cache_that_does_not_round_changes_no_logit(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, config: dict[str, Any]
) -> None:
    model = opened(make_model(tmp_path / "m", model_type, dtype="float32", **config))
    factory = kv_cache_factory(model, {})
    monkeypatch.setattr(transformers_model, "round_to_cache", lambda x, scale: x)
    found = model(input_ids=ids(), past_key_values=factory(), use_cache=True).logits
    assert torch.equal(found, model(input_ids=ids(), use_cache=False).logits)


@windowed
@torch.inference_mode()
def test_a_window_in_one_pass_has_the_logits_of_token_by_token_passes(
    make_model: MakeModel, tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    model = opened(make_model(tmp_path / "m", model_type, dtype="float32", **config))
    tokens, factory = ids(), kv_cache_factory(model, scales_of(model))
    whole = model(input_ids=tokens, past_key_values=factory(), use_cache=True).logits
    plain = model(input_ids=tokens, use_cache=False).logits
    cache, parts = factory(), []
    for part in (tokens[:, :3], *tokens[:, 3:].split(1, dim=1)):
        parts.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
    assert not torch.allclose(plain, whole, atol=1e-3)


@torch.inference_mode()
def test_recurrent_layers_of_a_hybrid_model_are_not_rounded(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(make_model(tmp_path / "m", "qwen3_next", dtype="float32"), torch.float32)
    scales = {"model.layers.1.self_attn": (0.01, 0.02)}
    cache = kv_cache_factory(model, scales)()
    rounded = model(input_ids=ids(), past_key_values=cache, use_cache=True).logits
    keys, values = cache.layers[1].keys, cache.layers[1].values
    assert torch.equal(keys, round_to_cache(keys, 0.01))
    assert torch.equal(values, round_to_cache(values, 0.02))
    plain = model(input_ids=ids(), use_cache=False).logits
    assert not torch.allclose(rounded, plain, atol=1e-3)
    monkeypatch.setattr(transformers_model, "round_to_cache", lambda x, scale: x)
    same = model(input_ids=ids(), past_key_values=kv_cache_factory(model, scales)(), use_cache=True).logits
    assert torch.allclose(same, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["llmc-fp8-kv", "modelopt-fp8-kv"])
def test_scales_equal_those_that_other_tools_wrote(name: str) -> None:
    written = json.loads((INTEROP / name / "expected.json").read_text())["kv_scales"]
    together: dict[str, dict[str, float]] = {}
    for module, scales in written.items():
        together.setdefault(module.removesuffix(".k_proj").removesuffix(".v_proj"), {}).update(scales)
    with Checkpoint.open(INTEROP / name) as checkpoint:
        found = kv_scales(checkpoint, describe(checkpoint))
    assert found is not None
    assert {module: {"k_scale": k, "v_scale": v} for module, (k, v) in found.items()} == together


def test_a_checkpoint_without_an_fp8_cache_has_no_scales(llama_folder: Path) -> None:
    for folder in (llama_folder, INTEROP / "llmc-fp8-static"):
        with Checkpoint.open(folder) as checkpoint:
            assert kv_scales(checkpoint, describe(checkpoint)) is None


def with_scales(tmp_path: Path, change: Callable[[dict[str, Tensor]], object]) -> KVScales | None:
    """Return the KV scales of a checkpoint that declares an FP8 cache, after changing its tensors."""
    folder = tmp_path / "changed"
    shutil.copytree(INTEROP / "llmc-fp8-kv", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint.open(folder) as checkpoint:
        return kv_scales(checkpoint, describe(checkpoint))


def test_a_cache_that_is_declared_without_scales_has_scales_of_one(
    tmp_path: Path, llama_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"model.layers.0.self_attn.{which}_scale" for which in "kv"]
    scales = with_scales(tmp_path, lambda tensors: [tensors.pop(name) for name in names])
    assert scales == {}
    with caplog.at_level(logging.WARNING):
        cache = kv_cache_factory(opened(llama_folder), scales)()
    assert "2 of 2 attention layers have no k_scale" in caplog.text
    x = torch.randn(1, 2, 4, 16)
    keys, values = cache.update(x, 3 * x, 1)
    assert torch.equal(keys, round_to_cache(x, 1.0))
    assert torch.equal(values, round_to_cache(3 * x, 1.0))


def test_a_single_scale_of_a_pair_is_used_for_keys_and_values(tmp_path: Path) -> None:
    scales = with_scales(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.k_scale"))
    assert scales == {"model.layers.0.self_attn": (0.01446533203125, 0.01446533203125)}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_is_not_a_positive_number_is_refused(tmp_path: Path, value: float) -> None:
    name = "model.layers.0.self_attn.v_scale"
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_scale: a scale is a positive number"):
        with_scales(tmp_path, lambda tensors: tensors.update({name: torch.tensor([value])}))


def test_scales_by_head_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_scale"
    with pytest.raises(UnsupportedTensorError, match="expected one scale of the KV cache"):
        with_scales(tmp_path, lambda tensors: tensors.update({name: torch.ones(2)}))


def test_scales_of_a_layer_that_the_model_does_not_have_are_refused(llama_folder: Path) -> None:
    with pytest.raises(UsageError, match=r"layers\.2\.self_attn.*none of the model's 2 layers"):
        kv_cache_factory(opened(llama_folder), {"model.layers.2.self_attn": (1.0, 1.0)})


def test_latent_attention_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model = opened(make_model(tmp_path / "m", "deepseek_v3"))
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM: servers hold its latent vectors"):
        kv_cache_factory(model, {})


@pytest.mark.parametrize(
    ("model_type", "config", "message"),
    [
        ("mamba", {"state_size": 4, "num_hidden_layers": 1}, "MambaForCausalLM takes no KV cache"),
        ("minimax", {"num_local_experts": 2, "block_size": 8}, "it has a cache of its own kind"),
    ],
)
def test_models_without_a_plain_cache_are_refused(
    make_model: MakeModel, tmp_path: Path, model_type: str, config: dict[str, Any], message: str
) -> None:
    model = opened(make_model(tmp_path / "m", model_type, **config), torch.float32)
    with pytest.raises(UsageError, match=message):
        kv_cache_factory(model, {})
