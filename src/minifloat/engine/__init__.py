"""The embedded engine: many requests decoded together, one step after the other.

`Engine.step` is the whole of it: the scheduler says which tokens of which sequences are computed, the runner computes
them, the sampler takes the next token of each, and what is new is delivered. One file per noun.
"""

from minifloat.engine.async_engine import AsyncEngine, RequestStream
from minifloat.engine.engine import Engine
from minifloat.engine.grammar import Grammar
from minifloat.engine.info import ModelInfo
from minifloat.engine.listener import EngineListener, StepStats
from minifloat.engine.sampling import MODEL_DEFAULTS, SamplingParams, TokenLogprob
from minifloat.engine.sequence import Delivery, GeneratedText, Request, Timings, TokenUsage

__all__ = [
    "MODEL_DEFAULTS",
    "AsyncEngine",
    "GeneratedText",
    "Delivery",
    "Engine",
    "Grammar",
    "ModelInfo",
    "EngineListener",
    "Request",
    "RequestStream",
    "SamplingParams",
    "StepStats",
    "Timings",
    "TokenLogprob",
    "TokenUsage",
]
