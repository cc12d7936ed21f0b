"""minifloat: post-training FP8 and MXFP4 quantization of language models, with a measured comparison to the original.

Every command has a function whose name has the name of the command in it, and does nothing that the function cannot:

    quantize_checkpoint(source, destination, "fp8-block")           -> QuantizeReport
    quantize_checkpoint(source, destination, "mxfp4", data="self")  -> the codes are chosen with text
    preview_quantization(source, destination, "mxfp4")              -> what would be written: --dry-run
    calibrate(source, "text.jsonl")                                 -> Calibration, for "fp8-static" and FP8 KV caches
    inspect_checkpoint(path)                                        -> Inspection
    plan_model(path, "mxfp4", "h100")                               -> ModelPlan
    convert_checkpoint(source, destination, "modelopt")             -> ConvertReport
    check_checkpoint(path, "vllm:h100:tp4")                         -> CheckReport
    compare_models(baseline, candidate, [text])                     -> Comparison; compare_served for a running server
    generate(path, prompt)                                          -> pieces of text
    serve_checkpoint(path)                                          -> serves until SIGTERM
    bench_checkpoint(path, baseline)                                -> GainsReport
    write_report(path)                                              -> report.html beside the checkpoint
    chat(ChatClient(url))                                           -> a conversation in the terminal
    push_checkpoint(path, "org/name")                               -> PushReport
    doctor()                                                        -> Diagnosis

and `load(path)` gives a transformers model with the quantized weights, `Engine(path)` an engine that decodes many
prompts together. A path is a folder or the id of a model of the hub; `push_checkpoint` accepts folders only. Results
show their headline in a notebook; `to_dict` has all of them.

Importing this package imports no torch: the names are resolved on first use. The names of the subpackages (`quantize`,
`plan`, `compare`, ...) are those of commands, which is why the functions have a second word.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minifloat._version import __version__

if TYPE_CHECKING:
    from minifloat.calibration.calibrate import calibrate
    from minifloat.calibration.options import CalibrateOptions, TextOptions
    from minifloat.calibration.result import Calibration
    from minifloat.checkpoint import Checkpoint
    from minifloat.deploy.check import CheckReport, Target, check_checkpoint
    from minifloat.deploy.diagnosis import Diagnosis, doctor
    from minifloat.deploy.estimate import ModelPlan, plan_model
    from minifloat.deploy.options import PlanOptions, PushOptions
    from minifloat.deploy.publish import PushReport, push_checkpoint
    from minifloat.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
    from minifloat.errors import MinifloatError
    from minifloat.evaluate.bench.figures import GainsReport
    from minifloat.evaluate.bench.gains import bench_checkpoint
    from minifloat.evaluate.bench.workload import BenchOptions, Workload
    from minifloat.evaluate.checkpoint_report import write_report
    from minifloat.evaluate.compare.options import CompareOptions, ServedOptions, Tolerance
    from minifloat.evaluate.compare.result import Comparison
    from minifloat.evaluate.compare.run import compare_models
    from minifloat.evaluate.compare.served import compare_served
    from minifloat.model.layouts.inspection import Inspection, inspect_checkpoint
    from minifloat.model.runtime.load import LoadOptions, load
    from minifloat.numerics.scheme import SCHEMES, Scheme
    from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
    from minifloat.quantize.convert import ConvertOptions, ConvertReport, GgufOptions, convert_checkpoint
    from minifloat.quantize.data import DataOptions
    from minifloat.quantize.job import quantize_checkpoint
    from minifloat.quantize.options import Budget, QuantizeOptions
    from minifloat.quantize.preview import preview_quantization
    from minifloat.quantize.report import QuantizeReport
    from minifloat.quantize.rounding.methods import RoundingOptions, get_method
    from minifloat.serve.client import ChatClient, chat
    from minifloat.serve.server.settings import ServerSettings
    from minifloat.serve.server.start import serve_checkpoint
    from minifloat.serve.text import generate

#: Public name -> the module that defines it.
_EXPORTS = {
    "AsyncEngine": "minifloat.engine",
    "BenchOptions": "minifloat.evaluate.bench.workload",
    "Budget": "minifloat.quantize.options",
    "Calibration": "minifloat.calibration.result",
    "ChatClient": "minifloat.serve.client",
    "CheckReport": "minifloat.deploy.check",
    "Checkpoint": "minifloat.checkpoint",
    "CompareOptions": "minifloat.evaluate.compare.options",
    "Comparison": "minifloat.evaluate.compare.result",
    "ConvertOptions": "minifloat.quantize.convert",
    "ConvertReport": "minifloat.quantize.convert",
    "DataOptions": "minifloat.quantize.data",
    "Diagnosis": "minifloat.deploy.diagnosis",
    "Engine": "minifloat.engine",
    "EngineOptions": "minifloat.engine",
    "GainsReport": "minifloat.evaluate.bench.figures",
    "GgufOptions": "minifloat.quantize.convert",
    "Inspection": "minifloat.model.layouts.inspection",
    "LoadOptions": "minifloat.model.runtime.load",
    "MinifloatError": "minifloat.errors",
    "ModelPlan": "minifloat.deploy.estimate",
    "PlanOptions": "minifloat.deploy.options",
    "PushOptions": "minifloat.deploy.options",
    "PushReport": "minifloat.deploy.publish",
    "QuantizeOptions": "minifloat.quantize.options",
    "QuantizeReport": "minifloat.quantize.report",
    "QuantizedTensor": "minifloat.numerics.tensor",
    "RoundingOptions": "minifloat.quantize.rounding.methods",
    "CalibrateOptions": "minifloat.calibration.options",
    "SCHEMES": "minifloat.numerics.scheme",
    "SamplingParams": "minifloat.engine",
    "Scheme": "minifloat.numerics.scheme",
    "ServedOptions": "minifloat.evaluate.compare.options",
    "ServerSettings": "minifloat.serve.server.settings",
    "Target": "minifloat.deploy.check",
    "TextOptions": "minifloat.calibration.options",
    "Tolerance": "minifloat.evaluate.compare.options",
    "Workload": "minifloat.evaluate.bench.workload",
    "bench_checkpoint": "minifloat.evaluate.bench.gains",
    "calibrate": "minifloat.calibration.calibrate",
    "chat": "minifloat.serve.client",
    "check_checkpoint": "minifloat.deploy.check",
    "compare_models": "minifloat.evaluate.compare.run",
    "compare_served": "minifloat.evaluate.compare.served",
    "convert_checkpoint": "minifloat.quantize.convert",
    "doctor": "minifloat.deploy.diagnosis",
    "generate": "minifloat.serve.text",
    "get_method": "minifloat.quantize.rounding.methods",
    "inspect_checkpoint": "minifloat.model.layouts.inspection",
    "load": "minifloat.model.runtime.load",
    "plan_model": "minifloat.deploy.estimate",
    "preview_quantization": "minifloat.quantize.preview",
    "push_checkpoint": "minifloat.deploy.publish",
    "quantize_checkpoint": "minifloat.quantize.job",
    "quantize_tensor": "minifloat.numerics.tensor",
    "serve_checkpoint": "minifloat.serve.server.start",
    "write_report": "minifloat.evaluate.checkpoint_report",
}

__all__ = [
    "SCHEMES",
    "AsyncEngine",
    "BenchOptions",
    "Budget",
    "Calibration",
    "ChatClient",
    "CheckReport",
    "Checkpoint",
    "CompareOptions",
    "Comparison",
    "ConvertOptions",
    "ConvertReport",
    "DataOptions",
    "Diagnosis",
    "Engine",
    "EngineOptions",
    "GainsReport",
    "GgufOptions",
    "Inspection",
    "LoadOptions",
    "MinifloatError",
    "ModelPlan",
    "PlanOptions",
    "PushOptions",
    "PushReport",
    "QuantizeOptions",
    "QuantizeReport",
    "QuantizedTensor",
    "RoundingOptions",
    "CalibrateOptions",
    "SamplingParams",
    "Scheme",
    "ServedOptions",
    "ServerSettings",
    "Target",
    "TextOptions",
    "Tolerance",
    "Workload",
    "__version__",
    "bench_checkpoint",
    "calibrate",
    "chat",
    "check_checkpoint",
    "compare_models",
    "compare_served",
    "convert_checkpoint",
    "doctor",
    "generate",
    "get_method",
    "inspect_checkpoint",
    "load",
    "plan_model",
    "preview_quantization",
    "push_checkpoint",
    "quantize_checkpoint",
    "quantize_tensor",
    "serve_checkpoint",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
