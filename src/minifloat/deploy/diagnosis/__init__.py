"""`doctor`: what this machine and this installation have, what is missing, what that costs, and what fits here."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minifloat._version import __version__
from minifloat.deploy.diagnosis import packages
from minifloat.deploy.diagnosis.machine import Gpu, Machine, examine_machine, find_gpus
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.report.document import Bullets, Column, Document, ShortReport, Table, Text, section
from minifloat.report.text import size_text

_LITTLE_MEMORY = _LITTLE_DISK = 1 << 30
#: Instruction set in use -> what a processor with a better one has. Source: the table of docs/kernels.md.
_WITHOUT = {
    "avx512_bf16": "no AMX: prompts and large batches are multiplied with AVX512_BF16",
    "avx512_vnni": "neither AMX nor an AVX512_BF16 faster than float32: prompts and batches are multiplied in float32",
    "avx512": "neither VNNI, AVX512_BF16 nor AMX: prompts and batches are multiplied in float32",
    "avx2": "no AVX-512: vectors have half the width, and without --activations int8 batches are multiplied in float32",
    "baseline": "no vector instructions that the kernels know: every step is many times slower",
}


@dataclass(frozen=True, repr=False)
class Diagnosis(ShortReport):
    """The state of a machine and of this installation.

    Attributes:
        versions: minifloat, Python and the packages that matter; "not installed" where missing.
        machine: Processor, kernels, memory, disk, threads.
        gpus: NVIDIA GPUs.
        torch_cuda: Version of CUDA that torch was built with; None: torch is built for CPUs, or is missing.
        extras: Extra -> packages of it that are missing.
        engines: Engines that are found, and their versions.
        kernels_note: What the instruction set in use lacks, and what that costs; empty if nothing.
        fits: Which engine and which scheme suit this machine, in sentences.
        advice: What to do; empty: all good.
    """

    versions: dict[str, str]
    machine: Machine
    gpus: tuple[Gpu, ...]
    torch_cuda: str | None
    extras: dict[str, tuple[str, ...]]
    engines: dict[str, str]
    kernels_note: str
    fits: tuple[str, ...]
    advice: tuple[str, ...]

    def headline(self) -> dict[str, str]:
        return {
            "processor": f"{self.machine.processor}, {self.machine.cores} cores",
            "kernels": self.machine.instruction_set or "none",
            "GPUs": ", ".join(gpu.name for gpu in self.gpus) or "none",
            "memory": f"{size_text(self.machine.memory_free)} free of {size_text(self.machine.memory)}",
            "to do": "; ".join(self.advice) or "nothing: all good",
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def doctor() -> Diagnosis:
    """Examine this machine and this installation; imports torch, to find the OpenMP runtime that comes with it."""
    torch_cuda = None
    with contextlib.suppress(ImportError, OSError):  # the commands that need torch report that it does not load
        torch_cuda = importlib.import_module("torch").version.cuda
    versions = {"minifloat": __version__, "python": platform.python_version(), **packages.versions()}
    machine, gpus, engines = examine_machine(), find_gpus(), packages.engines()
    return Diagnosis(
        versions,
        machine,
        gpus,
        torch_cuda,
        packages.missing_of_extras(),
        engines,
        _WITHOUT.get(machine.instruction_set or "", ""),
        tuple(fitting(machine, gpus, engines)),
        tuple(advice(machine, gpus, torch_cuda, versions)),
    )


def advice(
    machine: Machine,
    gpus: tuple[Gpu, ...],
    torch_cuda: str | None,
    versions: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> Iterator[str]:
    """Yield what to do about parts that are missing, too small, or in each other's way."""
    if machine.kernels_missing:
        yield (
            f"native kernels are not available: {machine.kernels_missing}. Quantizing falls back to plain torch, with "
            "the same bits and many times slower."
        )
    elif machine.instruction_set != machine.instruction_sets[0]:
        yield (
            f"MINIFLOAT_ISA forces the kernels to {machine.instruction_set}; this processor has "
            f"{machine.instruction_sets[0]}: unset it"
        )
    elif machine.not_built:
        yield (
            f"the kernels were built without {machine.not_built}, which this processor has: reinstall from source with "
            "--config-settings=cmake.define.MINIFLOAT_ISAS=all and a compiler that knows it"
        )
    if len(machine.openmp) > 1:
        yield (
            f"{len(machine.openmp)} OpenMP runtimes are loaded ({', '.join(machine.openmp)}): torch and the kernels "
            "then have threads of their own, which take the cores from each other. Build the kernels with the compiler "
            "whose runtime torch brings (libgomp: g++; libomp: clang++)."
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) < machine.threads:
        yield f"OMP_NUM_THREADS={threads} leaves cores idle: {machine.threads} threads can run; unset it"
    if gpus and torch_cuda is None:
        yield f"torch is built without CUDA, and there is a {gpus[0].name}: install torch for CUDA (pytorch.org)"
    if machine.huge_pages == "never":
        yield (
            "transparent huge pages are off, which costs more than a tenth of the bandwidth of memory: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        )
    if machine.memory_free < _LITTLE_MEMORY:
        yield f"{size_text(machine.memory_free)} of memory are free: calibrating and serving need at least the weights"
    if machine.disk_free < _LITTLE_DISK:
        yield f"{size_text(machine.disk_free)} are free on this disk: a quantized model needs its own size"
    yield from packages.problems(versions)


def fitting(machine: Machine, gpus: Sequence[Gpu], engines: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences: an engine, a scheme, and the reason."""
    names = {gpu.hardware for gpu in gpus}
    for name in sorted(filter(None, names)):
        arithmetic = ENGINE_HARDWARE[name].generation.arithmetic
        where = "is here" if "vllm" in engines else "is not here: in an environment of its own, pip install vllm"
        if E4M3 not in arithmetic:
            reason = "it has no FP8 arithmetic, so kernels decode the weights to 16 bits"
            schemes = "fp8-dynamic, or mxfp4"
        elif E2M1 in arithmetic:
            reason = "it multiplies FP8 and FP4"
            schemes = "fp8-block, or mxfp4-w4a4 or nvfp4-w4a4 where `minifloat compare` accepts it"
        else:
            reason = "it multiplies FP8"
            schemes = "fp8-block (or fp8-dynamic), or mxfp4 for the fewest bytes per step"
        yield f"{name}: vLLM ({where}) with --scheme {schemes}; {reason}"
    if gpus and None in names:
        yield "a GPU that the tables of `check` do not have: `minifloat serve --device cuda`, or vLLM after a try"
    if not gpus and machine.instruction_set is not None:
        yield (
            "this CPU: minifloat's own engine (`minifloat serve`), with --scheme mxfp4 (about a quarter of the "
            "bytes that a step reads) or fp8-block (about half); `minifloat bench` measures both, `compare` judges them"
        )


def document(diagnosis: Diagnosis) -> Document:
    """Return what was found, what suits it, and last what to do."""
    columns = [Column("what", left=True), Column("found", left=True, folds=True)]
    to_do = [f"To do {number}: {line.removesuffix('.')}." for number, line in enumerate(diagnosis.advice, 1)]
    return Document(
        "doctor",
        [
            section("", Table(columns, list(_rows(diagnosis)))),
            section("", *(Text(f"Fits here: {line}.") for line in diagnosis.fits)),
            section("", Bullets(to_do or ["All good."])),
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
