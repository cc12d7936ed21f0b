"""The embedded engine: many requests decoded together, one step after the other. Begin reading at `Engine.step`.

The scheduler says which tokens of which sequences are computed, the runner computes them, the sampler takes the next
token of each, and what is new is delivered. Names are resolved on first use: `EngineOptions` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.engine.async_engine import AsyncEngine as AsyncEngine
    from minifloat.engine.async_engine import RequestStream as RequestStream
    from minifloat.engine.engine import Engine as Engine
    from minifloat.engine.grammar import Grammar as Grammar
    from minifloat.engine.options import EngineOptions as EngineOptions
    from minifloat.engine.reports import EngineListener as EngineListener
    from minifloat.engine.reports import ModelInfo as ModelInfo
    from minifloat.engine.reports import StepStats as StepStats
    from minifloat.engine.sampling import MODEL_DEFAULTS as MODEL_DEFAULTS
    from minifloat.engine.sampling import SamplingParams as SamplingParams
    from minifloat.engine.sampling import Thinking as Thinking
    from minifloat.engine.sampling import TokenLogprob as TokenLogprob
    from minifloat.engine.sequence import Delivery as Delivery
    from minifloat.engine.sequence import GeneratedText as GeneratedText
    from minifloat.engine.sequence import Request as Request
    from minifloat.engine.sequence import Timings as Timings
    from minifloat.engine.sequence import TokenUsage as TokenUsage

_MODULES = {
    "async_engine": ("AsyncEngine", "RequestStream"),
    "engine": ("Engine",),
    "grammar": ("Grammar",),
    "options": ("EngineOptions",),
    "reports": ("EngineListener", "ModelInfo", "StepStats"),
    "sampling": ("MODEL_DEFAULTS", "SamplingParams", "Thinking", "TokenLogprob"),
    "sequence": ("Delivery", "GeneratedText", "Request", "Timings", "TokenUsage"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
