"""`plan_model`: bytes, fit and roofline of a model on a machine, before anything is downloaded or quantized.

    estimator.py, model_plan.py        plan_model, its options and its result
    model_source.py, config_tensors.py the tensors of a model: from headers, or from its config
    meta_model.py                      tensors and caches of any architecture, from transformers on the meta device
    shape.py, cache.py, weights.py, memory.py  sizes, bytes of caches and weights, what fits a device
    hardware.py, roofline.py           machines, the cost of a step and its least time
    known_loss.py                      what the schemes were measured to lose

Only config and headers are read. For the Llama family nothing here imports torch, and the answer takes a fraction of a
second; other architectures import transformers, which takes seconds. The figures are bounds and sums,
not predictions: `bench` measures what an engine reaches.
"""

from minifloat.deploy.estimate.estimator import plan_model
from minifloat.deploy.estimate.hardware import PLANNED_HARDWARE, Hardware, get_hardware
from minifloat.deploy.estimate.model_plan import ModelPlan, SchemeEstimate
from minifloat.deploy.options import PlanOptions

__all__ = ["PLANNED_HARDWARE", "Hardware", "ModelPlan", "PlanOptions", "SchemeEstimate", "get_hardware", "plan_model"]
