"""Whether another engine computes the same model as we do.

Two engines that multiply the same weights in BF16 differ, because each rounds in its own places. How far BF16 is from
exact arithmetic is a property of format and model, and it is measured, not guessed: the same checkpoint is run here in
float32 and in BF16. Another engine must be as close to float32 as our own BF16 is; half as much again is allowed,
because it may round in more places (vLLM rounds logits to BF16, we do not: one rounding more among ten a layer). Inputs
that are quantized to FP8 enlarge both distances alike, since a value near the middle of two codes may go either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.runtime.load import load

_ROUNDS_MORE = 1.5


@dataclass(frozen=True)
class Answer:
    """A greedy continuation.

    Attributes:
        prompt: Token ids.
        tokens: What follows, by token id.
        top: The log-probabilities of the most probable tokens in each place from the prompt's second token on.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]


class Reference:
    """A checkpoint as we run it, in float32 and in BF16."""

    def __init__(self, folder: Path, *, weight_only: bool = False) -> None:
        self._exact = load(folder, dtype=torch.float32, weight_only=weight_only)
        self._rounded = load(folder, dtype=torch.bfloat16, weight_only=weight_only)

    def distance(self, answers: Sequence[Answer]) -> tuple[float, float]:
        """Root of the mean squared difference of log-probabilities: theirs to float32, and our BF16 to float32."""
        theirs, ours = [], []
        for answer in answers:
            tokens = torch.tensor([[*answer.prompt, *answer.tokens]])
            exact, rounded = (_logprobs(model, tokens) for model in (self._exact, self._rounded))
            assert len(answer.top) == tokens.shape[1] - 1
            for place, top in enumerate(answer.top):
                ids = list(top)
                theirs.append(torch.tensor(list(top.values())) - exact[place, ids])
                ours.append(rounded[place, ids] - exact[place, ids])
        return _rms(theirs), _rms(ours)


def _logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens).logits[0].float().log_softmax(-1)


def _rms(differences: Sequence[Tensor]) -> float:
    return float(torch.cat(list(differences)).square().mean().sqrt())


def is_same_model(folder: Path, answers: Sequence[Answer], *, weight_only: bool = False) -> bool:
    """Whether answers are those of a checkpoint, within the rounding of BF16."""
    theirs, ours = Reference(folder, weight_only=weight_only).distance(answers)
    return theirs <= _ROUNDS_MORE * ours


_TOP = 20


@dataclass(frozen=True)
class Noise:
    """How far apart two engines may be that both compute a checkpoint in BF16.

    Attributes:
        typical: Root of the mean squared error of the log-probabilities of likely tokens.
        largest: The largest of these errors.
    """

    typical: float
    largest: float

    @classmethod
    def of(cls, folder: Path, prompts: Sequence[Sequence[int]], *, inputs_too: bool = False) -> Noise:
        """Measured on prompts, as the distance of our BF16 to float32.

        Args:
            folder: The checkpoint.
            prompts: Token ids.
            inputs_too: Whether one of the engines quantizes the inputs of linears and the other does not.
        """
        exact = load(folder, dtype=torch.float32, weight_only=True)
        rounded = load(folder, dtype=torch.bfloat16, weight_only=not inputs_too)
        errors = []
        for prompt in prompts:
            wanted, found = (_logprobs(model, torch.tensor([list(prompt)])) for model in (exact, rounded))
            likely = wanted.topk(_TOP).indices
            errors.append((found - wanted).gather(-1, likely).flatten())
        return cls(_rms(errors), float(torch.cat(errors).abs().max()))

    def covers(self, differences: Sequence[float]) -> bool:
        """Whether differences of two engines are as large as two such errors make them."""
        size = math.sqrt(sum(difference**2 for difference in differences) / len(differences))
        return size <= _ROUNDS_MORE * math.sqrt(2) * self.typical


def greedy_differences(ours: Any, theirs: Any, noise: Noise) -> list[float]:
    """Differences of the log-probabilities that two servers report, up to where their texts part.

    Args:
        ours: A choice of OpenAI's completions.
        theirs: Another, for the same prompt.
        noise: Texts may part only where it covers the difference of our two most probable tokens.
    """
    differences: list[float] = []
    places = zip(
        ours.logprobs.tokens,
        ours.logprobs.top_logprobs,
        theirs.logprobs.tokens,
        theirs.logprobs.top_logprobs,
        strict=True,
    )
    for token, top, other, other_top in places:
        differences += [top[text] - other_top[text] for text in top.keys() & other_top.keys()]
        if token != other:
            first, second = sorted(top.values(), reverse=True)[:2]
            assert first - second <= 2 * noise.largest, f"{token!r} and {other!r}, {first - second:.3f} nats apart"
            break
    return differences
