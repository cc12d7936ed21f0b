"""A plugin that gives vLLM the kernels of this package on CPUs (entry point group ``vllm.general_plugins``).

    registration.py    what `register` does, and when it does nothing
    packed.py          packs the weights of a layer after loading, multiplies with them
    kernels.py         a kernel class for each table of vLLM
    unquantized.py     BF16 linears
    config.py          schemes that vLLM refuses before it looks into a table

vLLM is imported nowhere else in this package. Only `register` imports it here, when vLLM calls it.
"""

from __future__ import annotations


def register() -> None:
    """Register the kernels with vLLM; it calls this in each of its processes."""
    from minifloat.serve.vllm_plugin.registration import register_kernels

    register_kernels()
