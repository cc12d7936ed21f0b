"""`RewriteJob`: a run that makes the shards of one checkpoint from those of another.

`quantize` and `convert` share the order of the work: shards that an earlier run finished are kept if their source is
unchanged; the work of each other shard goes to a pool of threads, tensor by tensor; a complete shard is synced and
recorded. What happens to a tensor is the subclass's matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.rewrite import keep_what_stands
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.checkpoint.writer import CheckpointWriter

#: Shards that are open for writing at a time: one is synced while the next is computed.
_SHARDS_IN_FLIGHT = 2

#: The plan of one or several tensors of the source: the unit of work of a job.
Item = TypeVar("Item")
#: A row of the report, as JSON values.
Entry = dict[str, Any]


@dataclass
class OpenShard(Generic[Item]):
    """A shard whose work is in the pool.

    Attributes:
        name: File name of the shard.
        writer: The open output file; None where nothing of the shard is written.
        pending: The items of the shard, each with the futures of its work.
    """

    name: str
    writer: ShardWriter | None
    pending: list[tuple[Item, list[Future[Any]]]]


@dataclass
class RewriteJob(ABC, Generic[Item]):
    """One run over all shards of a source.

    Attributes:
        checkpoint: The source.
        writer: The output.
        pool: Threads that do the work.
        shards: Shard name -> its items, in the order of the source; the output has the same shards.
        metadata: Strings for the header of each shard.
        progress: Called with bytes done, bytes in all, and the name of a tensor or a step; None: not called.
        resumed: Number of shards that an earlier run had finished and `run` kept.
        done_bytes: Bytes of the source's tensors whose work is done.
    """

    checkpoint: Checkpoint
    writer: CheckpointWriter
    pool: ThreadPoolExecutor
    shards: Mapping[str, Sequence[Item]]
    metadata: dict[str, str]
    progress: Callable[[int, int, str], None] | None
    resumed: int = field(default=0, init=False)
    done_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        items = (item for items in self.shards.values() for item in items)
        self._source_bytes = sum(info.nbytes for item in items for info in self.sources(item))

    # ------------------------------------------------------------------------------------------ for subclasses

    @abstractmethod
    def sources(self, item: Item) -> Sequence[TensorInfo]:
        """Return the source tensors of an item."""

    @abstractmethod
    def outputs(self, item: Item) -> Sequence[OutputTensor]:
        """Return the output tensors of an item."""

    @abstractmethod
    def digests(self, item: Item) -> list[Future[str]]:
        """Hash what an item is made from, in the order of its entries, without doing anything else."""

    @abstractmethod
    def submit(self, item: Item, shard: ShardWriter | None) -> list[Future[Any]]:
        """Hand the work of an item to the pool.

        Args:
            item: The item.
            shard: Where its output is written; None where its shard has no outputs.
        """

    @abstractmethod
    def entries(self, item: Item, results: list[Any]) -> list[Entry]:
        """Return the rows of the report about an item, each with a ``source_digest``.

        Args:
            item: The item.
            results: Results of its futures, in the order of `submit`.
        """

    def prepare(self) -> None:
        """Do what must precede the first shard, after finished shards were checked. Nothing by default."""

    def record_beside(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return what the record of a shard holds beside its entries. Nothing by default."""
        return {}

    # ------------------------------------------------------------------------------------------ the run

    def run(self) -> list[Entry]:
        """Write every shard that is not finished.

        Returns:
            The entries of all items, in the order of the shards.

        Raises:
            StorageError: The system refuses.
            TensorError: A tensor cannot be rewritten.
        """
        self._keep_finished_shards()
        self.prepare()
        self.resumed = len(self.writer.finished)
        unrecorded: dict[str, list[Entry]] = {}
        in_flight: deque[OpenShard[Item]] = deque()
        for name, items in self.shards.items():
            if name in self.writer.finished:
                for item in items:
                    self._advance(item)
                continue
            in_flight.append(self._start(name, items))
            if len(in_flight) >= _SHARDS_IN_FLIGHT:
                unrecorded |= self._finish(in_flight.popleft())
        while in_flight:
            unrecorded |= self._finish(in_flight.popleft())
        entries_by_shard = {name: record["tensors"] for name, record in self.writer.finished.items()} | unrecorded
        return [entry for name in self.shards for entry in entries_by_shard[name]]

    def _keep_finished_shards(self) -> None:
        """Start over if the source of a finished shard changed."""
        finished = [name for name in self.shards if name in self.writer.finished]
        keep_what_stands(
            self.writer,
            {name: [digest for item in self.shards[name] for digest in self.digests(item)] for name in finished},
        )

    def _start(self, name: str, items: Sequence[Item]) -> OpenShard[Item]:
        """Open an output shard and hand its work to the pool."""
        outputs = [output for item in items for output in self.outputs(item)]
        writer = self.writer.shard(name, outputs, self.metadata) if outputs else None
        return OpenShard(name, writer, [(item, self.submit(item, writer)) for item in items])

    def _finish(self, shard: OpenShard[Item]) -> dict[str, list[Entry]]:
        """Wait for a shard's work and record it; return the entries of a shard that has no output, by its name."""
        entries: list[Entry] = []
        for item, futures in shard.pending:
            entries += self.entries(item, [future.result() for future in futures])
            self._advance(item)
        if shard.writer is None:
            return {shard.name: entries}
        shard.writer.commit(self.record_beside([item for item, _ in shard.pending]) | {"tensors": entries})
        return {}

    def _advance(self, item: Item) -> None:
        sources = self.sources(item)
        self.done_bytes += sum(info.nbytes for info in sources)
        self.report_progress(sources[0].name)

    def report_progress(self, message: str) -> None:
        """Call `progress` with the bytes that are done."""
        if self.progress is not None:
            self.progress(self.done_bytes, self._source_bytes, message)
