"""Whether the kernels can run is known to `torch.compile`, which does not trace how it was found."""

import torch

from minifloat.kernels.linear.triton import why_unavailable


def test_why_the_kernels_cannot_run_is_a_constant_of_compiled_code() -> None:
    double = torch.compile(lambda x: x * (2 if why_unavailable(x.device) else 3), fullgraph=True, backend="eager")
    factor = 2 if why_unavailable("cpu") else 3
    assert torch.equal(double(torch.ones(2)), torch.full((2,), float(factor)))
