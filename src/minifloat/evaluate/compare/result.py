"""The result of a comparison as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minifloat.evaluate.compare.behavior import Behavior
from minifloat.evaluate.compare.generation import GreedyDivergence
from minifloat.evaluate.compare.models import ModelRecord as ModelRecord
from minifloat.evaluate.compare.models import ServedRecord as ServedRecord
from minifloat.evaluate.compare.summary import Summary
from minifloat.evaluate.compare.tasks import TaskDifference
from minifloat.evaluate.compare.verdict import Outcome, Verdict, worst_outcome
from minifloat.report.document import ShortReport
from minifloat.report.json_values import to_values

#: Version of the dictionary from `Comparison.to_dict`. It grows when the meaning of a key changes, not for a new key.
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Suggestion:
    """Modules to leave in the baseline's precision, and the effect of it on a sample of the text."""

    overrides: tuple[str, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    kl_before: float
    kl_after: float
    ppl_increase_before: float
    ppl_increase_after: float
    same_top1_before: float
    same_top1_after: float
    reaches: bool
    everything: bool
    tokens: int
    finished: bool = True
    verdict: Verdict | None = None  # on all texts; None if the sample fails or no module stays quantized


@dataclass(frozen=True)
class ModuleDamage:
    module: str
    sqnr_db: float  # of the output, on the baseline's inputs; NaN where the sample never ran the module
    kl_alone: float | None  # of the baseline with the candidate's module; None: not measured
    kl_without: float | None  # of the candidate with the baseline's module; None: not measured
    extra_bytes: int


@dataclass(frozen=True)
class Attribution:
    rows: tuple[ModuleDamage, ...]
    tokens: int
    seconds: float
    measured: int
    of: int
    suggestion: Suggestion | None  # None if within the tolerance already, if no override can help, or the time was up


@dataclass(frozen=True)
class LikelyToken:
    token: str
    probability: float


@dataclass(frozen=True)
class WorstToken:
    text: str
    document: int
    position: int
    context: str
    token: str
    kl: float
    baseline: tuple[LikelyToken, ...]
    candidate: tuple[LikelyToken, ...]


@dataclass(frozen=True)
class TextRecord:
    name: str
    documents: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class CandidateResult:
    model: ModelRecord
    texts: tuple[Summary, ...]
    overall: Summary
    verdict: Verdict
    worst: tuple[WorstToken, ...]
    generation: GreedyDivergence | None = None  # None: not asked for
    attribution: Attribution | None = None
    tasks: tuple[TaskDifference, ...] = ()
    behavior: Behavior | None = None

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """The summaries of the texts, and of all texts together where there are several."""
        return (*self.texts, self.overall) if len(self.texts) > 1 else self.texts


@dataclass(frozen=True, repr=False)
class Comparison(ShortReport):
    """The result of `compare_models`.

    Attributes:
        baseline: The model that the candidates are compared with.
        candidates: At least one.
        window: Tokens per window.
        dtype: Dtype of the baseline's activations, for example ``"bfloat16"``.
        texts: The texts.
        tokens_done: Tokens that all models have seen.
        tokens_total: Tokens of all texts; more than `tokens_done` if the run was interrupted.
        seconds: Time of the scoring pass.
        machine: Versions, processors, date.
        command: The command line; empty if the comparison was made from Python.
        notes: Requested measurements that failed, each with the reason.
    """

    baseline: ModelRecord
    candidates: tuple[CandidateResult, ...]
    window: int
    dtype: str
    texts: tuple[TextRecord, ...]
    tokens_done: int
    tokens_total: int
    seconds: float
    machine: dict[str, Any]
    command: str = ""
    notes: tuple[str, ...] = ()

    def headline(self) -> dict[str, str]:
        return {
            "baseline": self.baseline.name,
            "tokens": f"{self.tokens_done:,} of {self.tokens_total:,}",
            **{candidate.model.name: candidate.verdict.outcome.value for candidate in self.candidates},
        }

    @property
    def partial(self) -> bool:
        return self.tokens_done < self.tokens_total

    @property
    def outcome(self) -> Outcome:
        return worst_outcome([candidate.verdict.outcome for candidate in self.candidates])

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values; a number that is not finite becomes None."""
        head = {"schema_version": SCHEMA_VERSION, "outcome": self.outcome.value, "partial": self.partial}
        return {**head, **to_values(self, finite=True)}
