"""`Target`: the engine, the kind of machine and the number of GPUs that a checkpoint is judged for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from minifloat._version import __version__
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE, LOCAL_HARDWARE, Hardware, HardwareGeneration
from minifloat.errors import UsageError, lookup
from minifloat.model.layouts import gguf, mlx
from minifloat.numerics.formats import E4M3

#: Engine -> the version whose code the rules were read from.
ENGINES = {
    "vllm": "vLLM 0.33.0",
    "sglang": "SGLang 0.5.23",
    "tensorrt-llm": "TensorRT-LLM, main branch at 008e0af8",
    "transformers": "transformers 5.24.0 with compressed-tensors 0.20.1",
    "minifloat": f"minifloat {__version__}",
    "mlx": "mlx-lm 0.32.2 with mlx 0.32.4",
    "llama.cpp": "llama.cpp of llama-cpp-python 0.3.36",
    "ollama": "Ollama, main branch at fb307609",
}
#: Engine -> earlier versions for which the rules hold too. Packages of vLLM for CPUs ended with 0.32.0 on 2026-11-28.
EARLIER = {"vllm": ("0.32.0",)}
#: Engines on `LOCAL_HARDWARE`, and the layout that is made for each; reports on other layouts leave them out.
LOCAL = {"mlx": mlx.NAME, "llama.cpp": gguf.NAME, "ollama": gguf.NAME}

#: Engine -> plugins of it that the rules know.
PLUGINS = {"vllm": {"minifloat": "minifloat's kernels for linears on CPUs"}}

_TARGET = re.compile(r"(?P<engine>[a-z.-]+)(\+(?P<plugin>[a-z]+))?:(?P<hardware>[a-z0-9-]+)(:tp(?P<tp>[1-9]\d*))?")


@dataclass(frozen=True)
class Target:
    """An engine on a machine.

    Attributes:
        engine: A name in `ENGINES`.
        hardware: The machine.
        tp: GPUs that share every matrix (tensor parallelism).
        plugin: A plugin of the engine, by its name in `PLUGINS`; None: the engine alone.
    """

    engine: str
    hardware: Hardware
    tp: int = 1
    plugin: str | None = None

    @classmethod
    def of(cls, engine: str, hardware: str, tp: int = 1, plugin: str | None = None) -> Target:
        """Return the target of these names.

        Raises:
            UnknownNameError: The engine, the hardware or the plugin is unknown.
            UsageError: `tp` is below 1, or the plugin does nothing on this hardware.
        """
        lookup("engine", engine, ENGINES)
        if tp < 1:
            raise UsageError(f"tp is at least 1, got {tp}")
        machine = lookup("hardware", hardware, machines_of(engine))
        if plugin is not None:
            lookup(f"plugin of {engine}", plugin, PLUGINS.get(engine, {}))
            if machine.generation.vendor != "cpu":
                raise UsageError(f"the plugin {plugin} of {engine} computes on CPUs; on {hardware} it changes nothing")
        return cls(engine, machine, tp, plugin)

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``ENGINE:HARDWARE`` or ``ENGINE:HARDWARE:tpN``; ``ENGINE+PLUGIN`` is an engine with a plugin.

        Raises:
            UsageError: The text has another form, or names an unknown engine or hardware.
        """
        match = _TARGET.fullmatch(text)
        if match is None:
            raise UsageError(f"a target is ENGINE:HARDWARE or ENGINE:HARDWARE:tpN, as in vllm:h100:tp4; got {text!r}")
        return cls.of(match["engine"], match["hardware"], int(match["tp"] or 1), match["plugin"])

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        plugin = f"+{self.plugin}" if self.plugin else ""
        return f"{self.engine}{plugin}:{self.hardware.name}" + (f":tp{self.tp}" if self.tp > 1 else "")


def machines_of(engine: str) -> dict[str, Hardware]:
    """Return the machines that the rules of an engine were read for."""
    return LOCAL_HARDWARE if engine in LOCAL else ENGINE_HARDWARE


_ADA, _HOPPER, _BLACKWELL = 89, 90, 100


def _names(condition: Callable[[HardwareGeneration], bool]) -> tuple[str, ...]:
    return tuple(name for name, machine in ENGINE_HARDWARE.items() if condition(machine.generation))


ALL = tuple(ENGINE_HARDWARE)
LOCALS = tuple(LOCAL_HARDWARE)
CPUS = _names(lambda generation: generation.vendor == "cpu")
GPUS = _names(lambda generation: generation.vendor != "cpu")
NVIDIA = _names(lambda generation: generation.vendor == "nvidia")
AMD = _names(lambda generation: generation.vendor == "amd")
WITH_AMX = _names(lambda generation: generation.amx)
WITHOUT_AMX = _names(lambda generation: generation.vendor == "cpu" and not generation.amx)
FNUZ = _names(lambda generation: generation.fnuz)
BEFORE_HOPPER = _names(lambda generation: generation.vendor == "nvidia" and generation.capability < _HOPPER)
HOPPER = _names(lambda generation: generation.vendor == "nvidia" and generation.capability == _HOPPER)
SINCE_HOPPER = _names(lambda generation: generation.vendor == "nvidia" and generation.capability >= _HOPPER)
BLACKWELL = _names(lambda generation: generation.vendor == "nvidia" and generation.capability >= _BLACKWELL)
BEFORE_BLACKWELL = _names(lambda generation: generation.vendor == "nvidia" and generation.capability < _BLACKWELL)
BEFORE_ADA = _names(lambda generation: generation.vendor == "nvidia" and generation.capability < _ADA)
#: Machines without FP8 arithmetic, where transformers decodes `quant_method: fp8` to BF16.
WITHOUT_FP8 = _names(lambda generation: E4M3 not in generation.arithmetic)
