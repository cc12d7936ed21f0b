"""`plan_model`: bytes, fit and roofline of a model on a machine, before anything is downloaded or quantized."""

from minifloat.deploy.estimate.estimator import plan_model
from minifloat.deploy.estimate.hardware import PLANNED_HARDWARE, Hardware, get_hardware
from minifloat.deploy.estimate.model_plan import ModelPlan, SchemeEstimate
from minifloat.deploy.options import PlanOptions

__all__ = ["PLANNED_HARDWARE", "Hardware", "ModelPlan", "PlanOptions", "SchemeEstimate", "get_hardware", "plan_model"]
