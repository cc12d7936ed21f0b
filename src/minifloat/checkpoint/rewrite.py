"""Steps shared by the commands that write one model folder from another: checks, threads, resuming, small files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minifloat._version import __version__
from minifloat.checkpoint.index import encode_index
from minifloat.checkpoint.layout import INDEX_FILE
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.tensors import OutputTensor
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
    """Refuse a destination that is the source or lies inside it."""
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
    """Yield a pool of threads that write shards; an error cancels the work that has not begun.

    If the error lies in the source (a TensorError or CheckpointError), the finished shards are discarded too.
    """
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
    """Discard all finished shards if the source of one of them has changed."""
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
    """Copy the tokenizer and the other sidecars."""
    for name in checkpoint.sidecars():
        writer.write_file(name, checkpoint.read_file(name))


def write_index(writer: CheckpointWriter, shards: Mapping[str, Sequence[OutputTensor]]) -> None:
    """Write the index that maps tensors to shards."""
    writer.write_file(INDEX_FILE, encode_index(shards))


def encode_json(value: Any) -> bytes:
    """Return `value` as indented JSON that ends with a newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes its escape in JSON
