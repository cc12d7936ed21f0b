"""Trains a `Student` to give the logits of the original model, and keeps its best state on held-out text.

The loss is KL(original || student), the mean over the tokens of a few sequences per step. The rate of Adam warms up and
then falls along a cosine. The order of the sequences comes from a seed. Two runs on the same machine, with the same
versions and the same number of threads, give the same bits on the CPU; another number of threads may order sums
otherwise.

Source: Kingma and Ba, Adam (arXiv 1412.6980); Hinton et al. (arXiv 1503.02531) for training on another model's logits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.divergence import KLMeans
from minifloat.quantize.rounding.tune.cost import LOGITS_PER_PASS
from minifloat.quantize.rounding.tune.options import TuneOptions
from minifloat.quantize.rounding.tune.student import Student

#: Decay rates of the moments of Adam; the second one is short because there are few steps.
_BETAS = (0.9, 0.95)
#: Share of the steps in which the rate warms up, and the rate at the end as a share of the full one.
_WARM_UP, _LAST_RATE = 0.05, 0.05


@dataclass(frozen=True)
class Best:
    """The state with the smallest divergence on held-out text so far."""

    step: int
    divergence: KLMeans
    weights: dict[str, QuantizedTensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The result of a training."""

    first: KLMeans
    best: Best
    history: list[tuple[int, float]]
    stopped: str = ""


class Trainer:
    """One training of a student."""

    def __init__(
        self,
        student: Student,
        kept: CalibrationSet,
        held_out: CalibrationSet,
        options: TuneOptions,
        report: Callable[[int, str], None],
    ) -> None:
        self.student, self.options, self.report = student, options, report
        self.kept, self.held_out = kept.sequences, held_out.sequences
        groups: list[dict[str, Any]] = [
            {"params": [latent.values], "rate": options.rate * latent.step} for latent in student.latents.values()
        ]
        groups += [
            {"params": [norm], "rate": options.norm_rate * float(norm.detach().square().mean().sqrt())}
            for norm in student.norms.values()
        ]
        self._optimizer = torch.optim.Adam(groups, lr=0.0, betas=_BETAS, fused=True)
        self._vocabulary = int(student.model.config.get_text_config().vocab_size)

    def run(self) -> Training:
        """Train, and return the best state."""
        weights = sum(latent.values.numel() for latent in self.student.latents.values())
        self.report(0, f"tuning {weights:,} weights in {self.options.steps} steps, measuring the KL before")
        first = self.measure()
        best, history, stopped = Best(0, first), [(0, first.mean)], ""
        started = time.perf_counter()
        for step, batch in enumerate(self._batches(), 1):
            loss = self._step(step, batch)
            if not math.isfinite(loss):
                stopped = f"the loss of step {step} is not finite"
                break
            if step % self.options.every == 0 or step == self.options.steps:
                measured = self.measure()
                history.append((step, measured.mean))
                if measured.mean < best.divergence.mean:
                    best = self._snapshot(step, measured)
            self._report(step, started, best, first)
        return Training(first, best, history, stopped)

    def measure(self) -> KLMeans:
        """Return the divergence of the current state on held-out text."""
        means, parameters = KLMeans(), self.student.parameters()
        with torch.no_grad():
            for ids in self._passes(self.held_out):
                means.add(self._divergences(ids, parameters))
        return means

    def _step(self, step: int, batch: Sequence[Sequence[int]]) -> float:
        """Change the student once, and return the loss before the change; nothing changes if it is not finite."""
        factor = _rate_factor(step, self.options.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        tokens, total, parameters = sum(map(len, batch)), 0.0, self.student.parameters()
        for ids in self._passes(batch):
            loss = self._divergences(ids, parameters).sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.student.set_gradients(parameters)
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"]]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        if not (finite and math.isfinite(total)):
            return math.nan
        del parameters
        self._optimizer.step()
        self._optimizer.zero_grad()
        for latent in self.student.latents.values():
            latent.clamp()
        return total

    def _divergences(self, ids: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return KL(original || student) of each token, float32 ``[B, T]``."""
        original = self.student.original_logits(ids).float().log_softmax(-1)
        student = self.student.logits(ids, parameters).float().log_softmax(-1)
        return torch.nn.functional.kl_div(student, original, reduction="none", log_target=True).sum(-1)

    def _passes(self, sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield token ids ``[B, T]``: sequences of one length together, as far as their logits fit."""
        by_length: dict[int, list[Sequence[int]]] = {}
        for sequence in sequences:
            by_length.setdefault(len(sequence), []).append(sequence)
        for length, members in by_length.items():
            together = max(LOGITS_PER_PASS // (length * self._vocabulary), 1)
            for first in range(0, len(members), together):
                yield torch.tensor(members[first : first + together], device=self.student.device)

    def _batches(self) -> Iterator[list[Sequence[int]]]:
        """Yield the sequences of each step: all of them once in a random order, then again in another."""
        generator = torch.Generator().manual_seed(self.options.seed)
        order: list[int] = []
        for _ in range(self.options.steps):
            while len(order) < self.options.batch:
                order += torch.randperm(len(self.kept), generator=generator).tolist()
            yield [self.kept[index] for index in order[: self.options.batch]]
            del order[: self.options.batch]

    def _snapshot(self, step: int, measured: KLMeans) -> Best:
        weights = {module: latent.quantized() for module, latent in self.student.latents.items()}
        return Best(step, measured, weights, self.student.stored_norms())

    def _report(self, step: int, started: float, best: Best, first: KLMeans) -> None:
        seconds = (time.perf_counter() - started) / step
        left = seconds * (self.options.steps - step)
        self.report(
            step,
            f"tuning, {seconds:.2g} s a step, {left:,.0f} s left, "
            f"held-out KL {first.mean:.4f} -> {best.divergence.mean:.4f}",
        )


def _rate_factor(step: int, steps: int) -> float:
    """Return the share of the full rate in a step, counted from 1."""
    warm_up = min(step / max(_WARM_UP * steps, 1.0), 1.0)
    return warm_up * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))
