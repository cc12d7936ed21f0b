"""The damage of each group of weights to a quantized model, measured while the walk quantizes it.

Two more streams of hidden states go through the layers for each group: in one the group alone has its original weights
in the quantized model ("given back"), in the other it alone is quantized in the original model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minifloat.calibration.layerwise.storage import StoredTensor
from minifloat.errors import NonFiniteError
from minifloat.kernels.divergence import divergence
from minifloat.numerics.scheme import Scheme


@dataclass(frozen=True)
class Divergence:
    """Means over the tokens of held-out text."""

    tokens: int
    nearest: float  # KL(original || rounded to nearest), in nats per token
    method: float  # KL(original || rounded by the method), in nats per token
    nearest_error: float | None  # standard error of `nearest`, from the means of the sequences; None: there is only one
    method_error: float | None
    disagreement: float  # share of tokens for which the method changes the most probable next token
    nearest_by_sequence: tuple[float, ...] = ()
    method_by_sequence: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        sequences = {
            "nearest_by_sequence": [*self.nearest_by_sequence],
            "method_by_sequence": [*self.method_by_sequence],
        }
        return asdict(self) | sequences


@dataclass
class KLMeans:
    """KL per token, as means over sequences."""

    tokens: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, divergences: Tensor) -> None:
        """Add sequences of one length, ``[B, T]``."""
        self.tokens += [divergences.shape[1]] * divergences.shape[0]
        self.means += divergences.double().mean(1).tolist()

    @property
    def mean(self) -> float:
        """The mean over all tokens."""
        return sum(value * count for value, count in zip(self.means, self.tokens, strict=True)) / max(self.total, 1)

    @property
    def error(self) -> float | None:
        """The standard error of `mean`, from the means of the sequences; None if there is one sequence."""
        if len(self.means) < 2:
            return None
        center = self.mean
        return math.sqrt(sum((value - center) ** 2 for value in self.means) / (len(self.means) - 1) / len(self.means))

    @property
    def total(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.tokens)


@torch.inference_mode()
def measure_divergence(logits: Iterable[Iterable[Tensor]]) -> Divergence:
    """Return the divergence over some sequences from logits ``[T, V]`` of the three models each."""
    nearest, method, changed = KLMeans(), KLMeans(), KLMeans()
    for original, *others in logits:
        for candidate, means in zip(others, (nearest, method), strict=True):
            divergences, differs = token_divergence(original, candidate)
            means.add(divergences[None])
            if not math.isfinite(means.means[-1]):
                raise NonFiniteError("logits", f"they are NaN or Inf on held-out sequence {len(means.means) - 1}")
        changed.add(differs[None])
    by_sequence = (tuple(nearest.means), tuple(method.means))
    errors = nearest.error, method.error
    return Divergence(nearest.total, nearest.mean, method.mean, *errors, changed.mean, *by_sequence)


def token_divergence(original: Tensor, candidate: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(original || candidate) in nats of each token, ``[T]``, and whether their most probable tokens differ.

    Logits are ``[T, V]``.
    """
    kl, of_original, of_candidate = divergence(original, candidate)
    return kl, of_original.top[:, 0] != of_candidate.top[:, 0]


#: Held-out tokens that go through the model twice per group: at most, and at least for the largest models.
_TOKENS, _FEWEST_TOKENS = 4096, 512
#: Groups times layers times tokens, about: the layers that the streams of all groups run through, each from its own on.
_LAYER_TOKENS = 8 << 20

#: Number of a sequence -> where its hidden states are.
Places: TypeAlias = Mapping[int, StoredTensor]
#: Runs the current layer over the hidden states at the first places, for the sequences of the second, and writes there.
RunLayer: TypeAlias = Callable[[Places, Places], None]


def damage_tokens(groups: int, layers: int) -> int:
    """Return the tokens that measure the damage of so many groups: few in deep models, where each has more layers."""
    return min(max(_LAYER_TOKENS // max(groups * layers, 1), _FEWEST_TOKENS), _TOKENS)


@dataclass(frozen=True)
class GroupsToMeasure:
    """Groups of weights whose damage is to be measured."""

    groups: Mapping[str, Sequence[str]]
    schemes: Sequence[Scheme]
    tokens: int = _TOKENS

    def to_dict(self) -> dict[str, Any]:
        """Return what determines the measurements, as JSON values."""
        return {
            "groups": {name: list(modules) for name, modules in self.groups.items()},
            "schemes": [scheme.name for scheme in self.schemes],
            "tokens": self.tokens,
        }


@dataclass
class DamageStreams:
    request: GroupsToMeasure
    given_back: dict[str, dict[int, StoredTensor]] = field(default_factory=dict)
    alone: dict[str, dict[int, StoredTensor]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    _tokens: int = 0

    def streams_of(self, tokens: int) -> list[tuple[str, str]]:
        """Return the streams that a held-out sequence runs through, as far as the sample takes it."""
        if self._tokens and self._tokens + tokens > self.request.tokens:
            self._tokens = self.request.tokens  # later sequences may be shorter, but the first ones are the sample
            return []
        self._tokens += tokens
        return [(kind, group) for group in self.request.groups for kind in ("given_back", "alone")]

    def start(self, places: Mapping[Hashable, dict[int, StoredTensor]], finished: Iterable[Mapping[str, Any]]) -> None:
        """Take the places of all streams, and the groups whose streams began in finished layers."""
        for group in self.request.groups:
            if ("alone", group) in places:
                self.given_back[group], self.alone[group] = places["given_back", group], places["alone", group]
        self.started = [group for record in finished for group in record.get("groups", ())]

    def run_original(self, run: RunLayer) -> None:
        """Continue the streams through an original layer."""
        for group in self.started:
            run(self.alone[group], self.alone[group])

    def run_quantized(
        self,
        run: RunLayer,
        weights: Mapping[str, Tensor],
        originals: Mapping[str, Tensor],
        original: Places,
        quantized: Places,
    ) -> list[str]:
        """Continue the streams through a quantized layer, and begin those of the groups in it."""
        own = {group: {*members} & originals.keys() for group, members in self.request.groups.items()}
        own = {group: members for group, members in own.items() if members}
        new = [group for group in own if group not in self.started]
        for group in [*self.started, *new]:
            source = quantized if group in new else self.given_back[group]
            with _original_weights(weights, originals, own.get(group, ())):
                run(source, self.given_back[group])
        for group, members in own.items():
            source = original if group in new else self.alone[group]
            with _original_weights(weights, originals, originals.keys() - members):
                run(source, self.alone[group])
        self.started += new
        return new

    def measure(
        self,
        sequences: Sequence[Sequence[int]],
        original: Places,
        quantized: Places,
        logits_of: Callable[[Sequence[int], Iterable[StoredTensor]], Iterator[Tensor]],
    ) -> dict[str, Any]:
        """Return KL divergences from the original model, as JSON values."""
        kinds = {"given_back": self.given_back, "alone": self.alone}
        streams = {(kind, group): by_group[group] for kind, by_group in kinds.items() for group in self.started}
        means = {name: KLMeans() for name in [("kl", ""), *streams]}
        for number in next(iter(self.alone.values()), {}):
            places = [quantized[number], *(places[number] for places in streams.values())]
            logits = logits_of(sequences[number], [original[number], *places])
            base = next(logits)
            for of_stream, candidate in zip(means.values(), logits, strict=True):
                of_stream.add(token_divergence(base, candidate)[0][None])
        by_kind = {kind: {group: means[kind, group].mean for group in self.started} for kind in kinds}
        return {"tokens": means["kl", ""].total, "kl": means["kl", ""].mean, **by_kind}


@contextmanager
def _original_weights(
    weights: Mapping[str, Tensor], originals: Mapping[str, Tensor], modules: Iterable[str]
) -> Iterator[None]:
    """Put the original weights of some modules into the model while the context lasts."""
    quantized = {module: weights[module].clone() for module in modules}
    try:
        for module in quantized:
            weights[module].copy_(originals[module])
        yield
    finally:
        for module, weight in quantized.items():
            weights[module].copy_(weight)
