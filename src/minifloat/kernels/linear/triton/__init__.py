"""`linear` on one NVIDIA GPU: weights stay quantized in its memory and are decoded in registers.

`layout` says how weights lie and which can, `fragments` and `weight` pack them, `config` says how a product is cut, and
`product` launches `kernels`, which decode by `decode`. Only those three need triton, and they are imported when a
product runs; packing is plain PyTorch.
"""

from minifloat.kernels.linear.triton.availability import why_not as why_unavailable
from minifloat.kernels.linear.triton.weight import GpuWeight, pack, why_not

__all__ = ["GpuWeight", "pack", "why_not", "why_unavailable"]
