"""Packing keeps codes and scales, follows ``csrc/linear/layout.h``, and gives equal bytes on every instruction set."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_cases import ISAS, KINDS, Element, Grid, Guarded, Kernels, fits, make

SHAPES = ((1, 2), (1, 1), (31, 32), (32, 64), (33, 65), (47, 100), (130, 258), (64, 129))

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_unpacking_gives_back_codes_and_scales(kernels: Kernels, kind: str) -> None:
    for rows, cols in SHAPES:
        if not fits(kind, cols):
            continue
        stored = make(kind, rows, cols)
        result = kernels.unpack(kernels.pack(stored))
        assert torch.equal(result.codes, stored.codes)
        if stored.scales is not None:
            assert result.scales is not None
            assert torch.equal(result.scales, stored.scales)


@kinds
def test_packing_is_the_same_on_every_instruction_set_and_number_of_threads(kind: str) -> None:
    for rows, cols in SHAPES:
        if not fits(kind, cols):
            continue
        stored = make(kind, rows, cols)
        blobs = [Kernels(isa).pack(stored, threads).blob for isa in ISAS for threads in (1, 2, 7)]
        assert all(torch.equal(blob, blobs[0]) for blob in blobs)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_e8m0_scales_within_the_kept_distance_are_restored(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 40, 160)
    assert stored.scales is not None
    for scales in ((254, 129, 200, 254, 130), (0, 0, 0, 0, 0), (125, 0, 60, 1, 124), (3, 2, 1, 0, 3)):
        stored.scales[:] = torch.tensor(scales, dtype=torch.uint8)
        result = kernels.unpack(kernels.pack(stored))
        assert torch.equal(result.codes, stored.codes)
        assert result.scales is not None
        assert torch.equal(result.scales, stored.scales)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_blocks_more_than_125_powers_of_two_below_the_largest_become_zeros(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 40, 128)
    assert stored.scales is not None
    stored.scales[:] = torch.tensor([200, 75, 74, 0], dtype=torch.uint8)
    result = kernels.unpack(kernels.pack(stored))
    assert torch.equal(result.codes[:, :64], stored.codes[:, :64])
    assert (result.codes[:, 64:] == 0).all()


@kinds
def test_nothing_is_read_or_written_beyond_the_ends(kernels: Kernels, kind: str) -> None:
    for rows, cols in SHAPES:
        if not fits(kind, cols):
            continue
        stored = make(kind, rows, cols)
        expected = kernels.pack(stored).blob
        codes, scales = stored.bytes_of_codes(), stored.scales
        for place in (Guarded.at_the_end, Guarded.at_the_start):
            guarded_codes = place(Guarded(codes.nbytes), codes)
            guarded_scales = None if scales is None else place(Guarded(scales.nbytes), scales)
            blob = place(Guarded(expected.nbytes), torch.full_like(expected, 0xA5))
            args = kernels.pack_args(stored, guarded_codes, guarded_scales)
            args.packed = blob.data_ptr()
            kernels.library.call("pack", args)
            assert torch.equal(blob, expected)
            for tensor in (guarded_codes, guarded_scales):
                if tensor is not None:
                    tensor.view(torch.uint8).fill_(0x33)
            kernels.library.call("unpack", args)
            assert torch.equal(guarded_codes, codes)
            if scales is not None:
                assert guarded_scales is not None
                assert torch.equal(guarded_scales, scales)


@kinds
def test_codes_at_any_address_and_scales_at_that_of_a_float(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 47, 100)
    expected = kernels.pack(stored).blob
    codes, blob = stored.bytes_of_codes(), torch.zeros_like(expected)
    memory = torch.zeros(codes.nbytes + 1, dtype=torch.uint8)
    memory[1:] = codes.view(torch.uint8).flatten()
    scales = stored.scales
    if scales is not None:
        scales = torch.cat([scales.flatten()[:1], scales.flatten()])[1:]
    args = kernels.pack_args(stored, memory, scales)
    args.codes, args.packed = memory.data_ptr() + 1, blob.data_ptr()
    kernels.library.call("pack", args)
    assert torch.equal(blob, expected)


# --- the order in which the kernels read, spelled out for one weight of each format


# --- what has no layout


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("fp8-channel", {"rows": 0}),
        ("fp8-channel", {"cols": 0}),
        ("fp8-channel", {"block_rows": 0}),
        ("fp8-channel", {"block_cols": 64}),
        ("fp8-channel", {"element": 5}),
        ("fp8-channel", {"grid": 4}),
        ("fp8-channel", {"grid": -1}),
        ("fp8-channel", {"element": Element.BF16, "grid": Grid.BLOCK}),
        ("fp8-channel", {"element": Element.F32, "grid": Grid.BLOCK}),
        ("fp8-block-128", {"block_cols": 40}),
        ("fp8-block-128", {"element": Element.E2M1}),
        ("mxfp4", {"cols": 99}),
        ("mxfp4", {"block_rows": 2}),
        ("mxfp4", {"block_cols": 16}),
        ("nvfp4", {"block_cols": 32}),
        ("nvfp4", {"element": Element.E4M3}),
    ],
    ids=str,
)
def test_a_weight_without_a_layout_is_refused(kernels: Kernels, kind: str, change: dict[str, int]) -> None:
    stored = make(kind, 40, 100)
    codes, blob = stored.bytes_of_codes(), torch.zeros(1 << 16, dtype=torch.uint8)
    args = kernels.pack_args(stored, codes, stored.scales)
    args.packed = blob.data_ptr()
    for field, value in change.items():
        setattr(args, field, value)
    assert kernels.library.packed_bytes(args) == 0
    with pytest.raises(ValueError, match="status 2"):
        kernels.library.call("pack", args)
    assert (blob == 0).all()


@pytest.mark.parametrize("field", ["codes", "packed"])
def test_a_missing_pointer_is_refused(kernels: Kernels, field: str) -> None:
    stored = make("mxfp4", 40, 100)
    codes, blob = stored.bytes_of_codes(), torch.zeros(1 << 16, dtype=torch.uint8)
    args = kernels.pack_args(stored, codes, stored.scales)
    args.packed = blob.data_ptr()
    setattr(args, field, None)
    with pytest.raises(ValueError, match="status 2"):
        kernels.library.call("pack", args)


def test_memory_that_holds_another_weight_is_not_unpacked(kernels: Kernels) -> None:
    packed = kernels.pack(make("mxfp4", 40, 100))
    for other in (make("mxfp4", 41, 100), make("mxfp4", 40, 98), make("nvfp4", 40, 100), make("mxfp8", 40, 100)):
        codes = other.bytes_of_codes()
        args: ctypes.Structure = kernels.pack_args(other, codes, other.scales)
        args.packed = packed.blob.data_ptr()
        with pytest.raises(ValueError, match="status 3"):
            kernels.library.call("unpack", args)
