"""`tune`: train codes and norms to give the logits of the original model, and keep the best state.

States are judged on held-out text.

The loss is KL(original || student), the mean over the tokens of a few sequences per step.

Source: Kingma and Ba, Adam (arXiv 1412.6980); Hinton et al. (arXiv 1503.02531) for training on another model's logits.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.model import CalibrationModel
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.kernels.memory import available_memory
from minifloat.model.architecture.roles import text_config
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.damage import KLMeans, token_divergence
from minifloat.quantize.rounding.layer import tensor_bytes
from minifloat.quantize.rounding.methods import TuneOptions, error_of
from minifloat.quantize.rounding.rounded_model import Bytes, RoundedModel, layer_content
from minifloat.quantize.rounding.student import Student
from minifloat.quantize.rounding.texts import SplitText

# The same machine, versions and number of threads give the same bits; another number of threads may order sums
# otherwise.
_LOG = logging.getLogger(__name__)

#: Logits that one forward pass may compute; more sequences of a step run one after the other.
LOGITS_PER_PASS = 1 << 25
#: float32 per weight: latent, gradient, and two moments of Adam.
_FLOATS_PER_WEIGHT = 4
#: float32 per logit: of both models as probabilities, their difference and gradients.
_FLOATS_PER_LOGIT = 6
#: Activations per layer and token that the backward pass needs, in units of the hidden and of the inner width.
_HIDDEN_KEPT, _INNER_KEPT = 16, 4


@dataclass(frozen=True)
class TuneCost:
    """What tuning needs."""

    weights: int
    nbytes: int


def tune_cost(checkpoint: Checkpoint, plan: QuantizationPlan, dtype: torch.dtype, longest: int) -> TuneCost:
    """Return the memory that tuning a plan needs."""
    itemsize = dtype.itemsize
    model = sum(math.prod(info.shape) for info in checkpoint.tensors.values()) * itemsize
    weights = sum(math.prod(part.shape) for tensor in plan.tensors for part in tensor.parts)
    float32 = torch.float32.itemsize
    per_weight = _FLOATS_PER_WEIGHT * float32 + 2 * itemsize  # the folded weight, and the one of the current codes
    config = text_config(checkpoint.config)
    vocabulary = _number(config, "vocab_size")
    tokens = max(LOGITS_PER_PASS // max(vocabulary, 1), longest)
    width = _HIDDEN_KEPT * _number(config, "hidden_size") + _INNER_KEPT * _number(config, "intermediate_size")
    activations = tokens * width * _number(config, "num_hidden_layers") * itemsize
    logits = tokens * vocabulary * _FLOATS_PER_LOGIT * float32
    return TuneCost(weights, model + weights * per_weight + activations + logits)


def require_memory(cost: TuneCost, device: str | torch.device, max_memory: int | None) -> None:
    """Refuse to tune where the memory is too small."""
    available = available_memory(device)
    _LOG.info("tuning trains %s weights in %s bytes of memory on %s", f"{cost.weights:,}", f"{cost.nbytes:,}", device)
    limit = available if max_memory is None else min(available, max_memory)
    if cost.nbytes > limit:
        raise UsageError(
            f"the method tune needs {cost.nbytes:,} bytes of memory on {device} to train {cost.weights:,} weights, and "
            f"{limit:,} bytes are available: take the method match, which holds one layer at a time, or a device with "
            "more memory"
        )


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


#: Decay rates of the moments of Adam; the second one is short because there are few steps.
_BETAS = (0.9, 0.95)
#: Share of the steps in which the rate warms up, and the rate at the end as a share of the full one.
_WARM_UP, _LAST_RATE = 0.05, 0.05


@dataclass(frozen=True)
class Best:
    """The state with the smallest divergence so far, on the text that steps are chosen on."""

    step: int
    divergence: KLMeans
    weights: dict[str, QuantizedTensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    first: KLMeans
    best: Best
    reported: KLMeans  # of the best state, on the text that only the report names
    history: list[tuple[int, float]]
    stopped: str = ""


class Trainer:
    def __init__(
        self,
        student: Student,
        texts: SplitText,
        options: TuneOptions,
        report: Callable[[int, str], None],
    ) -> None:
        self.student, self.options, self.report = student, options, report
        self.kept = texts.kept.sequences
        self.choosing, self.reported = texts.choosing.sequences, texts.reported.sequences
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
        """Train, and return the best state, which is also that of the student then."""
        trained = sum(latent.values.numel() for latent in self.student.latents.values())
        self.report(0, f"tuning {trained:,} weights in {self.options.steps} steps, measuring the KL before")
        first = self.measure(self.choosing)
        best, history, stopped = Best(0, first), [(0, first.mean)], ""
        started = time.perf_counter()
        for step, batch in enumerate(self._batches(), 1):
            loss = self._step(step, batch)
            if not math.isfinite(loss):
                stopped = f"the loss of step {step} is not finite"
                break
            if step % self.options.every == 0 or step == self.options.steps:
                measured = self.measure(self.choosing)
                history.append((step, measured.mean))
                if measured.mean < best.divergence.mean:
                    weights = {module: latent.quantized() for module, latent in self.student.latents.items()}
                    best = Best(step, measured, weights, self.student.stored_norms())
            self._report(step, started, best, first)
        self.student.restore(best.weights, best.norms)
        reported = self.measure(self.reported) if best.step else KLMeans()
        return Training(first, best, reported, history, stopped)

    def measure(self, sequences: Sequence[Sequence[int]]) -> KLMeans:
        """Return the divergence of the current state on some sequences."""
        means, parameters = KLMeans(), self.student.parameters()
        with torch.no_grad():
            for ids in self._passes(sequences):
                original, own = self.student.original_logits(ids), self.student.logits(ids, parameters)
                means.add(token_divergence(original.flatten(0, 1), own.flatten(0, 1))[0].reshape(ids.shape))
        return means

    def _step(self, step: int, batch: Sequence[Sequence[int]]) -> float:
        """Change the student once, and return the loss before the change; nothing changes if it is not finite."""
        factor = _rate_factor(step, self.options.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["rate"] * factor
        tokens, total, parameters = sum(map(len, batch)), 0.0, self.student.parameters()
        for ids in self._passes(batch):
            loss = self._loss(ids, parameters) / tokens
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

    def _loss(self, ids: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return KL(original || student), the sum of all tokens, in float32 with gradients."""
        original = self.student.original_logits(ids).float().log_softmax(-1)
        own = self.student.logits(ids, parameters).float().log_softmax(-1)
        return torch.nn.functional.kl_div(own, original, reduction="sum", log_target=True)

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

    def _report(self, step: int, started: float, best: Best, first: KLMeans) -> None:
        seconds = (time.perf_counter() - started) / step
        left = seconds * (self.options.steps - step)
        self.report(
            step,
            f"tuning, {seconds:.2g} s a step, {left:,.0f} s left, KL {first.mean:.4f} -> {best.divergence.mean:.4f}",
        )


def _rate_factor(step: int, steps: int) -> float:
    """Return the share of the full rate in a step, counted from 1."""
    warm_up = min(step / max(_WARM_UP * steps, 1.0), 1.0)
    return warm_up * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps)))


def tune(
    model: CalibrationModel,
    plan: QuantizationPlan,
    rounded: RoundedModel,
    texts: SplitText,
    options: TuneOptions,
    progress: Progress | None = None,
) -> ArrayContent:
    """Train codes and norms against the original logits, and return the state that is best on the text to choose on."""

    def report(step: int, text: str) -> None:
        if progress is not None:
            progress(step, options.steps, text)

    student = Student(model, plan, rounded)
    trained = sum(latent.values.numel() for latent in student.latents.values())
    training = Trainer(student, texts, options, report).run()
    parts = {part.module: part for tensor in plan.tensors for part in tensor.parts}
    tensors: dict[str, Bytes] = {name: tensor_bytes(norm) for name, norm in training.best.norms.items()}
    rows, changed = [], 0
    for module, weight in training.best.weights.items():
        part, latent = parts[module], student.latents[module]
        tensors[part.tensors.codes.name] = tensor_bytes(weight.codes)
        differing = latent.changed_codes(weight)
        changed += differing
        stats = asdict(error_of(student.weights[module].float().cpu(), weight))
        rows.append({**rounded.weights[module], "stats": stats, "changed": differing / latent.values.numel()})
    record = _record(training, options, changed / max(trained, 1), rounded)
    return layer_content(tensors, {"weights": rows, **record})


def _record(training: Training, options: TuneOptions, changed: float, rounded: RoundedModel) -> dict[str, Any]:
    best, first = training.best, training.first
    choosing, held_out = dict(rounded.choosing), dict(rounded.held_out)
    if best.step:
        choosing |= {"method": best.divergence.mean, "method_error": best.divergence.error}
        held_out |= {"method": training.reported.mean, "method_error": training.reported.error}
    tuning = {
        **asdict(options),
        "before": first.mean,
        "after": best.divergence.mean,
        "best_step": best.step,
        "changed": changed,
        "history": [list(entry) for entry in training.history],
        "stopped": training.stopped,
    }
    return {"choosing": choosing, "held_out": held_out, "tuning": tuning}
