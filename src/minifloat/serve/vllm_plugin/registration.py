"""`register_kernels`: puts the kernels into vLLM's tables, or says why it does not."""

from __future__ import annotations

from typing import Any

from minifloat._version import __version__
from minifloat.deploy.check import vllm_plugin
from minifloat.errors import MinifloatError
from minifloat.kernels import native

#: Modules of vLLM's kernels that decode weights or quantize inputs with operators of torch; ours go before them.
_FALLBACKS = (".pytorch", ".emulation")


def register_kernels() -> None:
    """Put the kernels into vLLM's tables for CPUs, behind kernels that need instructions which we do not use (AMX).

    Does nothing, and logs why: on another platform than a CPU (level debug), with a version of vLLM that was not
    tested, without the native library (level warning). A second call changes nothing.
    """
    from vllm.logger import init_logger
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.version import __version__ as vllm_version

    log = init_logger("vllm.minifloat")
    if not current_platform.is_cpu():
        log.debug("minifloat: no kernels are registered on %s; they compute on CPUs", current_platform.device_name)
        return
    reason = why_not(vllm_version)
    if reason:
        log.warning("minifloat: no kernels are registered, vLLM runs without them: %s", reason)
        return
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import register_quantization_config

    from minifloat.serve.vllm_plugin import unquantized
    from minifloat.serve.vllm_plugin.config import MinifloatCompressedTensorsConfig
    from minifloat.serve.vllm_plugin.kernels import TABLES

    # part of the key of vLLM's cache of compiled graphs, which would else return those of before
    envs.environment_variables["MINIFLOAT_KERNELS"] = lambda: __version__
    for table, kernel in TABLES.items():
        put(getattr(linear, table).setdefault(PlatformEnum.CPU, []), kernel)
    register_quantization_config("compressed-tensors")(MinifloatCompressedTensorsConfig)
    kept = unquantized.why_not()
    if kept:
        log.debug("minifloat: BF16 linears stay with vLLM: %s", kept)
    else:
        unquantized.replace_layers()
    log.debug("minifloat: kernels registered for %s", native.isa())


def why_not(version: str) -> str:
    """Return why nothing is registered; empty if it is."""
    if not vllm_plugin.is_tested(version):
        tested = ", ".join(vllm_plugin.TESTED_VERSIONS)
        return f"vLLM {version} was not tested with them, only {tested}; install one of these, or another minifloat"
    try:
        return native.why_unavailable()
    except MinifloatError as error:  # MINIFLOAT_ISA names an instruction set that this processor lacks
        return str(error)


def put(kernels: list[Any], kernel: type) -> None:
    """Insert a kernel before those that are slow everywhere, once."""
    if kernel in kernels:
        return
    places = [index for index, other in enumerate(kernels) if other.__module__.endswith(_FALLBACKS)]
    kernels.insert(places[0] if places else len(kernels), kernel)
