"""The statistics of the observer, against forward hooks and arithmetic in this file."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minifloat import quantize_checkpoint
from minifloat.calibration.observe import Observer
from minifloat.calibration.sites import Sites, find_sites
from minifloat.checkpoint import Checkpoint
from minifloat.errors import NonFiniteError, UsageError
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.load import load
from minifloat.model.runtime.products import fast_products
from minifloat.numerics.histogram import BINS, count_magnitudes

MakeModel = Callable[..., Path]

#: A dense model; query and key norms; partial rotary embedding; fused qkv with LayerNorm (an older architecture).
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "stablelm": {},
    "gpt_neox": {},
    "phi3": {},
    "gemma2": {"head_dim": 16},
}
MOE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module")
def models(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a model of a type once and returns its folder."""

    @functools.cache
    def folder(model_type: str, dtype: str = "bfloat16") -> Path:
        path = tmp_path_factory.mktemp("models") / model_type
        return make_model(path, model_type, dtype=dtype, **DENSE.get(model_type, {}))

    return folder


def tokens(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode(), fast_products():
        result: Tensor = model(input_ids=ids[None], use_cache=False).logits
    return result


def hooked(model: PreTrainedModel, sequences: list[Tensor]) -> dict[str, list[Tensor]]:
    """Return the inputs of every linear in the layers, one per sequence, by module path."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: seen[path].append(args[0].clone()))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantizedLinear) and ".layers." in path
    ]
    for ids in sequences:
        logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def observe(model: PreTrainedModel, sequences: list[Tensor], **options: bool) -> Observer:
    with Observer(model, **options) as observer:
        for ids in sequences:
            observer.run(ids[None])
    return observer


def load_eager(folder: Path) -> PreTrainedModel:
    """Load the model with eager experts, which an observed model also uses; other implementations round differently."""
    model = load(folder)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("model_type", [*DENSE, *MOE])
def test_amax_and_token_counts_equal_those_of_forward_hooks(model_type: str, models: Callable[..., Path]) -> None:
    model, sequences = load_eager(models(model_type)), tokens(5, 33, 1)
    expected = hooked(model, sequences)
    inputs = observe(model, sequences).inputs()
    checked = 0
    for path, seen in expected.items():
        if path.endswith(("gate", "router", "shared_expert_gate")):
            assert path not in inputs
            continue
        amax = np.array([float(x.abs().max()) for x in seen], np.float32)
        np.testing.assert_array_equal(inputs[path].amax, amax, err_msg=path)
        assert inputs[path].tokens.tolist() == [5, 33, 1]
        checked += 1
    assert checked == sum(".experts." not in name for name in inputs) > 0


def test_float16_and_float32_models_are_observed_too(models: Callable[..., Path]) -> None:
    for dtype in ("float16", "float32"):
        model, sequences = load(models("llama", dtype)), tokens(9)
        expected = hooked(model, sequences)
        for name, stats in observe(model, sequences).inputs().items():
            assert stats.max == float(expected[name][0].abs().max())


def test_histograms_and_channel_amax_equal_those_of_the_hooked_inputs(models: Callable[..., Path]) -> None:
    model, sequences = load(models("llama")), tokens(40, 17)
    expected = hooked(model, sequences)
    inputs = observe(model, sequences, histogram=True, per_channel=True).inputs()
    for path, seen in expected.items():
        flat = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).float()
        counts, channels = inputs[path].histogram, inputs[path].channel_amax
        assert counts is not None
        assert channels is not None
        np.testing.assert_array_equal(counts, count_magnitudes(flat.numpy()))
        np.testing.assert_array_equal(channels, flat.abs().amax(0).numpy())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to as many leading dimensions of ``[B, heads, T, D]`` as `cos` has."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], dim=-1)
    return torch.cat([turned * cos[:, None] + half * sin[:, None], kept], dim=-1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "stablelm", "mixtral"])
def test_k_and_v_per_head_are_the_projections_after_norm_and_rotary_embedding(
    model_type: str, implementation: str, models: Callable[..., Path]
) -> None:
    model, sequences = load_eager(models(model_type)), tokens(21, 6)
    model.set_attn_implementation(implementation)
    inputs = hooked(model, sequences)
    kv = observe(model, sequences).kv()
    assert sorted(kv) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for path, stats in kv.items():
        attention = model.get_submodule(path)
        for index, x in enumerate(inputs[f"{path}.k_proj"]):
            shape = (*x.shape[:2], 2, -1)
            with torch.inference_mode():
                k, v = (project(x).view(shape) for project in (attention.k_proj, attention.v_proj))
                k = attention.k_norm(k) if hasattr(attention, "k_norm") else k
                cos, sin = model.base_model.rotary_emb(x, torch.arange(x.shape[1])[None])
                k = rotate(k.transpose(1, 2), cos, sin)
            np.testing.assert_array_equal(stats.k_amax[index], k.float().abs().amax((0, 2, 3)).numpy())
            np.testing.assert_array_equal(stats.v_amax[index], v.float().abs().amax((0, 1, 3)).numpy())


def routed(model: PreTrainedModel, sequences: list[Tensor]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return the inputs of each experts module: hidden states and the experts of each token."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: seen[path].append((args[0].clone(), args[1])))
        for path, module in model.named_modules()
        if path.endswith(".experts")
    ]
    for ids in sequences:
        logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


#: Model type -> the experts' prefix in the checkpoint, and their gate, up and down projections.
EXPERT_NAMES = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.", ("w1", "w3"), "w2"),
    "qwen3_moe": ("model.layers.{}.mlp.experts.", ("gate_proj", "up_proj"), "down_proj"),
    "gpt_oss": ("model.layers.{}.mlp.experts.", ("gate_proj", "up_proj"), "down_proj"),
}


@pytest.mark.parametrize("model_type", EXPERT_NAMES)
def test_each_expert_records_the_tokens_that_the_router_sends_to_it(
    model_type: str, models: Callable[..., Path]
) -> None:
    model, sequences = load_eager(models(model_type)), tokens(30, 1, 2)
    inputs = observe(model, sequences).inputs()
    prefix, gate_up, down = EXPERT_NAMES[model_type]
    idle = 0
    for layer, (path, seen) in enumerate(routed(model, sequences).items()):
        experts: Any = model.get_submodule(path)
        for expert in range(4):
            stem = f"{prefix.format(layer)}{expert}."
            for index, (hidden, chosen) in enumerate(seen):
                x = hidden[(chosen == expert).any(-1)]
                idle += len(x) == 0
                amax = float(x.abs().max()) if len(x) else 0.0
                for name in gate_up:
                    assert inputs[stem + name].amax[index] == amax
                for name in (*gate_up, down):
                    assert inputs[stem + name].tokens[index] == len(x)
                if len(x):
                    with torch.inference_mode():
                        expected = gated(experts, expert, x).float().abs().max()
                    # A row that is multiplied alone may be rounded differently than within a larger product.
                    torch.testing.assert_close(
                        torch.tensor(inputs[stem + down].amax[index]), expected, rtol=1e-2, atol=0
                    )
                else:
                    assert inputs[stem + down].amax[index] == 0.0
    assert idle > 0, "no expert was idle: the test shows nothing about those"


def gated(experts: Any, expert: int, x: Tensor) -> Tensor:
    """Return the input of an expert's down projection."""
    weight = experts.gate_up_proj[expert]
    if not experts.is_transposed:
        gate, up = (x @ weight.T).chunk(2, dim=-1)
        return nn.functional.silu(gate) * up
    both = x @ weight + experts.gate_up_proj_bias[expert]
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize("model_type", MOE)
def test_observed_experts_compute_the_same_as_eager_experts(model_type: str, models: Callable[..., Path]) -> None:
    model, (ids,) = load_eager(models(model_type)), tokens(23)
    plain = logits(model, ids)
    with Observer(model) as observer, observer.sequence(0):
        observed = logits(model, ids)
    assert torch.equal(plain, observed)


@pytest.mark.parametrize("model_type", [*DENSE, *MOE])
def test_an_observer_leaves_no_trace_in_the_model(model_type: str, models: Callable[..., Path]) -> None:
    model, (ids,) = load(models(model_type)), tokens(12)
    table = dict(ALL_ATTENTION_FUNCTIONS)
    before = logits(model, ids)
    observe(model, [ids])
    with pytest.raises(KeyboardInterrupt), Observer(model) as observer, observer.sequence(1):
        raise KeyboardInterrupt
    assert torch.equal(logits(model, ids), before)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    assert dict(ALL_ATTENTION_FUNCTIONS) == table
    assert observer.sequences == 0


def test_two_observers_on_one_model_do_not_affect_each_other(models: Callable[..., Path]) -> None:
    first, second = load(models("llama")), load(models("gpt_oss"))
    table, (ids,) = dict(ALL_ATTENTION_FUNCTIONS), tokens(12)
    alone = observe(first, [ids]), observe(second, [ids])
    a, b = Observer(first), Observer(second)
    a.__enter__()
    b.__enter__()
    b.run(ids[None])
    a.run(ids[None])
    a.__exit__(None, None, None)
    b.run(ids[None])
    b.__exit__(None, None, None)
    assert a.kv() == alone[0].kv()
    assert [stats.k_amax.shape[0] for stats in b.kv().values()] == [2, 2]
    for name, stats in b.kv().items():
        np.testing.assert_array_equal(stats.k_amax[0], stats.k_amax[1])
        np.testing.assert_array_equal(stats.k_amax[0], alone[1].kv()[name].k_amax[0])
    assert dict(ALL_ATTENTION_FUNCTIONS) == table


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_statistics(side: str, models: Callable[..., Path]) -> None:
    for model_type in ("llama", "mixtral"):
        model, sequences = load(models(model_type)), tokens(7, 30, 1)
        expected = observe(model, sequences, histogram=True, per_channel=True)
        batch, mask = torch.full((4, 30), 9), torch.zeros(4, 30, dtype=torch.int64)
        for row, ids in enumerate(sequences):  # the last row stays empty
            columns = slice(30 - len(ids), 30) if side == "left" else slice(0, len(ids))
            batch[row, columns], mask[row, columns] = ids, 1
        with Observer(model, histogram=True, per_channel=True) as padded:
            padded.run(batch, mask)
        assert padded.inputs() == expected.inputs()
        assert padded.kv() == expected.kv()


def test_the_order_of_sequences_changes_no_amax(models: Callable[..., Path]) -> None:
    model, sequences = load(models("mixtral")), tokens(7, 30, 1, 12)
    forward, backward = observe(model, sequences), observe(model, sequences[::-1])
    for name, stats in forward.inputs().items():
        np.testing.assert_array_equal(stats.amax, backward.inputs()[name].amax[::-1])
        np.testing.assert_array_equal(stats.tokens, backward.inputs()[name].tokens[::-1])
    for name, kv in forward.kv().items():
        np.testing.assert_array_equal(kv.k_amax, backward.kv()[name].k_amax[::-1])


def test_blocks_of_the_same_sequence_add_up(models: Callable[..., Path]) -> None:
    model, (short, long) = load(models("llama")), tokens(4, 9)
    alone = observe(model, [short, long]).inputs()
    with Observer(model) as observer:
        for ids in (short, long):
            with observer.sequence(2):
                logits(model, ids)
        with observer.sequence(2):
            pass
    for name, stats in observer.inputs().items():
        assert stats.amax.tolist() == [0.0, 0.0, alone[name].max]
        assert stats.tokens.tolist() == [0, 0, 13]


def test_a_module_called_twice_in_a_pass_takes_the_maximum(models: Callable[..., Path]) -> None:
    model = load(models("llama"))
    linear: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    with Observer(model, histogram=True) as observer, observer.sequence(0):
        for value in (3.0, 5.0, 2.0):
            linear(torch.full((1, 4, 96), value, dtype=torch.bfloat16))
    stats = observer.inputs()["model.layers.0.mlp.down_proj"]
    assert (stats.amax.tolist(), stats.tokens.tolist()) == ([5.0], [12])
    assert stats.histogram is not None
    assert stats.histogram.sum() == 3 * 4 * 96


def test_only_the_selected_sites_are_observed(models: Callable[..., Path]) -> None:
    model, (ids,) = load(models("mixtral")), tokens(5)
    with Checkpoint.open(models("mixtral")) as checkpoint:
        sites = find_sites(model, checkpoint)
    some = Sites(sites.linears[2:3], sites.experts[1:])
    with Observer(model, sites=some) as observer:
        observer.run(ids[None])
    everything = observe(model, [ids]).inputs()
    inputs = observer.inputs()
    assert len(inputs) == 1 + 3 * 4
    for name, stats in inputs.items():
        assert stats.tokens.tolist() == everything[name].tokens.tolist()


def test_a_module_that_no_token_reached_is_recorded_with_zeros(models: Callable[..., Path]) -> None:
    with Observer(load(models("mixtral")), histogram=True, per_channel=True) as observer, observer.sequence(0):
        pass
    inputs = observer.inputs()
    assert len(inputs) == 2 * (4 + 3 * 4)
    for stats in inputs.values():
        assert (stats.amax.tolist(), stats.tokens.tolist()) == ([0.0], [0])
        assert stats.histogram is not None
        assert stats.histogram.shape == (BINS,)
        assert stats.channel_amax is not None
    w2 = inputs["model.layers.1.block_sparse_moe.experts.3.w2"].channel_amax
    assert w2 is not None
    assert w2.shape == (96,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_an_activation_names_the_module_and_the_sequence(bad: float, models: Callable[..., Path]) -> None:
    model, (ids,) = load(models("llama")), tokens(5)
    up: Any = model.get_submodule("model.layers.1.mlp.up_proj")
    with Observer(model) as observer:
        observer.run(ids[None])
        up.weight.data[3, 4] = bad
        with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj: NaN or Inf in its input in sequence 1;"):
            observer.run(ids[None])
    assert observer.sequences == 1
    v: Any = model.get_submodule("model.layers.0.self_attn.v_proj")
    v.weight.data[3, 4] = bad
    with Observer(model) as observer, pytest.raises(NonFiniteError, match=r"0\.self_attn: NaN or Inf in its K or V"):
        observer.run(ids[None])


def test_a_forward_pass_outside_of_a_sequence_is_refused(models: Callable[..., Path]) -> None:
    model, (ids,) = load(models("llama")), tokens(5)
    with Observer(model), pytest.raises(UsageError, match=r"observer\.sequence"):
        logits(model, ids)
    logits(model, ids)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "mxfp4"])
def test_quantized_models_are_observed_under_the_same_names(
    model_type: str, scheme: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    quantize_checkpoint(models(model_type), tmp_path / "quantized", scheme)
    model, sequences = load(tmp_path / "quantized"), tokens(8, 3)
    expected = hooked(model, sequences)
    inputs = observe(model, sequences).inputs()
    assert inputs.keys() == observe(load(models(model_type)), sequences).inputs().keys()
    for path, seen in expected.items():
        if path in inputs:
            assert inputs[path].amax.tolist() == [float(x.abs().max()) for x in seen]
    assert all(stats.total_tokens for name, stats in inputs.items() if ".experts." not in name)
    assert any(stats.total_tokens for name, stats in inputs.items() if ".experts." in name) == (model_type == "mixtral")


def test_weights_that_cannot_be_observed_are_named_in_a_warning(
    models: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.calibration.sites.is_transposed", lambda *_: None)
    inputs = observe(load(models("gpt_oss")), tokens(5)).inputs()
    assert "4 weights are in modules whose inputs cannot be observed: model.layers.0.mlp.experts" in caplog.text
    assert not [name for name in inputs if ".experts" in name]


def test_the_experts_of_llama_4_are_observed_each_with_the_tokens_that_were_routed_to_it(
    make_model: MakeModel, tmp_path: Path
) -> None:
    model: Any = load(make_model(tmp_path / "llama4", "llama4_text", dtype="float32"))
    calls: list[Tensor] = []
    moe = model.get_submodule("model.layers.1.feed_forward")
    hook = moe.register_forward_hook(lambda _, args, __: calls.append(args[0]))
    ids = tokens(40)
    expected = logits(model, ids[0])
    hook.remove()
    observer = observe(model, ids)
    assert torch.equal(logits(model, ids[0]), expected)
    hidden = calls[0].reshape(-1, 64)
    scores = moe.router(hidden)[0]
    for expert in range(4):
        routed = scores[:, expert] > 0
        x = hidden[routed] * scores[routed, expert, None]
        gate, up = (x @ moe.experts.gate_up_proj[expert]).chunk(2, -1)
        product = up * nn.functional.silu(gate)
        for names, inputs in ((("gate_proj", "up_proj"), x), (("down_proj",), product)):
            for name in names:
                stats = observer.inputs()[f"model.layers.1.feed_forward.experts.{expert}.{name}"]
                assert stats.total_tokens == int(routed.sum())
                if stats.total_tokens:
                    assert stats.max == pytest.approx(float(inputs.detach().abs().max()), rel=1e-6)
    assert sum(
        stats.total_tokens for name, stats in observer.inputs().items() if ".1.feed_forward.experts." in name
    ) == (3 * 40)
