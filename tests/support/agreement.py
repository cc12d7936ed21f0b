"""Whether another engine computes the same model as we do.

Two engines that multiply the same weights in BF16 differ, because each rounds in its own places. How far BF16 is from
exact arithmetic is a property of format and model, and it is measured, not guessed: the same checkpoint is run here in
float32 and in BF16. Another engine must be as close to float32 as our own BF16 is; half as much again is allowed,
because it may round in more places (vLLM rounds logits to BF16, we do not: one rounding more among ten a layer). Inputs
that are quantized to FP8 enlarge both distances alike, since a value near the middle of two codes may go either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifloat.serve.load import load

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

    def gap(self, prefix: Sequence[int]) -> float:
        """How much more probable the first token after these is than the second, in nats."""
        first, second = _logprobs(self._exact, torch.tensor([prefix]))[-1].topk(2).values.tolist()
        return float(first - second)


def _logprobs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens).logits[0].float().log_softmax(-1)


def _rms(differences: Sequence[Tensor]) -> float:
    return float(torch.cat(list(differences)).square().mean().sqrt())


def is_same_model(folder: Path, answers: Sequence[Answer], *, weight_only: bool = False) -> bool:
    """Whether answers are those of a checkpoint, within the rounding of BF16."""
    theirs, ours = Reference(folder, weight_only=weight_only).distance(answers)
    return theirs <= _ROUNDS_MORE * ours
