"""Quantized weights and their kernels in plain transformers: ``import minifloat.transformers``, then load as always.

    import minifloat.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(OUT)

Without this import transformers decodes every quantized weight to 16 bits while it loads, or in the first forward. With
it, models on a CPU keep the weights as they are stored, and minifloat's kernels multiply with them: `generate`,
`pipeline`, ``device_map="cpu"`` and `save_pretrained` work as for any other model. Models on other devices, and
checkpoints that minifloat does not read, are loaded as without it.

The import puts `MinifloatQuantizer` into transformers' table of quantizers, in the place of those for the layouts that
minifloat reads. It changes nothing else of transformers.
"""

from minifloat.transformers.quantizer import register, unregister

__all__ = ["register", "unregister"]

register()
