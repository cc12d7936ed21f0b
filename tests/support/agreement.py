"""Agreement of two engines: whether another engine computes the same model as minifloat.

Two engines that multiply the same weights in BF16 differ, because each rounds in different places. The distance of BF16
from exact arithmetic depends on the model and is measured: the checkpoint runs here in float32 and in BF16. The other
engine may be 1.5 times as far from float32 as minifloat's BF16, because it may round in more places (vLLM rounds logits
to BF16, minifloat does not: one more rounding, where each layer has ten). Inputs that are quantized to FP8 enlarge both
distances alike, because a value near the middle of two codes may be rounded either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.model.runtime.load import LoadOptions, load

#: Allowed distance of another engine from float32, in distances of minifloat's BF16.
_ALLOWED_RATIO = 1.5


@dataclass(frozen=True)
class Answer:
    """A greedy continuation.

    Attributes:
        prompt: Token ids of the prompt.
        tokens: Token ids of the continuation.
        top: For each position from the prompt's second token on, log-probabilities of the most probable tokens by id.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]


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
    """The error of BF16 arithmetic for a checkpoint, which limits how far apart two engines may be.

    Attributes:
        typical: Root mean square error of the log-probabilities of likely tokens.
        largest: Largest of these errors.
    """

    typical: float
    largest: float

    @classmethod
    def of(cls, folder: Path, prompts: Sequence[Sequence[int]], *, inputs_too: bool = False) -> Noise:
        """Measure the distance of our BF16 to float32 on prompts.

        Args:
            folder: Folder of the checkpoint.
            prompts: Token ids of the prompts.
            inputs_too: Whether one of the engines quantizes the inputs of linears and the other does not.
        """
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
    """Return the differences of log-probabilities that two servers report, up to the first different token.

    Args:
        ours: A choice in the response of OpenAI's completions API.
        theirs: A choice in the other server's response to the same prompt.
        noise: The texts may differ first only where twice the largest error covers the difference of our two most
            probable tokens.
    """
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
