"""`convert`: a quantized checkpoint in another layout, or in 16 bits again.

plan.py, layout_plan.py  the output of every tensor, dequantized or in another layout; and the report
job.py                   the run: tensors stream into a new folder; an interrupted run continues
gguf_plan.py, gguf_file.py  a GGUF file: its tensors, and the run that writes it
document.py              the report for terminal, page and model card
"""

from minifloat.quantize.convert.job import convert_checkpoint
from minifloat.quantize.convert.plan import ConvertedTensor, ConvertReport
from minifloat.quantize.options import ConvertOptions, GgufOptions

__all__ = ["ConvertOptions", "ConvertReport", "ConvertedTensor", "GgufOptions", "convert_checkpoint"]
