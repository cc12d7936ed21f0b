"""Where the damage comes from: which modules of a quantized model make it differ from its baseline.

Every module in which the two differ gets the signal-to-noise ratio of its output, from one pass. That says how well it
is quantized but not what the model makes of the error, so modules are also exchanged one at a time, the worst of them
are taken out of the candidate, and with what is known then a mixture is looked for that is within the tolerance. All on
a sample of the text, for as long as the time allows.
"""

from minifloat.compare.attribution.modules import Attribution, ModuleDamage, attribute
from minifloat.compare.attribution.suggestion import Suggestion

__all__ = ["Attribution", "ModuleDamage", "Suggestion", "attribute"]
