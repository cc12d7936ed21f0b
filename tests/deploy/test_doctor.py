"""`doctor`: what is found here, and what is said about machines that are not here."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minifloat.commands.main import main
from minifloat.deploy.diagnosis import advice, doctor, fitting, packages
from minifloat.deploy.diagnosis.machine import (
    Gpu,
    Machine,
    find_gpus,
    huge_pages,
    not_built,
    processor_name,
)

GOOD = Machine(
    processor="A processor",
    cores=8,
    cpu_quota=None,
    threads=8,
    openmp=("/lib/libgomp.so.1",),
    instruction_sets=("amx", "avx2"),
    instruction_set="amx",
    not_built="",
    kernels_missing="",
    memory=64 << 30,
    memory_free=60 << 30,
    memory_limit=None,
    disk_free=99 << 30,
    huge_pages="madvise",
)
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, "570.86.10", "9.0", "h100")


def advise(
    machine: Machine = GOOD, gpus: tuple[Gpu, ...] = (), cuda: str | None = None, **environment: str
) -> list[str]:
    return list(advice(machine, gpus, cuda, {}, environment))


def test_a_machine_that_lacks_nothing_gets_no_advice() -> None:
    assert advise() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernels_missing": "not built", "instruction_set": None}, "native kernels are not available: not built"),
        ({"instruction_set": "avx2"}, "MINIFLOAT_ISA forces the kernels to avx2; this processor has amx"),
        ({"not_built": "amx"}, "the kernels were built without amx, which this processor has: reinstall from source"),
        ({"openmp": ("/a/libgomp.so", "/b/libomp.so")}, "2 OpenMP runtimes are loaded (/a/libgomp.so, /b/libomp.so)"),
        ({"huge_pages": "never"}, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        ({"memory_free": 100 << 20}, "100.00 MiB of memory are free"),
        ({"disk_free": 100 << 20}, "100.00 MiB are free on this disk"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_missing_is_said_with_what_to_do(change: dict[str, Any], words: str) -> None:
    (line,) = advise(replace(GOOD, **change))
    assert words in line


def test_settings_that_leave_parts_of_the_machine_unused_are_named() -> None:
    (threads,) = advise(OMP_NUM_THREADS="2")
    assert threads.startswith("OMP_NUM_THREADS=2 leaves cores idle: 8 threads can run")
    assert advise(OMP_NUM_THREADS="8") == []
    (torch,) = advise(gpus=(H100,))
    assert "torch is built without CUDA, and there is a NVIDIA H100" in torch
    assert advise(gpus=(H100,), cuda="13.0") == []


def test_versions_below_the_first_that_works_are_named() -> None:
    for problem in packages.PROBLEMS:
        first = ".".join(map(str, problem.below))
        assert not [line for line in packages.problems({problem.package: first}) if line.startswith(problem.package)]
        (line,) = packages.problems({problem.package: "0.1.dev2+cpu"})
        assert line.startswith(f"{problem.package} 0.1.dev2+cpu: ")
        assert f"pip install -U {problem.package}" in line
    assert list(packages.problems({"compressed-tensors": "not installed"})) == []
    (line,) = packages.problems({"torch": "not installed"})
    assert line.startswith("torch is not installed")


def test_gpus_are_read_from_nvidia_smi() -> None:
    rows = "NVIDIA H100 80GB HBM3, 81559, 570.86.10, 9.0\nSome, other GPU, 1024, 1.0, 7.5\nno row\n"
    assert find_gpus((sys.executable, "-c", f"print({rows!r})")) == (
        H100,
        Gpu("Some, other GPU", 1 << 30, "1.0", "7.5", None),
    )
    assert find_gpus((sys.executable, "-c", f"print({rows!r}); raise SystemExit(9)")) == ()
    assert find_gpus(("/no/such/program",)) == ()


def test_the_files_of_linux_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("always [madvise] never\n")
    assert huge_pages(file) == "madvise"
    file.write_text("processor : 0\nmodel name\t: A CPU @ 2 GHz\n")
    assert processor_name(file) == "A CPU @ 2 GHz"
    vnni = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512vbmi gfni"
    file.write_text(f"model name\t: A CPU\nflags\t\t: fpu {vnni}\n")
    assert not_built(("avx512", "baseline"), file) == "avx512_vnni"
    assert not_built(("avx512_vnni", "baseline"), file) == ""
    for vendor, fastest in (("AuthenticAMD", "avx512_bf16"), ("GenuineIntel", "avx512_vnni")):
        file.write_text(f"vendor_id\t: {vendor}\nflags\t\t: {vnni} avx512_bf16\n")
        assert not_built(("baseline",), file) == fastest
    file.write_text("processor : 0\nFeatures\t: fp asimd bf16\n")
    assert not_built(("baseline",), file) == "neon_bf16"
    assert not_built(("baseline",), tmp_path / "missing") == ""
    assert huge_pages(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("hardware", "scheme"), [("a100", "fp8-dynamic, or mxfp4"), ("h100", "fp8-block"), ("b200", "mxfp4-w4a4")]
)
def test_a_gpu_gets_vllm_and_a_scheme_that_it_multiplies(hardware: str, scheme: str) -> None:
    (line,) = fitting(GOOD, (replace(H100, hardware=hardware),) * 2, {})
    assert line.startswith(
        f"{hardware}: vLLM (is not here: in an environment of its own, pip install vllm) with --scheme"
    )
    assert scheme in line
    assert "vLLM (is here)" in next(fitting(GOOD, (H100,), {"vllm": "0.32.0"}))


def test_a_cpu_gets_the_own_engine_and_an_unknown_gpu_a_try() -> None:
    (line,) = fitting(GOOD, (), {})
    assert line.startswith("this CPU: minifloat's own engine")
    (line,) = fitting(GOOD, (replace(H100, hardware=None),), {})
    assert "--device cuda" in line


def test_the_command_prints_what_the_function_found_and_ends_with_what_to_do() -> None:
    found = doctor()
    output = CliRunner().invoke(main, ["doctor"]).output
    assert found.machine.processor in output
    for word in ("native kernels", "threads at most", "huge pages", "extra serve", "engine vllm", "Fits here: "):
        assert word in output
    last = output.splitlines()[-1]
    assert last.startswith(f"To do {len(found.advice)}: ") if found.advice else last == "All good."
    document = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert document["machine"]["instruction_sets"] == list(found.machine.instruction_sets)
    assert document["advice"] == list(found.advice)


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    of_users = {
        extra: names
        for extra, names in project["optional-dependencies"].items()
        if extra not in ("dev", "docs", "fuzz")
    }
    for extra, requirements in of_users.items():
        names = tuple(re.split(r"[<>=\[]", requirement)[0] for requirement in requirements)
        assert packages.EXTRAS[extra] == tuple(name for name in names if name != "minifloat")
    assert packages.EXTRAS.keys() == of_users.keys()
