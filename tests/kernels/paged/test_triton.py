"""The Triton kernels: their logic in the interpreter, their code compiled ahead of time, and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_cases import Compiled, compile_ahead, needs_cuda, needs_triton, run_cases

from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache, add_norm, attend, rotary_table, rotate_and_store
from minifloat.kernels.paged import silu_and_multiply as silu


@needs_triton
def test_the_kernels_match_their_references_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("triton_cases_paged.py"), interpreted=True)


def compiled(
    capability: int, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int
) -> Compiled:
    """A kernel for a GPU that is not here, its pointers and strides aligned as they are in a step."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types.get(name, "i32") for name in names}
    anywhere = {*kernel.do_not_specialize, *kernel.do_not_specialize_on_alignment}
    aligned = tuple(n for n in names if n not in anywhere and (signature[n].startswith("*") or "stride" in n))
    return compile_ahead(kernel, signature, constants, capability, {"num_warps": warps}, aligned)


HEADS = {"KV_HEADS": 8, "D": 128, "TOKENS": BLOCK_TOKENS}
ROTATE = HEADS | {"HEADS": 32, "BLOCK": 128, "HALF": 64}
ATTEND = HEADS | {"GROUP": 4, "BLOCK_G": 16, "BLOCK_D": 128, "TILE": 64, "SPLITS": 32}
WIDE = {"D": 256, "BLOCK_D": 256, "TILE": 32}
NORMS = {"x": "*fp32", "weight": "*fp32", "eps": "fp32", "rotary": "*fp32", "q_norm": "*fp32", "k_norm": "*fp32"}
CACHE = {"scales": "*fp32", "cache_rows": "*i32", "positions": "*i32", "tables": "*i32", "counters": "*i32"}
WORK = {"partial": "*fp32", "stats": "*fp32", "scale": "fp32"}


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element", ["*bf16", "*u8"])
def test_no_kernel_spills_when_compiled_for_an_8b_model(capability: int, element: str) -> None:
    from minifloat.kernels.paged import triton as fast

    rows = dict.fromkeys(("delta", "out", "gate_up", "qkv", "queries"), "*bf16")
    types = NORMS | CACHE | WORK | rows | {"data": element}
    overlap = {"OVERLAP": capability >= 90}
    fp8 = overlap | {"FP8": element == "*u8"}
    norm = overlap | {"ADD": True}
    used = {
        "add_norm": compiled(capability, fast._add_norm, types, norm | {"HIDDEN": 4096, "BLOCK": 4096}, 4),
        "wide add_norm": compiled(capability, fast._add_norm, types, norm | {"HIDDEN": 8192, "BLOCK": 8192}, 8),
        "rotate": compiled(
            capability, fast._rotate_and_store, types, ROTATE | fp8 | {"Q_NORM": True, "K_NORM": True}, 1
        ),
        "silu": compiled(capability, fast._silu_and_multiply, types, overlap | {"COLUMNS": 14336, "BLOCK": 1024}, 4),
        "attend": compiled(capability, fast._attend, types, ATTEND | fp8 | {"WINDOW": False}, 4),
        "windowed": compiled(capability, fast._attend, types, ATTEND | fp8 | {"WINDOW": True}, 4),
        "heads of 256": compiled(capability, fast._attend, types, ATTEND | WIDE | fp8 | {"WINDOW": False}, 8),
    }
    for name, found in used.items():
        assert found.stack == 0, (name, found.stack)
        assert found.registers <= 224, (name, found.registers)
        assert found.shared <= 96 << 10, (name, found.shared)


@needs_cuda
@pytest.mark.parametrize("element", ["bfloat16", "E4M3"])
@pytest.mark.parametrize("window", [None, 100])
@torch.inference_mode()
def test_on_a_gpu_they_are_near_the_references_in_bf16(element: str, window: int | None) -> None:
    heads, kv_heads, d, blocks, contexts = 32, 8, 128, 400, [1, 64, 65, 700, 3000]
    random = torch.Generator().manual_seed(0)
    gpu, scales = torch.device("cuda"), torch.rand(1, 2, kv_heads, generator=random) + 0.01
    caches = [PagedCache(1, kv_heads, d, blocks, element, device, 16, scales) for device in (torch.device("cpu"), gpu)]
    for cache in caches:
        cache.data.view(torch.uint8).fill_(0xFF)
    rotary = rotary_table(100.0 ** -torch.arange(d // 2).float(), 1.0, 4096)
    norms = (torch.rand(d, generator=random), torch.rand(d, generator=random))
    tables = torch.randperm(blocks, generator=random)[None].expand(len(contexts), -1)[:, :190].int().contiguous()
    positions = torch.arange(contexts[-1], dtype=torch.int32)
    cache_rows = tables[0, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * d, generator=random).bfloat16()
    q = rotate_and_store(
        qkv.cuda(),
        (norms[0].cuda(), norms[1].cuda()),
        1e-5,
        rotary.cuda(),
        positions.cuda(),
        cache_rows.cuda(),
        caches[1],
        0,
    )
    expected = rotate_and_store(qkv, norms, 1e-5, rotary, positions, cache_rows, caches[0], 0)
    torch.testing.assert_close(q.cpu(), expected, atol=1e-2, rtol=1e-2)
    # As bytes, because what was not written is NaN.
    values = [cache.data[0, :, 1].contiguous().view(torch.uint8).cpu() for cache in caches]
    assert torch.equal(values[0], values[1])  # values are only rounded
    last = torch.tensor(contexts, dtype=torch.int32) - 1
    caches[0].data.copy_(caches[1].data)
    found = [attend(q[last.long()], last.cuda(), tables.cuda(), caches[1], 0, d**-0.5, window) for _ in range(3)]
    answer = attend(q[last.long()].cpu(), last, tables, caches[0], 0, d**-0.5, window)
    torch.testing.assert_close(found[0].cpu(), answer, atol=1e-2, rtol=1e-2)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not caches[1].counters.any()
    x, delta = torch.randn(5, 4096, generator=random), torch.randn(5, 4096, generator=random).bfloat16()
    weight = torch.rand(4096, generator=random)
    normed = add_norm(x.cuda(), delta.cuda(), weight.cuda(), 1e-5, torch.bfloat16)
    torch.testing.assert_close(normed.cpu(), add_norm(x, delta, weight, 1e-5, torch.bfloat16), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(silu(delta.cuda()).cpu(), silu(delta), atol=1e-2, rtol=1e-2)
