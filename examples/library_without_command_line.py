"""The library without the command line: one tensor, one layer, one model, one engine.

    python examples/library_without_command_line.py

It runs offline on the example model. Each part is what a cell of a notebook would be.
"""

# %% One tensor: codes, scales, and what is lost
from pathlib import Path

import torch

import minifloat

weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
for name in ("fp8", "mxfp4", "nvfp4"):
    quantized = minifloat.quantize_tensor(weight, minifloat.SCHEMES[name].weight)
    noise = (quantized.dequantize() - weight).square().sum() / weight.square().sum()
    print(f"{name:6} SQNR {-10 * noise.log10():.1f} dB")

# %% A scheme of one's own: NVFP4 with the scales of compressed-tensors, the code of amax / 6
from dataclasses import replace  # noqa: E402

from minifloat.numerics.scheme import ScaleRule  # noqa: E402

nvfp4 = minifloat.SCHEMES["nvfp4"]
plain = replace(nvfp4, weight=replace(nvfp4.weight, rule=ScaleRule.AMAX))
noise = (minifloat.quantize_tensor(weight, plain.weight).dequantize() - weight).square().sum() / weight.square().sum()
print(f"nvfp4 with the rule amax: SQNR {-10 * noise.log10():.1f} dB")

# %% One product on the kernels: the weight stays quantized in memory
from minifloat.kernels.linear import linear  # noqa: E402
from minifloat.kernels.pack import pack  # noqa: E402

quantized = minifloat.quantize_tensor(weight, minifloat.SCHEMES["mxfp4"].weight)
x = torch.randn(4, 512, dtype=torch.bfloat16)
error = (linear(x, pack(quantized)).float() - x.float() @ quantized.dequantize().T).abs().max()
print(f"largest difference of the kernel from plain torch: {error:.4f}, rounding of BF16 included")

# %% A whole model: what becomes of every tensor, before anything is written
MODEL = Path(__file__).parent / "storybook-4m"
plan = minifloat.plan_model(MODEL, "mxfp4", "h100")
print(minifloat.inspect_checkpoint(MODEL))

# %% The engine: many prompts decoded together
engine = minifloat.Engine(MODEL)
parameters = minifloat.SamplingParams(temperature=0, max_tokens=8)
for completion in engine.generate(["Once upon a time", "The dog was"], parameters):
    print(repr(completion.text))
