"""`plan_model`: bytes, fit and the roofline of a model on given hardware, before anything is downloaded or quantized.

Config and headers are all that is read, and nothing here imports torch: the answer takes a fraction of a second. The
figures are bounds and sums, not predictions: what an engine reaches of them is measured by `bench`.
"""

from minifloat.plan.hardware import PLANNED_HARDWARE, Hardware, get_hardware
from minifloat.plan.model import plan_model
from minifloat.plan.result import ModelPlan, SchemePlan

__all__ = ["PLANNED_HARDWARE", "Hardware", "ModelPlan", "SchemePlan", "get_hardware", "plan_model"]
