"""The linear over experts: each group of tokens equals a plain linear with its expert, bit for bit."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, KINDS, Kernels, Packed, bits, inputs, make

ROWS, COLS = 70, 200
#: Experts without tokens, with one, and with enough for every path; also first and last.
COUNTS = (
    (0, 1, 0, 5, 17, 0, 40, 2, 0),
    (3,),
    (0, 0, 0),
    (70, 0, 1, 130),
    (1,) * 40,
)

kinds = pytest.mark.parametrize("kind", KINDS)


def experts_of(kernels: Kernels, kind: str, count: int, rows: int = ROWS, cols: int = COLS) -> list[Packed]:
    return [kernels.pack(make(kind, rows, cols, seed)) for seed in range(count)]


def one_by_one(
    kernels: Kernels,
    x: torch.Tensor,
    experts: list[Packed],
    counts: tuple[int, ...],
    biases: list[torch.Tensor] | None,
) -> torch.Tensor:
    parts = [
        kernels.linear(tokens, expert, None if biases is None else biases[i])
        for i, (tokens, expert) in enumerate(zip(x.split(counts), experts, strict=True))
        if len(tokens)
    ]
    return torch.cat([torch.empty(0, experts[0].stored.shape[0], dtype=x.dtype), *parts])


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_expert_gives_the_bits_of_a_linear_of_its_tokens(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    experts = experts_of(kernels, kind, max(map(len, COUNTS)))
    for counts in COUNTS:
        x = inputs(sum(counts), COLS, dtype)
        chosen = experts[: len(counts)]
        some_biases = [inputs(1, ROWS, torch.float32)[0] * i for i in range(len(counts))]
        for biases in (None, some_biases):
            expected = one_by_one(kernels, x, chosen, counts, biases)
            assert torch.equal(bits(kernels.moe(x, chosen, counts, biases=biases)), bits(expected))


@kinds
def test_tokens_may_be_gathered_in_any_order_and_more_than_once(kernels: Kernels, kind: str) -> None:
    x = torch.full((30, COLS + 9), torch.nan, dtype=torch.bfloat16)[:, :COLS].copy_(inputs(30, COLS, torch.bfloat16))
    for counts in COUNTS:
        experts = experts_of(kernels, kind, len(counts))
        x_rows = torch.randint(30, (sum(counts),), generator=torch.Generator().manual_seed(1))
        expected = one_by_one(kernels, x[x_rows], experts, counts, None)
        assert torch.equal(bits(kernels.moe(x, experts, counts, x_rows)), bits(expected))


@kinds
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, kind: str) -> None:
    for counts in ((0, 1, 3, 40, 0, 17, 2), (300, 1)):
        experts = experts_of(kernels, kind, len(counts), 210, 500)
        x = inputs(sum(counts), 500, torch.bfloat16)
        expected = bits(kernels.moe(x, experts, counts))
        for threads in (2, 3, 7):
            assert torch.equal(bits(kernels.moe(x, experts, counts, threads=threads)), expected)


@pytest.mark.parametrize(("other", "status"), [(("mxfp4", 41, COLS), 2), (("nvfp4", 40, COLS), 3)])
def test_experts_of_two_heights_or_formats_are_refused(
    kernels: Kernels, other: tuple[str, int, int], status: int
) -> None:
    experts = [kernels.pack(make("mxfp4", 40, COLS)), kernels.pack(make(*other))]
    with pytest.raises(ValueError, match=f"status {status}"):
        kernels.moe(inputs(2, COLS, torch.bfloat16), experts, (1, 1))
