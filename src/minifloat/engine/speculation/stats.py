"""`SpeculationStats`: the counts of speculation, in a step or since the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """What speculation has done.

    Attributes:
        seconds: Time that drafts took.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted drafts over all drafts; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets in a step with drafts, on average; 0 without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    def verified(self, proposed: int, accepted: int) -> None:
        """Count a sequence of which some drafts were accepted."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """Return the counts of both; they have the same number of positions."""
        positions = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return SpeculationStats(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            [first + second for first, second in positions],
            self.seconds + other.seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates as JSON values, the counts named as vLLM's metrics."""
        return {
            "num_drafts": self.drafts,
            "num_draft_tokens": self.draft_tokens,
            "num_accepted_tokens": self.accepted_tokens,
            "num_accepted_tokens_per_pos": self.accepted_per_position,
            "acceptance_rate": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
            "draft_seconds": self.seconds,
        }
