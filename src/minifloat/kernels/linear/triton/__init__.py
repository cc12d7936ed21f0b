"""`linear` on one NVIDIA GPU: weights stay quantized in its memory and are decoded in registers.

`layout` defines the layout of weights, `fragments` and `weight` pack them, `config` chooses the tiles of a product, and
`product` launches `kernels`, which use `decode`. Only `product`, `kernels` and `decode` need triton, and they are
imported when a product runs; packing is plain PyTorch.
"""

from minifloat.kernels.linear.triton.device import why_not as why_unavailable
from minifloat.kernels.linear.triton.weight import GpuWeight, pack, why_not

__all__ = ["GpuWeight", "pack", "why_not", "why_unavailable"]
