"""What the commands share that make one model folder from another: where it may go, threads, resuming, small files."""

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
REPORT_FILE = "minifloat.json"  #: what was done to every tensor, beside the weights


def refuse_inside(source: Path, destination: Path) -> None:
    """Raise where the output would be its own source, or lie in it.

    Raises:
        UsageError: It would.
    """
    if destination.resolve() == source.resolve() or source.resolve() in destination.resolve().parents:
        raise UsageError(f"{destination} is the source or lies inside it; name a folder outside {source}")


def fingerprint(checkpoint: Checkpoint, *facts: Any) -> str:
    """A digest of everything that determines the output, the bytes of the weights aside: those are hashed per shard.

    Args:
        checkpoint: The source: its config, headers and sidecars count.
        facts: What was asked, as JSON values.
    """
    tensors = [
        (info.name, info.dtype, info.shape, info.shard, info.offset, info.nbytes)
        for info in checkpoint.tensors.values()
    ]
    sidecars = {name: hashlib.sha256(checkpoint.read_file(name)).hexdigest() for name in checkpoint.sidecars()}
    everything = [__version__, checkpoint.config, tensors, sidecars, *facts]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def worker_pool(threads: int, writer: CheckpointWriter) -> Iterator[ThreadPoolExecutor]:
    """Threads that make shards; an error does not wait for work that has not begun.

    Where the error is the source's, finished shards are forgotten: a source that cannot be used leaves nothing behind.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="minifloat") as pool:
        try:
            yield pool
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)  # leaving the pool would do all of the work first
            if isinstance(error, (TensorError, CheckpointError)):
                writer.start_over("the source cannot be used")
            raise


def keep_what_stands(writer: CheckpointWriter, digests: Mapping[str, Sequence[Future[str]]]) -> None:
    """Start over unless the tensors that finished shards were made from are the same, byte for byte.

    Args:
        writer: Its records of shards hold, under ``tensors``, the ``source_digest`` of each.
        digests: For every finished shard those of the source as it is now.

    Raises:
        StorageError: The system refuses.
    """
    for shard, futures in digests.items():
        recorded = [entry["source_digest"] for entry in writer.finished[shard]["tensors"]]
        if [future.result() for future in futures] != recorded:
            writer.start_over(f"{shard} of the source changed")
            return


def restart_notes(writer: CheckpointWriter) -> tuple[str, ...]:
    """What a report says of an earlier run that was not continued; nothing where there was none."""
    because = writer.restarted_because
    return () if because is None else (f"An earlier, unfinished run was not continued: {because}.",)


def write_sidecars(checkpoint: Checkpoint, writer: CheckpointWriter) -> None:
    """Carry over the tokenizer and whatever else makes weights usable.

    Raises:
        StorageError: The system refuses.
    """
    for name in checkpoint.sidecars():
        writer.write_file(name, checkpoint.read_file(name))


def write_index(writer: CheckpointWriter, shards: Mapping[str, Sequence[OutputTensor]]) -> None:
    """Write the index that says which shard holds which tensor.

    Raises:
        StorageError: The system refuses.
    """
    writer.write_file(INDEX_FILE, encode_index(shards))


def encode_json(value: Any) -> bytes:
    """A JSON file that people read too."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
