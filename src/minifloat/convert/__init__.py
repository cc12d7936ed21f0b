"""`convert`: a quantized checkpoint in another layout, or in 16 bits again.

plan.py      what becomes of every tensor, or why it cannot be; from headers, config and single scales
refusal.py   what a config says that no layout here can carry
run.py       the run: tensors stream into a new folder as one transaction, and an interrupted run continues
report.py    what was done to every tensor
"""

from minifloat.convert.job import convert_checkpoint
from minifloat.convert.report import ConvertedTensor, ConvertReport

__all__ = ["ConvertReport", "ConvertedTensor", "convert_checkpoint"]
