"""What a comparison has measured so far, on disk: a run that was interrupted goes on where it stopped.

A folder holds ``comparison.json``, which says what is compared, and parts with the scores of some batches each. A part
is written beside its place and renamed, so that it is there as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.files import storage_errors, written_whole
from minifloat.compare.metrics import TokenScores
from minifloat.compare.worst import ScoredPosition, WorstPositions
from minifloat.errors import StorageError, UsageError

_FACTS = "comparison.json"
_SECONDS_BETWEEN_PARTS = 5.0
_FIELDS = tuple(field.name for field in dataclasses.fields(TokenScores))


class MeasurementLog:
    """The scores of batches, by number.

    Args:
        folder: Made if it does not exist.
        facts: What is compared on what, for JSON; a folder of other facts is refused.
        worst: One per candidate; they are offered what earlier runs found.

    Raises:
        UsageError: The folder holds another comparison, or something else.
        StorageError: The operating system refused to read or write.
    """

    def __init__(self, folder: str | os.PathLike[str], facts: dict[str, Any], worst: Sequence[WorstPositions]) -> None:
        self._folder = Path(folder)
        self._known: dict[int, list[TokenScores]] = {}
        self._waiting: dict[int, list[TokenScores]] = {}
        self._worst = worst
        self._written = time.monotonic()
        with storage_errors(self._folder, "use it"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._identify(facts)
            for path in sorted(self._folder.glob("part-*.npz")):
                self._read(path, len(worst))

    def scores(self, batch: int) -> list[TokenScores] | None:
        """Of each candidate, if an earlier run has scored the batch."""
        return self._known.get(batch)

    def add(self, batch: int, scores: list[TokenScores]) -> None:
        """Write down a batch, now or within seconds, and with it what is the worst by then."""
        self._waiting[batch] = scores
        if time.monotonic() - self._written > _SECONDS_BETWEEN_PARTS:
            self.flush()

    def flush(self) -> None:
        """Write down what waits."""
        if not self._waiting:
            return
        arrays: dict[str, npt.NDArray[Any]] = {
            f"{batch}/{candidate}/{field}": getattr(scores, field)
            for batch, candidates in self._waiting.items()
            for candidate, scores in enumerate(candidates)
            for field in _FIELDS
        }
        spots = [[dataclasses.asdict(spot) for spot in one.spots()] for one in self._worst]
        arrays["worst"] = np.frombuffer(json.dumps(spots).encode(), dtype=np.uint8)
        with written_whole(self._folder / f"part-{min(self._waiting):08d}.npz") as file:
            np.savez(file, allow_pickle=False, **arrays)
        self._waiting, self._written = {}, time.monotonic()

    def _identify(self, facts: dict[str, Any]) -> None:
        path = self._folder / _FACTS
        text = json.dumps(facts, indent=1, sort_keys=True)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise UsageError(
                    f"{self._folder} holds scores of other models, texts or settings (see {path.name} in it): "
                    "give another folder, or delete this one"
                )
            return
        if any(self._folder.iterdir()):
            raise UsageError(f"{self._folder} is neither empty nor of an earlier comparison")
        with written_whole(path) as file:
            file.write(text.encode())

    def _read(self, path: Path, candidates: int) -> None:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for batch in sorted({int(name.partition("/")[0]) for name in arrays.files if "/" in name}):
                    self._known[batch] = [
                        TokenScores(**{field: arrays[f"{batch}/{candidate}/{field}"] for field in _FIELDS})
                        for candidate in range(candidates)
                    ]
                spots = json.loads(arrays["worst"].tobytes())
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise StorageError(f"{path}: not a part of a comparison's journal; delete it ({error})") from error
        for one, found in zip(self._worst, spots, strict=True):
            one.offer(_spot(values) for values in found)


def _spot(values: dict[str, Any]) -> ScoredPosition:
    pairs = {side: tuple((int(token), float(p)) for token, p in values[side]) for side in ("baseline", "candidate")}
    return ScoredPosition(**{**values, **pairs})
