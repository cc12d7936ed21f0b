"""One row of the matrix: every cell of one small model, in a process of its own."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

#: Seconds after which a row is ended.
_LIMIT = 180


@dataclass
class Row:
    """The outcomes of a row."""

    name: str
    reason: str = ""
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def wrong(self) -> dict[str, str]:
        """The wrong cells, with their details."""
        return {cell: detail for cell, (status, detail) in self.cells.items() if status == "WRONG"}


def run_row(case: Any, schemes: Sequence[str], keep: Path | None = None) -> Row:
    """Run every cell of a case."""
    import cells
    import small_models

    started = time.perf_counter()
    row = Row(case.name)
    work = Path(tempfile.mkdtemp(prefix="minifloat-")) if keep is None else keep / case.name
    work.mkdir(parents=True, exist_ok=True)
    try:
        source = small_models.make_model(case, work / "source")
    except small_models.NotSmallError as error:
        return Row(case.name, str(error))

    source = cells.stored_source(case, source, work)

    def note(column: str, outcome: cells.Outcome) -> None:
        row.cells[column] = (outcome.status.value, outcome.detail)

    made = []
    for scheme in schemes:
        outcome, quantized = cells.quantize(case, source, work, scheme)
        note(f"quantize {scheme}", outcome)
        if quantized is None:
            continue
        made.append(quantized)
        loaded = cells.load_ours(quantized)
        note(f"load {scheme}", loaded)
        note(f"dequantize {scheme}", cells.dequantize(case, quantized, work))
        there, verdict = cells.transformers(case, source, quantized)
        note(f"transformers {scheme}", there)
        note(f"check {scheme}", verdict)
        note(f"check-ours {scheme}", cells.check_ours(quantized, loaded))
    if made:
        note("engine", cells.engine(made[-1]))
    outcome, stats = cells.calibration(case, source, made[0] if made else None)
    note("calibrate", outcome)
    note(cells.STATIC, cells.static(case, source, work, stats))
    if case.stored is not None:
        return _finished(row, work, keep, started)
    for column, outcome in zip(("plan", "plan config"), cells.plan(source, work, made), strict=True):
        note(column, outcome)
    return _finished(row, work, keep, started)


def _finished(row: Row, work: Path, keep: Path | None, started: float) -> Row:
    if keep is None:
        shutil.rmtree(work, ignore_errors=True)
    row.seconds = time.perf_counter() - started
    return row


def run_rows(cases: Sequence[Any], schemes: Sequence[str], workers: int, keep: Path | None = None) -> Iterator[Row]:
    """Run each case in a forked process, and yield its row as it ends.

    A process that crashes, hangs or is killed gives a row that says so.
    """
    _import_all()
    context = multiprocessing.get_context("fork")
    waiting, running = list(cases), {}
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, schemes, keep, sender))
            process.start()
            sender.close()
            running[receiver] = (case, process)
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            case, process = running.pop(ready)
            try:
                yield Row(**json.loads(ready.recv_bytes()))
            except EOFError:
                process.join()
                yield Row(case.name, cells={"process": ("WRONG", f"ended with status {process.exitcode}")})
            process.join()


def _child(case: Any, schemes: Sequence[str], keep: Path | None, sender: Connection) -> None:
    _renew_thread_pool()
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(_LIMIT)

    silence = os.open(os.devnull, os.O_WRONLY)
    if keep is None:
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    try:
        row = run_row(case, schemes, keep)
    except BaseException as error:
        lines = traceback.format_exc().splitlines()
        place = next((line.strip() for line in reversed(lines) if "architectures/" in line), "")
        row = Row(case.name, cells={"process": ("WRONG", f"{type(error).__name__}: {error} ({place})")})
    sender.send_bytes(json.dumps(asdict(row)).encode())
    sender.close()
    os._exit(0)


def _renew_thread_pool() -> None:
    """Make PyTorch replace the thread pool of the parent here, before other threads of this process do.

    The first call of at::set_num_threads after a fork replaces the pool, without a lock; a new thread makes this call
    at its first operation. Threads that do so at once, as those in which transformers loads weights, find no pool
    ("Invalid thread pool"). Source: pytorch, caffe2/utils/threadpool/pthreadpool-cpp.cc and ATen/ParallelOpenMP.cpp.
    """
    import torch

    torch.set_num_threads(1)


def _late(*_: Any) -> None:
    raise TimeoutError(f"not done in {_LIMIT} s")


def _import_all() -> None:
    """Import what every row needs, once, before processes are forked."""
    import torch
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from small_models import Case

    run_row(Case("llama", "llama"), ("fp8-block", "mxfp4"))
