"""The smaller measurements of `benchmarks/linear.py`: the cost of a call, of packing, and of separate calls.

Each function prints its table and returns the samples for JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import click
import torch
from linear_bars import BASELINE
from linear_contenders import Shape, source
from linear_settings import Settings
from linear_shapes import MODELS
from timing import Contender, measure, ratio, spread
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.linear import linear, linear_fused
from minifloat.kernels.pack import PackedWeight, pack
from minifloat.numerics.tensor import QuantizedTensor

Samples = dict[str, dict[str, list[float]]]

TINY: Shape = (32, 64)
TINY_CALLS = 5000
#: Largest allowed overhead of a call of our kernels, in microseconds.
OVERHEAD_BAR = 5.0
PACKED_SHAPE: Shape = (14336, 4096)
FUSED_M = (1, 16)
#: Small models: the smaller the weights, the larger the share of the call overhead.
FUSED_MODELS = ("llama-1b", "qwen3-0.6b")


def overhead(settings: Settings, _bandwidth: float) -> Samples:
    """Measure a call at M = 1 on a weight so small that only the overhead of the call remains."""
    weights = {BASELINE: torch.randn(TINY).to(torch.bfloat16)}
    compared = [Contender(BASELINE, functional.linear, [weights[BASELINE]] * TINY_CALLS, weights[BASELINE].nbytes)]
    for name in settings.formats:
        packed = pack(source(name, TINY))
        compared.append(Contender(name, linear, [packed] * TINY_CALLS, packed.nbytes))
    samples = measure(compared, 1, TINY[1], settings.rounds, settings.seconds)
    click.echo(f"\nper call, M=1, {TINY[0]}x{TINY[1]} (ours: at most {OVERHEAD_BAR:g} us)")
    click.echo(f"{'':<14} {'us':>7} {'+-%':>4} {'x torch':>8}  verdict")
    for name, values in samples.items():
        us = statistics.median(values) * 1e6
        verdict = "" if name == BASELINE else "pass" if us <= OVERHEAD_BAR else f"{us - OVERHEAD_BAR:.1f} us over"
        faster = ratio(samples[BASELINE], values)
        click.echo(f"{name:<14} {us:7.2f} {spread(values) * 50:4.0f} {faster:8.2f}  {verdict}".rstrip())
    return {"M=1": samples}


def packing(settings: Settings, bandwidth: float) -> Samples:
    """Compare packing with copies of the same bytes into existing memory and, as packing does, into new memory."""
    click.echo(
        f"\npacking {PACKED_SHAPE[0]}x{PACKED_SHAPE[1]}, GB/s of the checkpoint's bytes; read: {bandwidth / 1e9:.1f}"
    )
    click.echo(f"{'':<14} {'pack':>7} {'+-%':>4} {'copy':>7} {'clone':>7} {'/ read':>7} {'/ copy':>7} {'/ clone':>7}")
    result: Samples = {}
    for name in settings.formats:
        weights = _sources(name, settings.nbytes)
        size = _bytes_of(weights[0])
        room = torch.empty(size, dtype=torch.uint8)
        raw = [_codes(weight).view(torch.uint8).view(-1) for weight in weights]
        copy_to = room[: raw[0].numel()]
        compared = [
            Contender("copy", lambda _, codes, to=copy_to: to.copy_(codes), raw, size),  # type: ignore[misc]
            Contender("clone", lambda _, codes: codes.clone(), raw, size),
            Contender("pack", lambda _, weight: pack(weight), weights, size),
        ]
        samples = measure(compared, 1, 1, settings.rounds, settings.seconds)
        rates = {key: size / statistics.median(values) / 1e9 for key, values in samples.items()}
        against = [rates["pack"] / limit for limit in (bandwidth / 1e9, rates["copy"], rates["clone"])]
        click.echo(
            f"{name:<14} {rates['pack']:7.1f} {spread(samples['pack']) * 50:4.0f} {rates['copy']:7.1f} "
            f"{rates['clone']:7.1f}" + "".join(f"{share:8.2f}" for share in against)
        )
        result[name] = samples
    return result


def fused(settings: Settings, _bandwidth: float) -> Samples:
    """Compare several weights with one input in one call, in a call for each, and with torch BF16 for each."""
    click.echo("\nweights that share an input: us for all of them, and what one call gains over one call each")
    click.echo(f"{'':<20} {'M':>4} {'':<10} {'torch BF16':>11} {'each':>9} {'one call':>9} {'gain':>6} {'x torch':>8}")
    result: Samples = {}
    for model_name in FUSED_MODELS:
        model = MODELS[model_name]
        for layer, shapes in model.together.items():
            for name in settings.formats:
                compared = _fused_contenders(name, shapes, settings.nbytes)
                for m in FUSED_M:
                    samples = measure(compared, m, model.hidden, settings.rounds, settings.seconds)
                    us = {key: statistics.median(values) * 1e6 for key, values in samples.items()}
                    click.echo(
                        f"{model_name + '/' + layer:<20} {m:>4} {name:<10} {us[BASELINE]:11.1f} {us['each']:9.1f} "
                        f"{us['one call']:9.1f} {ratio(samples['each'], samples['one call']):6.2f} "
                        f"{ratio(samples[BASELINE], samples['one call']):8.2f}"
                    )
                    result[f"{model_name}/{layer} M={m} {name}"] = samples
    return result


def _fused_contenders(name: str, shapes: tuple[Shape, ...], nbytes: int) -> list[Contender]:
    plain = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    size = sum(weight.nbytes for weight in plain)
    baseline = [[weight.clone() for weight in plain] for _ in range(-(-nbytes // size))]
    sources = [source(name, shape) for shape in shapes]
    first = [pack(weight) for weight in sources]
    packed_size = sum(weight.nbytes for weight in first)
    ours = [first, *([pack(weight) for weight in sources] for _ in range(-(-nbytes // packed_size) - 1))]

    def each(x: Tensor, weights: Sequence[PackedWeight]) -> None:
        for weight in weights:
            linear(x, weight)

    def torch_each(x: Tensor, weights: Sequence[Tensor]) -> None:
        for weight in weights:
            functional.linear(x, weight)

    return [
        Contender(BASELINE, torch_each, baseline, size),
        Contender("each", each, ours, packed_size),
        Contender("one call", linear_fused, ours, packed_size),
    ]


def _sources(name: str, nbytes: int) -> list[QuantizedTensor | Tensor]:
    """Return distinct weights of `PACKED_SHAPE` as a checkpoint stores them."""
    first = source(name, PACKED_SHAPE)
    count = -(-nbytes // _bytes_of(first)) - 1
    if isinstance(first, Tensor):
        return [first, *(first.clone() for _ in range(count))]
    return [first, *(replace(first, codes=first.codes.clone(), scale=first.scale.clone()) for _ in range(count))]


def _bytes_of(weight: QuantizedTensor | Tensor) -> int:
    return weight.nbytes


def _codes(weight: QuantizedTensor | Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.codes
