"""Agreement of two engines: whether another engine computes the same model as minifloat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.model.runtime.load import LoadOptions, load

#: Allowed distance of another engine from float32, in distances of minifloat's BF16: engines round in different places,
#: and vLLM rounds logits once more, where each layer has ten roundings.
_ALLOWED_RATIO = 1.5


@dataclass(frozen=True)
class Answer:
    """A greedy continuation."""

    prompt: Sequence[int]  #: token ids of the prompt
    tokens: Sequence[int]  #: token ids of the continuation
    top: Sequence[Mapping[int, float]]  #: for each position from the prompt's second token on


class Reference:
    """A checkpoint in minifloat, in float32 and in BF16."""

    def __init__(self, folder: Path, *, weight_only: bool = False) -> None:
        self._exact = load(folder, LoadOptions(dtype=torch.float32, weight_only=weight_only))
        self._rounded = load(folder, LoadOptions(dtype=torch.bfloat16, weight_only=weight_only))

    def distance(self, answers: Sequence[Answer]) -> tuple[float, float]:
        """Return two root mean square differences of log-probabilities: theirs to float32, and our BF16 to float32."""
        theirs, ours = [], []
        for answer in answers:
            tokens = torch.tensor([[*answer.prompt, *answer.tokens]])
            exact, rounded = (_logprobs(model, tokens) for model in (self._exact, self._rounded))
            assert len(answer.top) == tokens.shape[1] - 1
            for position, top in enumerate(answer.top):
                ids = list(top)
                theirs.append(torch.tensor(list(top.values())) - exact[position, ids])
                ours.append(rounded[position, ids] - exact[position, ids])
        return _rms(theirs), _rms(ours)


def _logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens).logits[0].float().log_softmax(-1)


def _rms(differences: Sequence[Tensor]) -> float:
    return float(torch.cat(list(differences)).square().mean().sqrt())


def is_same_model(folder: Path, answers: Sequence[Answer], *, weight_only: bool = False) -> bool:
    """Return whether answers are those of a checkpoint, within the rounding of BF16."""
    theirs, ours = Reference(folder, weight_only=weight_only).distance(answers)
    return theirs <= _ALLOWED_RATIO * ours


_TOP = 20


@dataclass(frozen=True)
class Noise:
    """The error of BF16 arithmetic for a checkpoint, which limits how far apart two engines may be."""

    typical: float  #: root mean square error of the log-probabilities of likely tokens
    largest: float  #: largest of these errors

    @classmethod
    def of(cls, folder: Path, prompts: Sequence[Sequence[int]], *, inputs_too: bool = False) -> Noise:
        """Measure the distance of our BF16 to float32 on prompts."""
        exact = load(folder, LoadOptions(dtype=torch.float32, weight_only=True))
        rounded = load(folder, LoadOptions(dtype=torch.bfloat16, weight_only=not inputs_too))
        errors = []
        for prompt in prompts:
            expected, actual = (_logprobs(model, torch.tensor([list(prompt)])) for model in (exact, rounded))
            likely = expected.topk(_TOP).indices
            errors.append((actual - expected).gather(-1, likely).flatten())
        return cls(_rms(errors), float(torch.cat(errors).abs().max()))

    def covers(self, differences: Sequence[float]) -> bool:
        """Return whether the differences between two engines can be explained by the errors of both."""
        size = math.sqrt(sum(difference**2 for difference in differences) / len(differences))
        return size <= _ALLOWED_RATIO * math.sqrt(2) * self.typical


def greedy_differences(ours: Any, theirs: Any, noise: Noise) -> list[float]:
    """Return the differences of log-probabilities that two servers report, up to the first different token."""
    differences: list[float] = []
    positions = zip(
        ours.logprobs.tokens,
        ours.logprobs.top_logprobs,
        theirs.logprobs.tokens,
        theirs.logprobs.top_logprobs,
        strict=True,
    )
    for token, top, other, other_top in positions:
        differences += [top[text] - other_top[text] for text in top.keys() & other_top.keys()]
        if token != other:
            first, second = sorted(top.values(), reverse=True)[:2]
            assert first - second <= 2 * noise.largest, f"{token!r} and {other!r}, {first - second:.3f} nats apart"
            break
    return differences
