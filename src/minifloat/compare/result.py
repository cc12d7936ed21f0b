"""What a comparison found, as plain values: for the terminal, for JSON and for the reports."""

from __future__ import annotations

import dataclasses
import enum
import math
from dataclasses import dataclass
from typing import Any

from minifloat.compare.attribution import Attribution
from minifloat.compare.generation import GreedyDivergence
from minifloat.compare.summary import Summary
from minifloat.compare.tasks import TaskDifference
from minifloat.compare.verdict import Outcome, Verdict, worst

#: Of `Comparison.to_dict`; a larger one has changed what a name means, a new name alone does not change it.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LikelyToken:
    """A token that a model finds probable.

    Attributes:
        token: Its text.
        probability: Between 0 and 1.
    """

    token: str
    probability: float


@dataclass(frozen=True)
class WorstToken:
    """A place where the two models differ most.

    Attributes:
        text: Name of the text.
        document: Number of the document in it, from 0.
        position: Number of the token in the document, from 0.
        context: The text before it.
        token: The token that came.
        kl: KL divergence in nats.
        baseline: The baseline's five most probable tokens, the first first.
        candidate: The candidate's.
    """

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
    """What was read.

    Attributes:
        name: Of the text.
        documents: In it, as far as it was read.
        tokens: Of it, as far as it was read.
        sha256: Of those.
    """

    name: str
    documents: int
    tokens: int
    sha256: str


@dataclass(frozen=True)
class ModelRecord:
    """One of the models.

    Attributes:
        name: Its folder.
        nbytes: Bytes of its weights: on disk, or in memory where a loaded model was given.
        activations: How its quantized weights took their inputs: ``"E4M3 per token (dynamic)"``, the name of the 16- or
            32-bit format where they ran weight-only (``"BF16"``), or what share of them did what.
        kv_cache: The format that keys and values were rounded to; None: they were not.
    """

    name: str
    nbytes: int
    activations: str
    kv_cache: str | None = None


@dataclass(frozen=True)
class CandidateResult:
    """What was found of one candidate.

    Attributes:
        model: Which.
        texts: One summary per text.
        overall: All texts together, each token counting the same.
        verdict: Whether it is the same model, within the tolerance.
        worst: Where it differs most, worst first.
        generation: Greedy continuations; None: not asked for.
        attribution: Which modules do the damage; None: not asked for.
        tasks: Scores of tasks.
    """

    model: ModelRecord
    texts: tuple[Summary, ...]
    overall: Summary
    verdict: Verdict
    worst: tuple[WorstToken, ...]
    generation: GreedyDivergence | None = None
    attribution: Attribution | None = None
    tasks: tuple[TaskDifference, ...] = ()

    @property
    def summaries(self) -> tuple[Summary, ...]:
        """One per text, and one of all where there are several."""
        return (*self.texts, self.overall) if len(self.texts) > 1 else self.texts


@dataclass(frozen=True)
class Comparison:
    """The result of `compare_models`.

    Attributes:
        baseline: The model that the others are held against.
        candidates: At least one.
        window: Tokens per window.
        dtype: Dtype that all models compute in, for example ``"bfloat16"``.
        texts: What was read.
        tokens_done: Tokens that all models have seen.
        tokens_total: Tokens that they were to see; more than were done in a report of an interrupted run.
        seconds: That scoring took.
        machine: Versions, processors, date.
        command: That made it; empty if it was not the command line.
        notes: What was asked for and could not be measured, and why.
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

    @property
    def partial(self) -> bool:
        """Whether the run was interrupted."""
        return self.tokens_done < self.tokens_total

    @property
    def outcome(self) -> Outcome:
        """The worst of the verdicts."""
        return worst([candidate.verdict.outcome for candidate in self.candidates])

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a number that is not finite becomes None."""
        values = {field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {"schema_version": SCHEMA_VERSION, "outcome": self.outcome.value, "partial": self.partial} | values


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
