"""Groups of machines that rules name: the `hardware` of a rule."""

from __future__ import annotations

from collections.abc import Callable

from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE, HardwareGeneration
from minifloat.numerics.formats import E4M3

_ADA, _BLACKWELL = 89, 100


def _names(condition: Callable[[HardwareGeneration], bool]) -> tuple[str, ...]:
    return tuple(name for name, machine in ENGINE_HARDWARE.items() if condition(machine.generation))


ALL = tuple(ENGINE_HARDWARE)
CPUS = _names(lambda generation: generation.vendor == "cpu")
GPUS = _names(lambda generation: generation.vendor != "cpu")
NVIDIA = _names(lambda generation: generation.vendor == "nvidia")
AMD = _names(lambda generation: generation.vendor == "amd")
WITHOUT_AMX = _names(lambda generation: generation.vendor == "cpu" and not generation.amx)
FNUZ = _names(lambda generation: generation.fnuz)
BLACKWELL = _names(lambda generation: generation.vendor == "nvidia" and generation.capability >= _BLACKWELL)
BEFORE_BLACKWELL = _names(lambda generation: generation.vendor == "nvidia" and generation.capability < _BLACKWELL)
BEFORE_ADA = _names(lambda generation: generation.vendor == "nvidia" and generation.capability < _ADA)
#: Machines without FP8 arithmetic, where transformers decodes `quant_method: fp8` to BF16.
WITHOUT_FP8 = _names(lambda generation: E4M3 not in generation.arithmetic)
