"""The embedded engine: many requests decoded together, one step after the other.

`Engine.step` is the whole of it: the scheduler says which tokens of which sequences are computed, the runner computes
them, the sampler takes the next token of each, and what is new is delivered. One file per noun.
"""

from minifloat.serve.engine.async_engine import AsyncEngine, RequestStream
from minifloat.serve.engine.engine import Engine
from minifloat.serve.engine.grammar import Grammar
from minifloat.serve.engine.info import ModelInfo
from minifloat.serve.engine.listener import EngineListener, StepStats
from minifloat.serve.engine.sampling import MODEL_DEFAULTS, SamplingParams, TokenLogprob
from minifloat.serve.engine.sequence import Delivery, GeneratedText, Request, Timings, TokenUsage

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
