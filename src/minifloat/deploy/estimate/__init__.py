"""`plan_model`: bytes, fit and roofline of a model on a machine, before anything is downloaded or quantized.

    planner.py, model_plan.py          plan_model and its result
    model_source.py, quantized_model.py, config_tensors.py   the tensors of a model: from headers, or from its config
    meta_model.py                      tensors and caches of any architecture, from transformers on the meta device
    shape.py, weights.py, cache.py, memory.py                sizes, bytes of weights, KV cache and activations
    hardware.py, steps.py, roofline.py                       machines, the cost of a step, its least time
    quantization.py, tensor_plan.py, parts.py, overrides.py  the output of `quantize` for every tensor

Only config and headers are read. For the Llama family and its mixtures nothing here imports torch, and the answer takes
a fraction of a second; other architectures import transformers, which takes seconds. The figures are bounds and sums,
not predictions: `bench` measures what an engine reaches.
"""

from minifloat.deploy.estimate.hardware import PLANNED_HARDWARE, Hardware, get_hardware
from minifloat.deploy.estimate.model_plan import ModelPlan, SchemePlan
from minifloat.deploy.estimate.planner import plan_model

__all__ = ["PLANNED_HARDWARE", "Hardware", "ModelPlan", "SchemePlan", "get_hardware", "plan_model"]
