"""`linear` on one NVIDIA GPU: weights stay quantized in its memory and are decoded in registers."""

from minifloat.kernels.linear.triton.device import why_not as why_unavailable
from minifloat.kernels.linear.triton.weight import GpuWeight, pack, why_not

__all__ = ["GpuWeight", "pack", "why_not", "why_unavailable"]
