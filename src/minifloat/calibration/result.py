"""`Calibration`: the statistics of a calibration, the rule that turns them into scales, and their files.

The statistics are two files beside each other, ``NAME.safetensors`` and ``NAME.held-out.safetensors``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minifloat.calibration.rules import Rule, parse_rule
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.stats_file import read_stats, write_stats
from minifloat.errors import DestinationError
from minifloat.report.document import ShortReport


def _default_rule() -> Rule:
    return parse_rule("max")


@dataclass(frozen=True, repr=False)
class Calibration(ShortReport):
    """Activation statistics, and how `quantize_checkpoint` turns them into static scales.

    Attributes:
        stats: Statistics of the calibration set.
        rule: Computes the amax of a module from its statistics.
        held_out: Statistics of other text, with histograms; None: there is no held-out text.
        max_saturation: Largest fraction of held-out elements of any module that may saturate; None: no limit.
    """

    stats: ActivationStats
    rule: Rule = field(default_factory=_default_rule)
    held_out: ActivationStats | None = None
    max_saturation: float | None = None

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        held_out = "none" if self.held_out is None else f"{self.held_out.tokens:,} tokens"
        return {
            "text": f"{self.stats.sequences:,} sequences, {self.stats.tokens:,} tokens",
            "held out": held_out,
            "rule": str(self.rule),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the rule and the calibration set as JSON values."""
        return {
            "rule": str(self.rule),
            "data": dict(self.stats.data),
            "sequences": self.stats.sequences,
            "tokens": self.stats.tokens,
            "held_out_tokens": None if self.held_out is None else self.held_out.tokens,
        }

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write the statistics, with those of the held-out text in a file beside them, and return the paths.

        The rule is not written: the statistics serve every rule.

        Raises:
            DestinationError: A file exists and `overwrite` is False, or the folder does not exist.
            StorageError: The system refused to write.
        """
        target = Path(path)
        pairs = [(target, self.stats)] + ([(held_out_path(target), self.held_out)] if self.held_out else [])
        require_free([file for file, _ in pairs], overwrite=overwrite)
        for file, stats in pairs:
            write_stats(stats, file)
        return tuple(file for file, _ in pairs)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], rule: str | Rule = "max", *, max_saturation: float | None = None
    ) -> Calibration:
        """Return the statistics that `save` wrote; the held-out file may be missing.

        Args:
            path: The file.
            rule: A `Rule`, or the text of one, such as ``percentile``.
            max_saturation: As the attribute.

        Raises:
            StatsError: A file is damaged, or has another version.
            UnknownNameError: There is no such rule.
        """
        held_out = held_out_path(Path(path))
        return cls(
            read_stats(path),
            parse_rule(rule) if isinstance(rule, str) else rule,
            read_stats(held_out) if held_out.exists() else None,
            max_saturation,
        )


def held_out_path(path: Path) -> Path:
    """Return the file of the held-out statistics beside a file of statistics."""
    return path.with_name(f"{path.stem}.held-out{path.suffix}")


def require_free(files: Sequence[Path], *, overwrite: bool) -> None:
    """Raise an error if a file cannot be written; call it before the work, not after an hour of it."""
    for file in files:
        if not file.parent.is_dir():
            raise DestinationError(f"{file}: the folder to write it in does not exist; create that one first")
        if file.is_dir() or (file.exists() and not overwrite):
            raise DestinationError(f"{file}: exists already; choose another name or use --overwrite")
