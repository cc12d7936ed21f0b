"""What `doctor` says: what was found, what suits it, and last what to do."""

from __future__ import annotations

from collections.abc import Iterator

from minifloat.deploy.diagnosis import Diagnosis
from minifloat.report.document import Bullets, Column, Document, Table, Text, section
from minifloat.report.text import size_text

ALL_GOOD = "All good."


def document(diagnosis: Diagnosis) -> Document:
    """Return what was found, what suits it, and last what to do."""
    columns = [Column("what", left=True), Column("found", left=True, folds=True)]
    to_do = [f"To do {number}: {line.removesuffix('.')}." for number, line in enumerate(diagnosis.advice, 1)]
    return Document(
        "doctor",
        [
            section("", Table(columns, list(_rows(diagnosis)))),
            section("", *(Text(f"Fits here: {line}.") for line in diagnosis.fits)),
            section("", Bullets(to_do or [ALL_GOOD])),
        ],
    )


def _rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    machine = diagnosis.machine
    yield "processor", f"{machine.processor}, {machine.cores} cores"
    kernels = machine.instruction_set or f"none: {machine.kernels_missing}"
    others = ", ".join(name for name in machine.instruction_sets if name != machine.instruction_set)
    yield "native kernels", f"{kernels}{f' (it can also run {others})' if others else ''}"
    if diagnosis.kernels_note:
        yield "not here", diagnosis.kernels_note
    quota = machine.cpu_quota
    limit = "" if quota is None else f"; control groups allow the time of {quota:.3g} cores"
    yield "threads at most", f"{machine.threads}{limit}"
    yield "OpenMP", ", ".join(machine.openmp) or "none seen"
    limit = "" if machine.memory_limit is None else f"; control groups allow {size_text(machine.memory_limit)}"
    yield "memory", f"{size_text(machine.memory_free)} free of {size_text(machine.memory)}{limit}"
    yield "huge pages", machine.huge_pages or "the system does not say"
    yield "disk, this folder", f"{size_text(machine.disk_free)} free"
    for gpu in diagnosis.gpus:
        yield "GPU", f"{gpu.name}, {size_text(gpu.memory)}, driver {gpu.driver}, compute capability {gpu.capability}"
    if not diagnosis.gpus:
        yield "GPU", "none that nvidia-smi sees"
    yield from diagnosis.versions.items()
    yield "torch is built for", "CPUs" if diagnosis.torch_cuda is None else f"CUDA {diagnosis.torch_cuda}"
    for extra, missing in diagnosis.extras.items():
        without = f"without {', '.join(missing)}: pip install 'minifloat[{extra}]'"
        yield f"extra {extra}", without if missing else "installed"
    for engine in ("vllm", "sglang", "transformers"):
        yield f"engine {engine}", diagnosis.engines.get(engine, "not found in this environment or on PATH")
