"""Chooses and applies folded scales: powers of two that move from the input of linears into what comes before them.

Channels of large activations decide the error of the output.

Source: AWQ (arXiv 2306.00978), section 3.2; for quantized inputs SmoothQuant (arXiv 2211.10438), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels.inputs import round_inputs
from minifloat.model.architecture.folding import FoldSite
from minifloat.numerics.activation import static_scale
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import amax
from minifloat.numerics.scheme import ActivationSpec, Scheme, WeightSpec
from minifloat.quantize.rounding.methods import Grid

#: Rows of all weights of a site on which the loss is computed, rounded up to one block.
MAX_ROWS = 512
#: Expected number of calls of `OutputLoss.total`, by which the cheaper way of computing it is picked.
CANDIDATES = 5


class OutputLoss:
    """Squared error of the outputs of one site's linears."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        spec: WeightSpec,
        inputs: Tensor,
        activation: ActivationSpec | None,
        shares: Sequence[int] | None,
    ) -> None:
        self.spec, self.inputs, self.activation = spec, inputs, activation
        groups = [0] * len(weights) if shares is None else list(shares)
        self._slabs = [(groups[i], slab) for i, slab in _sample_rows(weights, spec)]
        self._column_amax = _column_amax(weights, groups) if spec.needs_tensor_amax else {}
        tokens, channels = inputs.shape
        rows = sum(slab.shape[0] for _, slab in self._slabs)
        by_gram, by_tokens = channels * (tokens + CANDIDATES * rows), 2 * CANDIDATES * tokens * rows
        self.uses_gram = activation is None and by_gram < by_tokens
        self._gram = inputs.T @ inputs if self.uses_gram else None
        self._exact: tuple[Tensor, list[Tensor]] | None = None  # the last inputs of `per_token`, and their outputs

    def total(self, exponents: Tensor) -> float:
        """Return the loss on the inputs for int32 ``[K]`` exponents, summed over tokens and sampled rows."""
        if self._gram is None:
            return float(self.per_token(self.inputs, exponents)[0].sum())
        errors = (self._folded(group, slab, exponents) - slab for group, slab in self._slabs)
        return sum(float(((error @ self._gram) * error).sum(dtype=torch.float64)) for error in errors)

    def per_token(self, inputs: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and the squared norm of its outputs, float64 ``[T]`` each."""
        loss = torch.zeros(inputs.shape[0], dtype=torch.float64)
        norm = torch.zeros_like(loss)
        seen = inputs if self.activation is None else self._rounded_inputs(inputs, exponents)
        if self._exact is None or self._exact[0] is not inputs:
            self._exact = inputs, [inputs @ slab.T for _, slab in self._slabs]
        for (group, slab), outputs in zip(self._slabs, self._exact[1], strict=True):
            rounded = seen @ self._folded(group, slab, exponents).T
            loss += (rounded - outputs).square().sum(1)
            norm += outputs.square().sum(1)
        return loss, norm

    def _folded(self, group: int, slab: Tensor, exponents: Tensor) -> Tensor:
        """Return a slab rounded to nearest with its columns scaled, and scaled back."""
        scale = powers_of_two(exponents)
        largest = float((self._column_amax[group] * scale).amax()) if self._column_amax else None
        return Grid.of(slab * scale, self.spec, largest).nearest.dequantize().div_(scale)

    def _rounded_inputs(self, inputs: Tensor, exponents: Tensor) -> Tensor:
        """Return inputs divided by the scales, quantized, and multiplied back."""
        assert self.activation is not None
        scale = powers_of_two(exponents)
        largest = amax(self.inputs / scale, TENSOR) if self.activation.needs_calibration else None
        static = None if largest is None else static_scale(self.activation, largest)
        return round_inputs(inputs / scale, self.activation, static).mul_(scale)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return ``2**exponents`` as float32, exact, for int32 exponents of normal numbers."""
    return ((exponents + FLOAT32.bias) << FLOAT32.mantissa_bits).view(torch.float32)


def _sample_rows(weights: Sequence[Tensor], spec: WeightSpec) -> list[tuple[int, Tensor]]:
    block = spec.granularity.rows or 1
    starts = [(i, start) for i, weight in enumerate(weights) for start in range(0, weight.shape[0], block)]
    count = min(len(starts), max(1, MAX_ROWS // block))
    picked: dict[int, list[int]] = {}
    for k in range(count):
        i, start = starts[k * len(starts) // count]
        picked.setdefault(i, []).extend(range(start, min(start + block, weights[i].shape[0])))
    return [(i, weights[i][torch.tensor(rows)].float()) for i, rows in picked.items()]


def _column_amax(weights: Sequence[Tensor], groups: Sequence[int]) -> dict[int, Tensor]:
    """Return the largest magnitude of each column, float32 ``[K]``, over the weights of each group."""
    found: dict[int, Tensor] = {}
    for group, weight in zip(groups, weights, strict=True):
        columns = weight.abs().amax(0).float()
        found[group] = torch.maximum(found[group], columns) if group in found else columns
    return found


#: Powers of the activations' magnitude that are tried.
ALPHAS = (0.25, 0.5, 0.75, 1.0)
#: Folding must lower the loss on held-out inputs by this fraction, and by twice the standard error of the difference.
MIN_GAIN, MIN_ERRORS = 0.02, 2.0
#: Largest magnitude of an exponent. It bounds what a channel that is nearly zero in the sample may lose elsewhere.
MAX_EXPONENT = 8


@dataclass(frozen=True)
class FoldChoice:
    """Exponents for one site and what they bring."""

    exponents: Tensor  # int32 ``[K]``
    alpha: float
    loss_without: float
    loss_with: float

    @property
    def folds(self) -> bool:
        """Whether any exponent differs from zero."""
        return bool(self.exponents.any())


def choose_exponents(
    weights: Sequence[Tensor],
    scheme: Scheme,
    inputs: Tensor,
    held_out: Tensor,
    *,
    classes: Tensor | None = None,
    limits: tuple[Tensor, Tensor] | None = None,
    shares: Sequence[int] | None = None,
) -> FoldChoice:
    """Choose the exponents of one site from a sample of its inputs."""
    _check_shapes(weights, inputs, held_out)
    inputs, held_out = inputs.float(), held_out.float()
    loss = OutputLoss(weights, scheme.weight, inputs, scheme.activation, shares)
    none = torch.zeros(inputs.shape[1], dtype=torch.int32)
    best, best_alpha, best_loss = none, 0.0, loss.total(none)
    magnitude = class_means(inputs.square().mean(0).sqrt(), classes)
    for alpha in ALPHAS:
        exponents = _limited(_exponents(magnitude, alpha), classes, limits)
        candidate = loss.total(exponents)
        if candidate < best_loss:
            best, best_alpha, best_loss = exponents, alpha, candidate
    without, norm = loss.per_token(held_out, none)
    if not bool(best.any()):
        ratio = _ratio(without, norm)
        return FoldChoice(none, 0.0, ratio, ratio)
    folded, _ = loss.per_token(held_out, best)
    accepted = _is_better(folded, without)
    return FoldChoice(
        best if accepted else none, best_alpha if accepted else 0.0, _ratio(without, norm), _ratio(folded, norm)
    )


def channel_classes(site: FoldSite) -> Tensor | None:
    """Return the producer's row of each input channel, int64 ``[K]``; None if every channel has its own row."""
    if site.sharing == 1:
        return None
    rows = torch.arange(site.channels // site.sharing).view(-1, 1, site.head_dim)
    return rows.expand(-1, site.sharing, -1).reshape(-1)


def class_means(values: Tensor, classes: Tensor | None) -> Tensor:
    """Return `values` float32 ``[K]`` with each channel's value replaced by the mean over its class."""
    if classes is None:
        return values
    return _scatter(values, classes, "mean")[classes]


def exponent_limits(site: FoldSite, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest exponent of each channel that keep every tensor of a site exact."""
    classes = channel_classes(site)
    lower = torch.full((site.channels,), -MAX_EXPONENT, dtype=torch.int32)
    upper = -lower
    for sign, view in _views(site, tensors):
        low, high = _range_of(view if sign > 0 else view.reshape(view.shape[0], -1).T)
        if sign < 0:
            low, high = -high, -low
            if classes is not None:
                low, high = low[classes], high[classes]
        lower, upper = torch.maximum(lower, low), torch.minimum(upper, high)
    return lower, upper


def apply_exponents(site: FoldSite, tensors: Mapping[str, Tensor], exponents: Tensor) -> dict[str, Tensor]:
    """Return the changed tensors of a site: columns of the readers times ``2**exponents``, producers divided by it."""
    if tuple(exponents.shape) != (site.channels,):
        raise ShapeError(site.readers[0].tensor, f"expected {site.channels} exponents, got {tuple(exponents.shape)}")
    rows = _row_exponents(site, exponents)
    lower, upper = exponent_limits(site, tensors)
    if bool((exponents < lower.clamp(max=0)).any() or (exponents > upper).any()):
        raise ValueError(
            f"{site.readers[0].tensor}: exponents {int(exponents.min())} to {int(exponents.max())} are outside of "
            "exponent_limits(site, tensors); clamp them to these limits"
        )
    changed = {name: tensors[name].clone() for name in site.tensors}
    for sign, view in _views(site, changed):
        if sign > 0:
            view.mul_(powers_of_two(exponents).to(view))
        else:
            factor = powers_of_two(-rows).to(view)
            view.mul_(factor if view.ndim == 1 else factor[:, None])
    return changed


def _check_shapes(weights: Sequence[Tensor], inputs: Tensor, held_out: Tensor) -> None:
    if not weights:
        raise ShapeError("weights", "expected at least one weight [N, K], got none")
    channels = weights[0].shape[-1]
    for name, x in (*((f"weights[{i}]", w) for i, w in enumerate(weights)), ("inputs", inputs), ("held_out", held_out)):
        if x.ndim != 2 or x.shape[1] != channels or x.shape[0] == 0:
            raise ShapeError(name, f"expected a matrix with rows and {channels} columns, got {tuple(x.shape)}")


def _exponents(magnitude: Tensor, alpha: float) -> Tensor:
    """Return ``log2(magnitude**alpha)`` rounded, with the median at 0, int32 ``[K]``; zero counts as tiny."""
    smallest = magnitude.max() * 2.0 ** -(2 * MAX_EXPONENT)
    logs = alpha * magnitude.clamp(min=max(float(smallest), torch.finfo(torch.float32).tiny)).log2()
    return (logs - logs.median()).round().clamp(-MAX_EXPONENT, MAX_EXPONENT).to(torch.int32)


def _limited(exponents: Tensor, classes: Tensor | None, limits: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return exponents clamped to the limits of all channels of their class."""
    if limits is None:
        return exponents
    lower, upper = limits
    if classes is not None:
        lower = _scatter(lower, classes, "amax")[classes]
        upper = _scatter(upper, classes, "amin")[classes]
    return exponents.clamp(lower, upper)


def _scatter(values: Tensor, classes: Tensor, reduce: str) -> Tensor:
    """Return one value per class, reduced over the channels of the class."""
    out = values.new_zeros(int(classes.max()) + 1)
    return out.scatter_reduce(0, classes, values, reduce, include_self=False)


def _is_better(folded: Tensor, without: Tensor) -> bool:
    """Return whether the loss per token is smaller by `MIN_GAIN` and by `MIN_ERRORS` standard errors."""
    gain = without - folded
    error = float(gain.std()) / math.sqrt(gain.numel()) if gain.numel() > 1 else math.inf
    return float(gain.mean()) > max(MIN_GAIN * float(without.mean()), MIN_ERRORS * error)


def _ratio(loss: Tensor, norm: Tensor) -> float:
    return float(loss.sum() / norm.sum().clamp(min=torch.finfo(torch.float64).tiny))


def _views(site: FoldSite, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of a site as views: readers with the sign +1, producers with the sign -1."""
    for sign, parts in ((1, site.readers), (-1, site.producers)):
        for part in parts:
            view = tensors[part.tensor]
            view = view if part.expert is None else view[part.expert]
            yield sign, (view if part.rows is None else view[slice(*part.rows)])


def _row_exponents(site: FoldSite, exponents: Tensor) -> Tensor:
    classes = channel_classes(site)
    if classes is None:
        return exponents
    rows = exponents.new_empty(site.channels // site.sharing)
    rows[classes] = exponents
    if not torch.equal(rows[classes], exponents):
        raise ValueError(f"{site.readers[0].tensor}: query heads that share a value head have different exponents")
    return rows


def _range_of(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the limits of the exponents by which the columns of a tensor ``[..., K]`` can be scaled exactly."""
    info = torch.finfo(matrix.dtype)
    emin, emax = math.frexp(info.tiny)[1], math.frexp(info.max)[1]
    magnitude = matrix.detach().abs().reshape(-1, matrix.shape[-1])
    largest = magnitude.amax(0).float()
    smallest = torch.where(magnitude == 0, info.max, magnitude).amin(0).float()
    low = (emin - torch.frexp(smallest).exponent).clamp(-MAX_EXPONENT, 0)
    high = (emax - torch.frexp(largest).exponent).clamp(0, MAX_EXPONENT)
    return low.to(torch.int32), torch.where(largest == 0, MAX_EXPONENT, high).to(torch.int32)
