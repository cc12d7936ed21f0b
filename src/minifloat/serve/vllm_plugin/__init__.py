"""A plugin that gives vLLM the kernels of this package on CPUs (entry point group ``vllm.general_plugins``).

`register` is what vLLM calls; vLLM is imported there and in `kernels.py` only. `packed.py` packs the weights of a layer
after loading, and multiplies with them.
"""

from __future__ import annotations

from typing import Any

from minifloat._version import __version__
from minifloat.deploy.check import vllm_plugin
from minifloat.errors import MinifloatError
from minifloat.kernels import native

#: Modules of vLLM's kernels that decode weights or quantize inputs with operators of torch; ours go before them.
_FALLBACKS = (".pytorch", ".emulation")


def register() -> None:
    """Put the kernels into vLLM's tables for CPUs, behind kernels that need instructions which we do not use (AMX)."""
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
    if not vllm_plugin.ran_in(vllm_version):
        log.warning("minifloat: the kernels ran with the Python code of vLLM %s, not with a build of it", vllm_version)
    from vllm import envs
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization import register_quantization_config

    from minifloat.serve.vllm_plugin import experts, kernels

    # part of the key of vLLM's cache of compiled graphs, which would else return those of before
    envs.environment_variables["MINIFLOAT_KERNELS"] = lambda: __version__
    for table, kernel in kernels.TABLES.items():
        put(getattr(linear, table).setdefault(PlatformEnum.CPU, []), kernel)
    register_quantization_config("compressed-tensors")(kernels.MinifloatCompressedTensorsConfig)
    register_quantization_config("fp8")(experts.MinifloatFp8Config)
    kept = kernels.why_not_bf16()
    if kept:
        log.debug("minifloat: BF16 linears stay with vLLM: %s", kept)
    else:
        kernels.replace_bf16_layers()
    log.debug("minifloat: kernels registered for %s", native.isa())


def why_not(version: str) -> str:
    """Return why nothing is registered; empty if it is."""
    if vllm_plugin.ran_in(version) is None:
        known = ", ".join(vllm_plugin.VERSIONS)
        return f"they are made for vLLM {known}, not {version}; install one of these, or another minifloat"
    try:
        return native.why_unavailable()
    except MinifloatError as error:  # MINIFLOAT_ISA names an instruction set that this processor lacks
        return str(error)


def put(table: list[Any], kernel: type) -> None:
    """Insert a kernel before those that are slow everywhere, once."""
    if kernel in table:
        return
    places = [index for index, other in enumerate(table) if other.__module__.endswith(_FALLBACKS)]
    table.insert(places[0] if places else len(table), kernel)
