"""minifloat: post-training FP8 and MXFP4 quantization of language models, with a measured comparison to the original.

    quantize_checkpoint(source, destination, "fp8-block")   -> QuantizeReport
    quantize_checkpoint(source, destination, "mxfp4", data="self")  -> the codes are chosen with text
    convert_checkpoint(source, destination, "modelopt")     -> ConvertReport
    load(path)                                              -> transformers model with the quantized weights
    compare_models(baseline, candidate, [text])             -> Comparison
    generate(path, prompt)                                  -> pieces of text
    Engine(path).generate([prompt, prompt])                 -> completions, decoded together
    inspect_checkpoint(path)                                -> Inspection
    plan_model(path, "mxfp4", "h100")                       -> ModelPlan
    check_checkpoint(path, "vllm:h100:tp4")                 -> CheckReport
    push_checkpoint(path, "org/name")                       -> PushReport

A path is a folder or the id of a model of the hub; `push_checkpoint` accepts folders only.

Importing this package imports no torch: the names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minifloat._version import __version__

if TYPE_CHECKING:
    from minifloat.check import CheckReport, check_checkpoint
    from minifloat.checkpoint import Checkpoint
    from minifloat.compare import Comparison, compare_models
    from minifloat.convert import ConvertReport, convert_checkpoint
    from minifloat.errors import MinifloatError
    from minifloat.layouts.inspection import Inspection, inspect_checkpoint
    from minifloat.numerics.scheme import SCHEMES, Scheme
    from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
    from minifloat.plan import ModelPlan, plan_model
    from minifloat.publish.push import PushReport, push_checkpoint
    from minifloat.quantize.job import quantize_checkpoint
    from minifloat.quantize.report import QuantizeReport
    from minifloat.quantize.rounded import DataOptions
    from minifloat.runtime.load import load
    from minifloat.serve.engine import AsyncEngine, Engine, SamplingParams
    from minifloat.serve.text import generate

#: Public name -> the module that defines it.
_EXPORTS = {
    "AsyncEngine": "minifloat.serve.engine",
    "CheckReport": "minifloat.check",
    "Checkpoint": "minifloat.checkpoint",
    "Comparison": "minifloat.compare",
    "ConvertReport": "minifloat.convert",
    "DataOptions": "minifloat.quantize.rounded",
    "Engine": "minifloat.serve.engine",
    "Inspection": "minifloat.layouts.inspection",
    "MinifloatError": "minifloat.errors",
    "ModelPlan": "minifloat.plan",
    "PushReport": "minifloat.publish.push",
    "QuantizeReport": "minifloat.quantize.report",
    "QuantizedTensor": "minifloat.numerics.tensor",
    "SCHEMES": "minifloat.numerics.scheme",
    "SamplingParams": "minifloat.serve.engine",
    "Scheme": "minifloat.numerics.scheme",
    "check_checkpoint": "minifloat.check",
    "compare_models": "minifloat.compare",
    "convert_checkpoint": "minifloat.convert",
    "generate": "minifloat.serve.text",
    "inspect_checkpoint": "minifloat.layouts.inspection",
    "load": "minifloat.runtime.load",
    "plan_model": "minifloat.plan",
    "push_checkpoint": "minifloat.publish.push",
    "quantize_checkpoint": "minifloat.quantize.job",
    "quantize_tensor": "minifloat.numerics.tensor",
}

__all__ = [
    "SCHEMES",
    "AsyncEngine",
    "CheckReport",
    "Checkpoint",
    "Comparison",
    "ConvertReport",
    "DataOptions",
    "Engine",
    "Inspection",
    "MinifloatError",
    "ModelPlan",
    "PushReport",
    "QuantizeReport",
    "QuantizedTensor",
    "SamplingParams",
    "Scheme",
    "__version__",
    "check_checkpoint",
    "compare_models",
    "convert_checkpoint",
    "generate",
    "inspect_checkpoint",
    "load",
    "plan_model",
    "push_checkpoint",
    "quantize_checkpoint",
    "quantize_tensor",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
