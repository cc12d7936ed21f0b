"""Attribution: which modules of a quantized model make it differ from its baseline.

One pass measures the signal-to-quantization-noise ratio (SQNR) of the output of every module in which the two models
differ. The SQNR says how well a module is quantized, but not how the model amplifies the error. So modules are also
exchanged between the models one at a time, the worst modules are taken out of the candidate, and a search finds a
mixture of both models that is within the tolerance. All measurements use a sample of the text, within a time budget.
"""

from minifloat.evaluate.compare.attribution.modules import Attribution, ModuleDamage, attribute
from minifloat.evaluate.compare.attribution.suggestion import Suggestion

__all__ = ["Attribution", "ModuleDamage", "Suggestion", "attribute"]
