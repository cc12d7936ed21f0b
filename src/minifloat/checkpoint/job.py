"""`RewriteJob`: a run that writes the shards of one checkpoint from those of another.

`quantize` and `convert` share the order of the work. Shards that an earlier run finished are kept if their source is
unchanged. The work of each other shard is submitted to a pool of threads, tensor by tensor, and a complete shard is
synced and recorded. Subclasses define the work on a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.rewrite import restart_if_source_changed
from minifloat.checkpoint.schema import Check, exact_fields, list_of
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.checkpoint.writer import CheckpointWriter

#: Number of shards that are open for writing at a time: one is synced while the next is computed.
_SHARDS_IN_FLIGHT = 2

#: The unit of work of a job: the plan of one or several tensors of the source.
Item = TypeVar("Item")
#: A row of the report, as JSON values.
Entry = dict[str, Any]


def record_check(entry: Check, **beside: Check) -> Check:
    """Return the check of the record of a shard, for `CheckpointWriter`."""
    return exact_fields({**beside, "tensors": list_of(entry)})


@dataclass
class OpenShard(Generic[Item]):
    """A shard whose work has been submitted to the pool.

    Attributes:
        writer: The open output file; None if the shard has no outputs.
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
        shards: Items by shard name, in the order of the source; the output has the same shards.
        metadata: Strings for the header of each shard.
        progress: Called with the bytes done, the total bytes, and the name of a tensor or a step, if not None.
        resumed: Number of shards of an earlier run that `run` kept.
        done_bytes: Bytes of the source tensors whose work is done.
    """

    checkpoint: Checkpoint
    writer: CheckpointWriter
    pool: ThreadPoolExecutor
    shards: Mapping[str, Sequence[Item]]
    metadata: dict[str, str]
    progress: Progress | None
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
    def digests(self, item: Item) -> dict[str, Future[str]]:
        """Submit the hashing of the source tensors of an item, without other work.

        Returns:
            A future for each row of the report on the item, by the row's name and in the order of `entries`.
        """

    @abstractmethod
    def submit(self, item: Item, shard: ShardWriter | None) -> list[Future[Any]]:
        """Submit the work of an item to the pool.

        Args:
            item: The item.
            shard: The output shard of the item; None if it has no outputs.
        """

    @abstractmethod
    def entries(self, item: Item, results: list[Any]) -> list[Entry]:
        """Return the rows of the report on an item, each with a ``name`` and a ``source_digest``.

        Args:
            item: The item.
            results: Results of its futures, in the order of `submit`.
        """

    def prepare(self) -> None:
        """Run steps after the check of finished shards and before the first new shard. Nothing by default."""

    def record_beside(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return further values for the record of a shard. None by default."""
        return {}

    # ------------------------------------------------------------------------------------------ the run

    def run(self) -> list[Entry]:
        """Write every shard that is not finished.

        Returns:
            The entries of all items, in the order of the shards.

        Raises:
            StorageError: If the operating system refuses.
            TensorError: If a tensor cannot be rewritten.
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
        restart_if_source_changed(
            self.writer,
            {name: [pair for item in self.shards[name] for pair in self.digests(item).items()] for name in finished},
        )

    def _start(self, name: str, items: Sequence[Item]) -> OpenShard[Item]:
        """Open an output shard and submit its work to the pool."""
        outputs = [output for item in items for output in self.outputs(item)]
        writer = self.writer.shard(name, outputs, self.metadata) if outputs else None
        return OpenShard(name, writer, [(item, self.submit(item, writer)) for item in items])

    def _finish(self, shard: OpenShard[Item]) -> dict[str, list[Entry]]:
        """Wait for the work of a shard and record it; return the entries of a shard without outputs by its name."""
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
        """Call `progress` with the number of bytes done."""
        if self.progress is not None:
            self.progress(self.done_bytes, self._source_bytes, message)
