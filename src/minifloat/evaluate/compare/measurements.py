"""The scores of a comparison on disk, so that an interrupted run can continue.

A folder holds ``comparison.json``, which identifies the comparison, and part files with the scores of some batches
each. A part is written under a temporary name and then renamed, so that a part is either complete or absent.
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
from minifloat.errors import StorageError, UsageError
from minifloat.evaluate.compare.metrics import TokenScores
from minifloat.evaluate.compare.worst import ScoredPosition, WorstPositions

_SETTINGS_FILE = "comparison.json"
_SECONDS_BETWEEN_PARTS = 5.0
_FIELDS = tuple(field.name for field in dataclasses.fields(TokenScores))


class MeasurementLog:
    """The scores of batches, by number of the batch, in a folder."""

    def __init__(
        self, folder: str | os.PathLike[str], settings: dict[str, Any], worst: Sequence[WorstPositions]
    ) -> None:
        self._folder = Path(folder)
        self._logged: dict[int, list[TokenScores]] = {}
        self._unwritten: dict[int, list[TokenScores]] = {}
        self._worst = worst
        self._last_write = time.monotonic()
        with storage_errors(self._folder, "use it"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._check_settings({**settings, "scores": list(_FIELDS)})
            for path in sorted(self._folder.glob("part-*.npz")):
                self._read(path, len(worst))

    def scores(self, batch: int) -> list[TokenScores] | None:
        """Return the scores of each candidate on a batch; None if no earlier run has scored the batch."""
        return self._logged.get(batch)

    def add(self, batch: int, scores: list[TokenScores]) -> None:
        """Add the scores of each candidate on a batch; they are on disk within seconds."""
        self._unwritten[batch] = scores
        if time.monotonic() - self._last_write > _SECONDS_BETWEEN_PARTS:
            self.flush()

    def flush(self) -> None:
        """Write all scores that are not on disk yet, with the worst positions so far, as one part."""
        if not self._unwritten:
            return
        arrays: dict[str, npt.NDArray[Any]] = {
            f"{batch}/{candidate}/{field}": getattr(scores, field)
            for batch, candidates in self._unwritten.items()
            for candidate, scores in enumerate(candidates)
            for field in _FIELDS
        }
        positions = [[dataclasses.asdict(position) for position in worst.ranked()] for worst in self._worst]
        arrays["worst"] = np.frombuffer(json.dumps(positions).encode(), dtype=np.uint8)
        with written_whole(self._folder / f"part-{min(self._unwritten):08d}.npz") as file:
            np.savez(file, allow_pickle=False, **arrays)
        self._unwritten, self._last_write = {}, time.monotonic()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self._folder / _SETTINGS_FILE
        text = json.dumps(settings, indent=1, sort_keys=True)
        if path.exists():
            if path.read_text(encoding="utf-8") != text:
                raise UsageError(
                    f"{self._folder} holds scores of other models, texts or settings (see {path.name} in it): "
                    "give another folder, or delete this one"
                )
            return
        if any(self._folder.iterdir()):
            raise UsageError(
                f"{self._folder} is neither empty nor the folder of an earlier comparison: give another folder"
            )
        with written_whole(path) as file:
            file.write(text.encode())

    def _read(self, path: Path, num_candidates: int) -> None:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                for batch in sorted({int(name.partition("/")[0]) for name in arrays.files if "/" in name}):
                    self._logged[batch] = [
                        TokenScores(**{field: arrays[f"{batch}/{candidate}/{field}"] for field in _FIELDS})
                        for candidate in range(num_candidates)
                    ]
                positions = json.loads(arrays["worst"].tobytes())
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise StorageError(
                f"{path}: expected scores of a comparison, found a damaged file ({error}); delete it"
            ) from error
        for worst, of_candidate in zip(self._worst, positions, strict=True):
            worst.offer(_position(values) for values in of_candidate)


def _position(values: dict[str, Any]) -> ScoredPosition:
    pairs = {side: tuple((int(token), float(p)) for token, p in values[side]) for side in ("baseline", "candidate")}
    return ScoredPosition(**{**values, **pairs})
