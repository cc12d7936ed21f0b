"""A step of the device's decoder against the CPU decoder's reference and transformers; its graphs and their buffers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_cases import prompt
from native_cases import VOCAB, model_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.engine.blueprint import blueprint_of
from minifloat.engine.cache import blocks_for
from minifloat.engine.device_decoder import FusedLinear, Inputs, Piece, build_device_decoder, step
from minifloat.engine.device_runner import COLUMNS, DeviceRunner, bucket_sizes
from minifloat.engine.device_sampling import draw
from minifloat.engine.scheduler import WorkItem
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache
from minifloat.model.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

NAMES = ["llama", "mistral", "qwen2", "qwen3"]
BLOCKS, ROWS, LENGTH = 40, 9, 128


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


class ModelWeights:
    """The weights of a model in memory, by the methods of `WeightSource`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def tensor(self, parameter: str) -> Tensor:
        return self.model.get_parameter(parameter).detach()  # type: ignore[no-any-return]

    def matrix(self, parameter: str) -> Any:
        module = self.model.get_submodule(parameter.removesuffix(".weight"))
        return module.quantized if isinstance(module, QuantizedLinear) else self.tensor(parameter)

    def is_same_tensor(self, first: str, second: str) -> bool:
        return False

    def reading_ahead(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warn(self) -> None: ...


def device_decoder(model: Any, impl: str = "auto", device: str = "cpu") -> Any:
    weights: Any = ModelWeights(copy.deepcopy(model).to(device))
    blueprint = blueprint_of(model.config, model.dtype)
    return build_device_decoder(blueprint, weights, LENGTH, impl=impl, lm_head=None)


def runner_of(model: Any, element: str = "float32", device: str = "cpu") -> DeviceRunner:
    decoder = device_decoder(model, device=device)
    runner = DeviceRunner(decoder, BLOCKS, element, None, max_num_seqs=ROWS, max_model_len=LENGTH)
    runner._cache.data[:, :BLOCKS].view(torch.uint8).fill_(0xFF)  # NaN, but where filling rows write
    return runner


class Sequences:
    """Sequences whose blocks are handed out in no order."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner, self.held = runner, dict[str, Any]()
        self._free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()

    def run(self, new: dict[str, Sequence[int]], cut: int = 0) -> dict[str, Tensor]:
        """Logits after new tokens of some sequences; `cut`: the last tokens that are left for another step."""
        works = []
        for name, tokens in new.items():
            sequence = self.held.setdefault(name, SimpleNamespace(request_id=name, tokens=[], blocks=[], done=0))
            sequence.tokens = [*sequence.tokens, *tokens]
            while len(sequence.blocks) < blocks_for(len(sequence.tokens)):
                sequence.blocks = [*sequence.blocks, self._free.pop()]
            works.append(
                WorkItem(sequence, sequence.done, len(sequence.tokens) - (cut if len(tokens) > cut + 1 else 0))
            )
            sequence.done = works[-1].end
        logits = self.runner.run(works).to("cpu", copy=True)
        return dict(zip([work.sequence.request_id for work in works if work.samples], logits, strict=True))


@devices
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers_in_mixed_batches(name: str, device: str) -> None:
    model = model_of(name)
    mine = Sequences(runner_of(model, device=device))
    texts: dict[str, list[int]] = {}
    batches = [
        {"a": prompt(50), "b": prompt(1, 1), "c": prompt(33, 2)},  # pieces and a single token
        {"a": [1], "d": prompt(17, 3), "b": [2], "c": [3]},  # tokens and a piece between them
        {"a": [5], "b": [6], "c": [7], "d": [8]},  # by a graph
        {"d": [9], "a": [4], "c": prompt(20, 4)},  # a piece in the middle of a text
        {"d": [9], "b": [3], "c": [1]},
    ]
    for batch in batches:
        found = mine.run(batch)
        for each, tokens in batch.items():
            texts[each] = [*texts.get(each, []), *tokens]
            whole = model(torch.tensor([texts[each]])).logits[0, -1].detach()
            torch.testing.assert_close(found[each], whole, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_pieces_ends_in_the_logits_of_the_whole(name: str) -> None:
    model = model_of(name)
    text = prompt(90)
    sequences = Sequences(runner_of(model))
    assert sequences.run({"a": text}, cut=60) == {}
    (found,) = sequences.run({"a": []}).values()
    torch.testing.assert_close(found, model(torch.tensor([text])).logits[0, -1].detach(), atol=5e-5, rtol=1e-4)


@devices
@pytest.mark.parametrize("element", ["float32", "E4M3"])
def test_every_batch_size_gives_every_row_its_own_logits_and_writes_no_block_of_others(
    element: str, device: str
) -> None:
    sequences = Sequences(runner_of(model_of("qwen3"), element, device))
    names = [f"s{i}" for i in range(ROWS)]
    sequences.run({name: prompt(5 + 4 * i, i) for i, name in enumerate(names)})
    cache, used = sequences.runner._cache, 0
    for count in range(1, ROWS + 1):
        alone = {}
        for name in names[:count]:
            sequence = sequences.held[name]
            kept = (list(sequence.tokens), sequence.done)
            alone[name] = sequences.run({name: [count]})[name]
            sequence.tokens, sequence.done = kept
        before = cache.data.clone()
        together = sequences.run({name: [count] for name in names[:count]})
        for name in names[:count]:
            torch.testing.assert_close(together[name], alone[name], atol=2e-5, rtol=1e-5)
        owned = {block for name in names[:count] for block in sequences.held[name].blocks}
        others = [block for block in range(BLOCKS) if block not in owned]
        used = len(others)
        assert torch.equal(cache.data[:, others].view(torch.uint8), before[:, others].view(torch.uint8))
    assert used > 0
    assert bucket_sizes(ROWS) == [1, 2, 4, 8, 9]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(1) == [1]


def test_nan_in_one_sequence_does_not_reach_the_others() -> None:
    runner = runner_of(model_of("llama"))
    sequences = Sequences(runner)
    sequences.run({"a": prompt(20), "b": prompt(20, 1)})
    clean = sequences.run({"a": [1], "b": [2]})
    runner._cache.data[:, sequences.held["a"].blocks] = torch.nan
    for sequence in sequences.held.values():
        sequence.tokens, sequence.done = sequence.tokens[:-1], sequence.done - 1
    found = sequences.run({"a": [1], "b": [2]})
    assert found["a"].isnan().all()
    assert torch.equal(found["b"], clean["b"])


def test_a_replay_reads_and_writes_the_memory_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []

    def watched(decoder: Any, cache: Any, inputs: Inputs) -> Tensor:
        if not inputs.pieces:  # prompts run without a graph
            seen.append((inputs.rows.data_ptr(), inputs.tables.data_ptr(), cache.data.data_ptr()))
        return step(decoder, cache, inputs)

    monkeypatch.setattr("minifloat.engine.device_runner.step", watched)
    runner = runner_of(model_of("llama"))
    graphs = runner._graphs
    captured = set(seen)
    assert len(seen) == len(bucket_sizes(ROWS))  # one capture each
    base = graphs.inputs.data_ptr()
    assert captured == {(base, base + COLUMNS * graphs.inputs.itemsize, runner._cache.data.data_ptr())}
    sequences = Sequences(runner)
    sequences.run({"a": prompt(20), "b": prompt(20, 1), "c": prompt(7, 2)})
    logits = graphs.logits.data_ptr()
    for batch in ({"a": [1]}, {"a": [2], "b": [1]}, {"a": [3], "b": [2], "c": [1]}):
        sequences.run(batch)
        assert (
            runner.run(
                [WorkItem(sequence, sequence.done - 1, sequence.done) for sequence in sequences.held.values()]
            ).data_ptr()
            == logits
        )
    assert set(seen) == captured


@needs_gpu
@pytest.mark.parametrize("element", ["float32", "bfloat16", "E4M3"])
def test_a_graph_computes_what_a_call_does_and_the_same_bits_every_time(element: str) -> None:
    runner = runner_of(model_of("mistral"), element, "cuda")
    sequences = Sequences(runner)
    sequences.run({"a": prompt(70), "b": prompt(20, 1), "c": prompt(7, 2)})
    sequences.run({"a": [1], "b": [2], "c": [3]})
    works = [WorkItem(sequence, sequence.done - 1, sequence.done) for sequence in sequences.held.values()]
    first, again = runner.run(works).clone(), runner.run(works).clone()
    assert torch.equal(first, again)
    rows = runner._graphs.inputs[:3]
    with torch.no_grad():
        called = step(runner._decoder, runner._cache, Inputs(rows[:, :COLUMNS], rows[:, COLUMNS:]))
    torch.testing.assert_close(first, called.float(), atol=1e-4, rtol=1e-4)


def quantized(model: Any, scheme: str) -> Any:
    """The model with its linears quantized."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            weight = quantize_tensor(module.weight.detach(), SCHEMES[scheme].weight)
            swapped = QuantizedLinear(weight, torch.float32)
            swapped.register_parameter("bias", module.bias)
            model.set_submodule(name, swapped)
    return model


@pytest.mark.parametrize(
    ("scheme", "impl"), [(None, "auto"), ("mxfp4", "auto"), ("fp8-dynamic", "auto"), ("nvfp4", "reference")]
)
@pytest.mark.parametrize("element", ["float32", "E4M3"])
def test_a_step_of_tokens_depends_on_no_value(scheme: str | None, impl: str, element: str) -> None:
    """Tensors without values go through: an `.item()`, or a shape made of values, would raise."""
    model = model_of("qwen3") if scheme is None else quantized(model_of("qwen3"), scheme)
    decoder = device_decoder(model, impl)
    cache = PagedCache(3, 2, 24, BLOCKS, element, torch.device("cpu"), ROWS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        rows = mode.from_tensor(torch.zeros(4, COLUMNS + 8, dtype=torch.int32))
        logits = step(decoder, cache, Inputs(rows[:, :COLUMNS], rows[:, COLUMNS:]))
        assert tuple(logits.shape) == (4, decoder.vocab)
        drawn = [draw(logits.float(), torch.ones(4, 5).double(), most=most) for most in (0, 7, VOCAB)]
        assert [tuple(tensor.shape) for tensor in drawn] == [(4,)] * 3


def without_values(value: Any) -> Any:
    """The same on the meta device."""
    if isinstance(value, Tensor):
        return value.detach().to("meta")
    if isinstance(value, tuple):
        return tuple(map(without_values, value))
    if is_dataclass(value):
        return type(value)(**{field.name: without_values(getattr(value, field.name)) for field in fields(value)})
    return value


@pytest.mark.parametrize("element", ["bfloat16", "E4M3"])
def test_all_that_a_step_makes_is_on_the_device_of_its_inputs(element: str) -> None:
    """With pieces too; a tensor that is made on the CPU beside the meta device's would raise."""
    decoder = without_values(device_decoder(model_of("qwen2").bfloat16()))
    cache = PagedCache(3, 2, 16, BLOCKS, element, torch.device("meta"), ROWS)
    rows, tables, blocks, chosen = (
        torch.zeros(shape, dtype=torch.int32, device="meta") for shape in ((60, COLUMNS), (4, 8), (5,), (6,))
    )
    pieces = (Piece(slice(4, 40), 0, blocks[:3]), Piece(slice(40, 60), 45, blocks))
    logits = step(decoder, cache, Inputs(rows, tables, pieces, chosen))
    assert (tuple(logits.shape), logits.device.type, logits.dtype) == ((6, VOCAB), "meta", torch.bfloat16)
    with pytest.raises(RuntimeError, match="device"):
        step(replace(decoder, norm=torch.ones(64)), cache, Inputs(rows, tables, pieces, chosen))
    settings = torch.ones(6, 5, dtype=torch.float64, device="meta")
    assert all(draw(logits.float(), settings, most=most).is_meta for most in (0, 7, VOCAB))


@pytest.mark.parametrize(
    ("scheme", "growth", "pieces"),
    [
        *((scheme, 8.0, 1) for scheme in ("fp8", "fp8-dynamic", "mxfp4", "mxfp8", "fp8-static")),
        ("nvfp4", 1.0, 1),
        ("nvfp4", 8.0, 3),
    ],
)
def test_products_with_one_input_are_one_where_their_scales_allow_it(scheme: str, growth: float, pieces: int) -> None:
    """A scale per tensor becomes one per row; NVFP4's second scale is the whole tensor's, and has to be the same."""
    plain, model = model_of("llama"), model_of("llama")
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data *= growth
    attention.v_proj.weight.data *= growth**2
    model = quantized(model, scheme)
    layer = device_decoder(model).layers[0]
    assert len(layer.qkv.weights) == pieces
    x = torch.randn(3, 64)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = torch.cat([part(x) for part in parts], dim=-1).detach()
    torch.testing.assert_close(layer.qkv(x), expected, atol=1e-6 * growth**2 + 1e-5, rtol=1e-5)
    assert isinstance(layer.qkv.weights[0], QuantizedWeight)
    own = device_decoder(plain).layers[0].qkv
    assert isinstance(own, FusedLinear)
    assert [tuple(weight.shape) for weight in own.weights if isinstance(weight, Tensor)] == [(128, 64)]


def test_blocks_of_128_rows_are_put_side_by_side_only_where_no_block_is_shared() -> None:
    from minifloat.engine.device_decoder import _side_by_side

    spec = SCHEMES["fp8-block"].weight
    wide, narrow = (quantize_tensor(torch.randn(rows, 64), spec) for rows in (256, 40))
    both = _side_by_side([wide, narrow])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([wide.dequantize(), narrow.dequantize()]))
    assert _side_by_side([narrow, wide]) is None


def test_cache_rows_are_rows_of_blocks() -> None:
    """The tables that the tests above hand out are what they say."""
    runner = runner_of(model_of("llama"))
    sequences = Sequences(runner)
    sequences.run({"a": prompt(20)})
    blocks = sequences.held["a"].blocks
    written = ~runner._cache.data[0, :, 0].isnan().all(dim=(1, 3))
    assert written[blocks[0]].all()
    assert written[blocks[1]].tolist() == [True] * 4 + [False] * (BLOCK_TOKENS - 4)
