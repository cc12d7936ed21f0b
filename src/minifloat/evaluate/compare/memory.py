"""Memory that a comparison takes, and a baseline whose logits are written down where the models do not all fit."""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.behavior import Answers
from minifloat.evaluate.compare.corpus import Corpus
from minifloat.evaluate.compare.models import Continuations, Model, ModelRecord
from minifloat.evaluate.compare.scoring import first_nan
from minifloat.kernels.memory import available_memory
from minifloat.report.text import size_text

_LOG = logging.getLogger(__name__)
#: Logits of one model at a time: in float32, and as the model made them.
_LOGITS = 2**25 * (torch.float32.itemsize + torch.bfloat16.itemsize)
#: Of what is available, left to everything else.
_REST = 256 << 20


def fits_together(checkpoints: Sequence[Checkpoint], device: str, progress: Progress | None) -> bool:
    """Return whether all models of a comparison fit into memory, and say what they take."""
    needed = [sum(info.nbytes for info in each.tensors.values()) + _LOGITS for each in checkpoints]
    together, largest, available = sum(needed) + _REST, max(needed) + _REST, available_memory(device)
    sizes = f"{size_text(together)} for {len(needed)} models, {size_text(available)} are free on {device}"
    if progress is not None:
        progress(0, 1, f"loading; comparing takes about {sizes}")
    if together <= available:
        _LOG.info("comparing takes about %s", sizes)
        return True
    if largest > available:
        _LOG.warning("comparing takes about %s, and less than the largest model alone: it may fail", sizes)
    else:
        _LOG.warning("comparing takes about %s: the models run one after the other", sizes)
    return False


class RecordedModel(Model):
    """A model that is not in memory any more: its logits of a corpus, and its continuations, as it gave them."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.name, self.folder, self.vocab_size = model.name, model.folder, model.vocab_size
        self.dtype, self.longest = model.dtype, model.longest
        self._record, self._headers, self._written = model.record, model.headers(), folder
        self._batches: dict[bytes, list[Path]] = {}
        self._continuations: Continuations = ()
        self.answers: Answers | None = None  # to the prompts of `--behavior`

    def write(self, model: Model, corpus: Corpus, progress: Progress | None) -> None:
        self._require_room(corpus)
        done = 0
        for number, batch in enumerate(corpus.batches):
            paths = self._batches[batch.ids.numpy().tobytes()] = []
            for step, rows in enumerate(model.logits(batch.ids)):
                if not bool(rows.amax(-1).isfinite().all()):
                    raise first_nan(model, corpus)
                short = rows.bfloat16()
                paths.append(self._written / f"{number}-{step}.pt")
                torch.save((short if torch.equal(short.to(rows.dtype), rows) else rows).cpu(), paths[-1])
            done += batch.tokens
            if progress is not None:
                progress(done, corpus.tokens, f"{corpus.texts[batch.text].name} by {self.name}")

    def answer(
        self, model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None
    ) -> None:
        self._continuations = model.generate(prompts, new_tokens, progress)

    @property
    def record(self) -> ModelRecord:
        return self._record

    def headers(self) -> Checkpoint:
        return self._headers

    def logits(self, ids: Tensor) -> Iterator[Tensor]:
        for path in self._batches[ids.numpy().tobytes()]:
            yield torch.load(path, weights_only=True)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress | None) -> Continuations:
        return self._continuations

    def _require_room(self, corpus: Corpus) -> None:
        itemsize = torch.bfloat16.itemsize if self.dtype == "bfloat16" else torch.float32.itemsize
        nbytes, free = corpus.tokens * self.vocab_size * itemsize, shutil.disk_usage(self._written).free
        sizes = f"the logits of {self.name} take {size_text(nbytes)} in {self._written.parent}"
        if nbytes > free:
            raise UsageError(
                f"{sizes}, where {size_text(free)} are free: use less text (--max-tokens), or set TMPDIR to a folder "
                "with more room"
            )
        _LOG.warning("%s, and are deleted in the end", sizes)


def prompts_of(corpus: Corpus, count: int, tokens: int) -> list[list[int]]:
    batches = [batch for batch in corpus.batches if batch.ids.shape[1] >= tokens]
    rows = itertools.chain.from_iterable(batch.ids[:, :tokens].tolist() for batch in batches)
    return list(itertools.islice(rows, count))
