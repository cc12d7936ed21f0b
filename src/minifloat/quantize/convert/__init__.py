"""`convert`: a quantized checkpoint in another layout, or in 16 bits again.

plan.py, layout_plan.py, dequantize_plan.py  the output of every tensor; from headers, config and single scales
job.py                                       the run: tensors stream into a new folder; an interrupted run continues
report.py, document.py                       the report on every tensor, for terminal, page and model card
"""

from minifloat.quantize.convert.job import convert_checkpoint
from minifloat.quantize.convert.report import ConvertedTensor, ConvertReport
from minifloat.quantize.options import ConvertOptions

__all__ = ["ConvertOptions", "ConvertReport", "ConvertedTensor", "convert_checkpoint"]
