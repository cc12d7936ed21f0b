"""What a run with data takes, known before it: time, memory and disk, from shapes and the speed of a machine.

Time is operations over rates. Nothing here reads a weight or imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from minifloat.calibration.options import BATCH_TOKENS, TextOptions
from minifloat.kernels import processors
from minifloat.kernels.native import CONSTANTS
from minifloat.model.architecture.roles import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    decoder_layer,
    expert_group,
    fused_group,
    text_config,
)

#: A weight ``[N, K]`` of the output by the name of its module.
Shapes = Mapping[str, tuple[int, int]]

#: Text that codes are chosen with by default; `minifloat.quantize.amount` says how many sequences.
DEFAULT_TEXT = TextOptions(samples=None, seq_len=256, held_out=0.1)
#: Sequences of a model with narrow linears: 64 Ki tokens of the default length, and a tenth more that is held out.
FEWEST_SEQUENCES = 284

#: Fewer tokens than this per input channel determine a Hessian badly.
TOKENS_PER_CHANNEL = 4

#: Rows of held-out inputs, and products with them for each weight: errors of outputs, and the factor of the target.
_ROWS, _ROW_PRODUCTS = 512, 5
#: Passes of the quantized stream through a layer: its stages begin anew, from what finished modules gave.
_QUANTIZED_PASSES = 1.2
#: Operations for each channel of a search for folded scales: 6 candidates on 1024 rows of inputs and 512 of weights.
_FOLD = 12 * 1024 * 512
#: Rows that one thread solves for, and of a tile of a factorization.
_TILE = 512
#: Pauses of a layer in a step of the engine that writes text, with its share of sampling.
_PAUSES_OF_STEP = 2
#: Bytes for each entry of a Hessian while it is factorized: itself, its triangle in float64, and the factor in float32.
_FACTORIZATION_BYTES = 4 + 4 + 4
#: Bytes for each weight that is rounded: in float32, its target, another order of it, and codes.
_WEIGHT_BYTES = 4 + 4 + 4 + 2
#: Bytes for each channel of the rows that are multiplied together: 4,096 of two streams, and both joined, in 16 bits.
_CHUNK_BYTES = 4096 * 2 * 2 * 2
#: Bytes of the process beside the model, with what a batch of sequences takes within a layer.
_PROCESS_BYTES = 7 << 28
#: Sequences that the engine decodes together, with one that is thrown away.
_TOGETHER = 64
#: Tokens whose gradients are taken for the moments of outputs, with the hidden states of all layers in so many bytes.
_MOMENT_TOKENS, _MOMENT_BYTES = 16384, 8 << 30
#: Passes of these tokens: forward, and once more with the way back.
_MOMENT_PASSES = 4
#: Share of the available memory that weights may take beside the cache of the engine.
WEIGHTS_SHARE = 0.8


def held_out_of(samples: int, fraction: float) -> int:
    """Return how many of some sequences are held out: half of them to choose on, half to be reported only."""
    return max(2, round(samples * fraction))


@dataclass(frozen=True)
class Tokens:
    """The tokens of the parts of a text, in sequences of one length."""

    kept: int
    choosing: int
    reported: int
    length: int

    @classmethod
    def of(cls, samples: int, text: TextOptions) -> Tokens:
        """Return the tokens of so many whole sequences, of which a fraction is held out."""
        held_out = held_out_of(samples, text.held_out)
        parts = max(samples - held_out, 0), held_out - held_out // 2, held_out // 2
        kept, choosing, reported = (sequences * text.seq_len for sequences in parts)
        return cls(kept, choosing, reported, text.seq_len)

    @property
    def total(self) -> int:
        return self.kept + self.choosing + self.reported

    @property
    def held_out(self) -> int:
        return self.choosing + self.reported


@dataclass(frozen=True)
class Rates:
    """Operations per second of a machine, of each kind of work, on all threads."""

    forward: float  # products of inputs and weights in the model's dtype
    gram: float  # sums of products of inputs
    factor: float  # of Cholesky, in float64
    single: float  # products in float32
    solve: float  # triangular solves in float32, on one thread
    feedback: float  # rounding with feedback
    cast: float  # weights that are cast, judged and put into the model
    read: float  # bytes of memory
    pause: float = 0.002  # seconds that a batch spends between the products of a layer, in each of its passes

    @classmethod
    def of_product(cls, rate: float) -> Rates:
        """Return usual rates of a machine whose product of BF16 matrices has a rate."""
        one_thread = 0.6 * rate / processors.limit()
        return cls(rate, rate, 0.3 * rate, 0.6 * rate, one_thread, 0.4 * rate, rate / 4e3, rate / 2)


@dataclass(frozen=True)
class Work:
    """Operations of each kind; see `Rates`."""

    forward: float = 0.0
    gram: float = 0.0
    factor: float = 0.0
    single: float = 0.0
    solve: float = 0.0
    feedback: float = 0.0
    cast: float = 0.0
    passes: float = 0.0  # of a batch through a layer

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def seconds(self, rates: Rates) -> float:
        """Return the time of the work, one kind after the other."""
        speeds = asdict(rates)
        times = (count / speeds[kind] for kind, count in asdict(self).items() if kind != "passes")
        return math.fsum(times) + self.passes * rates.pause


@dataclass(frozen=True)
class Search:
    """What a run does beside rounding once: it measures something first, and may round again."""

    what: str  # is measured, in words
    work: Work
    disk: int  # bytes, while a layer is measured
    again: int  # roundings after the first, at most

    @classmethod
    def of_streams(
        cls, what: str, streams: Sequence[tuple[int, int]], shapes: Shapes, config: Mapping[str, Any], again: int
    ) -> Search:
        """Return the work of streams through the model: of each the tokens, and the share of the layers in percent."""
        weights, layers = sum(rows * width for rows, width in shapes.values()), layers_of(shapes)
        passes = sum(tokens * percent for tokens, percent in streams) / 100
        work = Work(forward=2.0 * weights * passes, passes=layers * passes / BATCH_TOKENS)
        disk = 2 * 2 * sum(tokens for tokens, _ in streams) * _size(config, "hidden_size")
        return cls(what, work, disk, again)


@dataclass(frozen=True)
class Group:
    """Linears of one input."""

    rows: int
    width: int
    members: int
    is_expert: bool


def rounding_work(shapes: Shapes, config: Mapping[str, Any], tokens: Tokens, *, follows: bool = True) -> Work:
    """Return the work of rounding the weights of a model; `follows`: with the inputs of the quantized layers."""
    quantized = _QUANTIZED_PASSES * (tokens.kept + tokens.choosing) + tokens.reported if follows else tokens.held_out
    layers = layers_of(shapes)
    moments = min(moment_tokens(config, layers, 2), tokens.kept) if follows else 0
    passes = tokens.total + tokens.held_out + quantized + _MOMENT_PASSES * moments
    work, share = Work(), visited_share(config)
    for group in _groups(shapes):
        visits = share if group.is_expert else 1.0
        work += Work(forward=2.0 * group.rows * group.width * passes * visits)
        work += group_work(group, tokens.kept * visits, follows=follows)
    logits = 3.0 * (tokens.held_out + moments) * _size(config, "vocab_size") * 2.0 * _size(config, "hidden_size")
    attention = 2.0 * tokens.length * _size(config, "hidden_size") * layers * passes
    return work + Work(forward=logits + attention, passes=layers * passes / max(tokens.length, BATCH_TOKENS))


def group_work(group: Group, tokens: float, *, follows: bool) -> Work:
    """Return the work on the statistics and the codes of linears of one input."""
    squares, weights = float(group.width) ** 2, float(group.rows) * group.width
    gram, single = tokens * squares, 2.0 * _ROWS * _ROW_PRODUCTS * weights + _FOLD * group.width
    forward = solve = 0.0
    if follows:
        adds = group.members == 1 and not group.is_expert  # its outputs go to the residual stream
        gram += 2.0 * tokens * (weights if adds else squares)
        forward = 2.0 * tokens * weights if adds else 0.0
        single += 0.0 if adds else 2.0 * group.rows * squares
        solve = 2.0 * _TILE * math.ceil(group.rows / _TILE / processors.limit()) * squares
    factor = squares * (group.width / 3.0 + 2 * _TILE)  # tiles on the diagonal, and the copies, are slower
    factor *= 2.0 if follows else 1.0  # another one with the ridge of the target
    return Work(forward, gram, factor, single, solve, group.rows * squares, weights)


def _groups(shapes: Shapes) -> Iterable[Group]:
    found: dict[str, list[tuple[str, tuple[int, int]]]] = {}
    for module, shape in shapes.items():
        found.setdefault(fused_group(module), []).append((module, shape))
    for members in found.values():
        rows, width = sum(shape[0] for _, shape in members), members[0][1][1]
        yield Group(rows, width, len(members), expert_group(members[0][0]) is not None)


def visited_share(config: Mapping[str, Any]) -> float:
    """Return the share of the experts of a layer that a token visits; 1 without experts, or where it is not known."""
    fields_ = text_config(config)
    experts = next((fields_[name] for name in EXPERTS if fields_.get(name)), 0)
    visited = next((fields_[name] for name in EXPERTS_PER_TOKEN if isinstance(fields_.get(name), int)), experts)
    return min(visited / experts, 1.0) if experts else 1.0


def moment_tokens(config: Mapping[str, Any], layers: int, itemsize: int) -> int:
    """Return the tokens of text whose gradients are taken for the moments of outputs, at most."""
    return min(_MOMENT_TOKENS, _MOMENT_BYTES // max((layers + 1) * _size(config, "hidden_size") * itemsize, 1))


def rounding_memory(shapes: Shapes, itemsize: int) -> int:
    """Return the bytes of memory: one layer, and the statistics, factors and weights of its widest stage."""
    layers: dict[int | None, int] = {}
    for module, (rows, width) in shapes.items():
        layers[decoder_layer(module)] = layers.get(decoder_layer(module), 0) + rows * width * itemsize
    stages = (
        group.width
        * (_FACTORIZATION_BYTES * group.width + 4 * _drift_rows(group) + _WEIGHT_BYTES * group.rows + _CHUNK_BYTES)
        for group in _groups(shapes)
    )
    return max(layers.values(), default=0) + max(stages, default=0) + _PROCESS_BYTES


def _drift_rows(group: Group) -> int:
    return group.rows if group.members == 1 else group.width


def rounding_disk(shapes: Shapes, config: Mapping[str, Any], tokens: Tokens, itemsize: int, output_bytes: int) -> int:
    """Return the bytes of the work folders: hidden states around a layer, inputs of its stages, finished layers.

    Before that, hidden states of all layers for the moments of outputs, which stay.
    """
    hidden = _size(config, "hidden_size")
    streams = 2 * (2 * tokens.total + tokens.held_out) * hidden
    layers: dict[int | None, int] = {}
    for group, module in zip(_groups(shapes), dict.fromkeys(map(fused_group, shapes)), strict=True):
        if not group.is_expert:
            residual = hidden if group.members == 1 else 0
            layers[decoder_layer(module)] = layers.get(decoder_layer(module), 0) + group.width + residual
    inputs = 2 * max(layers.values(), default=0) * (tokens.kept + tokens.choosing)  # of the original and finished ones
    states = (len(layers) + 1) * moment_tokens(config, len(layers), itemsize) * hidden
    moments = sum(CONSTANTS["ROW_BLOCK"] * 4 * rows for rows, _ in shapes.values())
    return max(streams + inputs, states) * itemsize + moments + output_bytes


def writing_seconds(weights: float, nbytes: float, layers: int, sequences: int, length: int, rates: Rates) -> float:
    """Return the time in which a model with so many weights for each token writes sequences of one length."""
    steps = math.ceil(sequences / _TOGETHER) * length
    rows = min(sequences, _TOGETHER) + 1
    product = max(2.0 * weights * rows / rates.forward, nbytes / rates.read)
    return steps * (product + _PAUSES_OF_STEP * layers * rates.pause)


def layers_of(shapes: Iterable[str]) -> int:
    """Return the number of layers that some modules are in."""
    return len({decoder_layer(module) for module in shapes})


def _size(config: Mapping[str, Any], name: str) -> int:
    value = text_config(config).get(name)
    return value if isinstance(value, int) else 0


def shapes_of(rows: Iterable[tuple[str, Sequence[int]]]) -> dict[str, tuple[int, int]]:
    """Return weights by module, from names and shapes of tensors."""
    return {name.removesuffix(".weight"): (math.prod(shape[:-1]), shape[-1]) for name, shape in rows}
