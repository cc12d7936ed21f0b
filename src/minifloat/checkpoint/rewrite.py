"""`RewriteJob`: a run that writes the shards of one checkpoint from those of another: `quantize` and `convert`."""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from minifloat._version import __version__
from minifloat.checkpoint.header import encode_index
from minifloat.checkpoint.layout import INDEX_FILE
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.schema import Check, exact_fields, list_of
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.errors import CheckpointError, TensorError, UsageError

CARD_FILE = "README.md"
REPORT_FILE = "minifloat.json"  #: the report on every tensor, a file beside the weights
#: Key in the metadata of shards that says how the codes were chosen: `NEAREST`, or a method that uses text.
ROUNDING = "rounding"
NEAREST = "nearest"


def rounding_of(checkpoint: Checkpoint) -> str | None:
    """Return how the codes of a checkpoint were chosen, as its shards state it; None if they do not, or differ."""
    stated = {metadata.get(ROUNDING) for metadata in checkpoint.metadata.values()}
    return stated.pop() if len(stated) == 1 else None


def refuse_inside(source: Path, destination: Path) -> None:
    if destination.resolve() == source.resolve() or source.resolve() in destination.resolve().parents:
        raise UsageError(f"{destination} is the source or lies inside it; name a folder outside {source}")


def fingerprint(checkpoint: Checkpoint, *facts: Any) -> str:
    """Return a digest of everything that determines the output except the weights, which are hashed per shard."""
    tensors = [
        (info.name, info.dtype, info.shape, info.shard, info.offset, info.nbytes)
        for info in checkpoint.tensors.values()
    ]
    sidecars = {name: hashlib.sha256(checkpoint.read_file(name)).hexdigest() for name in checkpoint.sidecars()}
    everything = [__version__, checkpoint.config, tensors, sidecars, *facts]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def worker_pool(threads: int, writer: CheckpointWriter) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that write shards; an error cancels the rest, one of the source all."""
    with ThreadPoolExecutor(threads, thread_name_prefix="minifloat") as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)  # without this the pool would finish all queued work first
            if isinstance(error, (TensorError, CheckpointError)):
                writer.start_over("the source cannot be used")
            raise


def restart_if_source_changed(
    writer: CheckpointWriter, digests: Mapping[str, Sequence[tuple[str, Future[str]]]]
) -> None:
    for shard, current in digests.items():
        recorded = [(entry["name"], entry["source_digest"]) for entry in writer.finished[shard]["tensors"]]
        if [(name, digest.result()) for name, digest in current] != recorded:
            writer.start_over(f"{shard} of the source changed")
            return


def restart_notes(writer: CheckpointWriter) -> tuple[str, ...]:
    """Return the notes for the report about work of an earlier run that was not continued, if there was some."""
    because = writer.restarted_because
    notes = [] if because is None else [f"An earlier, unfinished run was not continued: {because}."]
    notes += [
        f"{name} of the earlier run was written again, because the file {reason}: check the disk."
        for name, reason in writer.damaged.items()
    ]
    return tuple(notes)


def write_sidecars(checkpoint: Checkpoint, writer: CheckpointWriter) -> None:
    for name in checkpoint.sidecars():
        writer.write_file(name, checkpoint.read_file(name))


def write_index(writer: CheckpointWriter, shards: Mapping[str, Sequence[OutputTensor]]) -> None:
    writer.write_file(INDEX_FILE, encode_index(shards))


def encode_json(value: Any) -> bytes:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its escape in JSON


#: Number of shards that are open for writing at a time: one is synced while the next is computed.
_SHARDS_IN_FLIGHT = 2

#: The unit of work of a job: the plan of one or several tensors of the source.
Item = TypeVar("Item")
#: A row of the report, as JSON values.
Entry = dict[str, Any]


def record_check(entry: Check, **beside: Check) -> Check:
    return exact_fields({**beside, "tensors": list_of(entry)})


@dataclass
class OpenShard(Generic[Item]):
    """A shard whose work has been submitted to the pool."""

    name: str
    writer: ShardWriter | None
    pending: list[tuple[Item, list[Future[Any]]]]


@dataclass
class RewriteJob(ABC, Generic[Item]):
    """One run over all shards of a source."""

    checkpoint: Checkpoint
    writer: CheckpointWriter
    pool: ThreadPoolExecutor
    shards: Mapping[str, Sequence[Item]]
    metadata: dict[str, str]
    progress: Progress | None
    resumed: int = field(default=0, init=False)  #: shards of an earlier run that `run` kept
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
        """Submit the hashing of an item's sources; return futures by names of its rows, in the order of `entries`."""

    @abstractmethod
    def submit(self, item: Item, shard: ShardWriter | None) -> list[Future[Any]]:
        """Submit the work of an item to the pool; the shard is None if it has no outputs."""

    @abstractmethod
    def entries(self, item: Item, results: list[Any]) -> list[Entry]:
        """Return the rows of the report on an item, each with ``name`` and ``source_digest``."""

    def prepare(self) -> None:
        """Run steps after the check of finished shards and before the first new shard. Nothing by default."""

    def record_beside(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return further values for the record of a shard. None by default."""
        return {}

    # ------------------------------------------------------------------------------------------ the run

    def run(self) -> list[Entry]:
        """Write every shard that is not finished; return the entries of all items, in the order of the shards."""
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
