"""Packing keeps codes and scales, follows ``csrc/linear/layout.h``, and gives equal bytes on every instruction set."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_cases import ISAS, KINDS, Element, Grid, Guarded, Kernels, Stored, fits, make

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


def test_a_nan_comes_back_as_a_nan_of_its_row(kernels: Kernels) -> None:
    stored = make("mxfp8", 40, 100)
    stored.codes[3, 40] = 0x7F
    result = kernels.unpack(kernels.pack(stored))
    assert result.scales is not None
    assert result.values().isnan().any(1).nonzero().flatten().tolist() == [3]


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


def vectors_of(kernels: Kernels, stored: Stored) -> torch.Tensor:
    """uint8 ``[panels, steps, bytes of a step]``."""
    blob = kernels.pack(stored).blob
    panels, steps = -(-stored.shape[0] // 32), -(-stored.shape[1] // 64)
    scales = {Grid.E8M0: 64, Grid.E4M3: 128}.get(stored.kind.grid, 0)
    elements = {Element.E4M3: 2048, Element.E2M1: 1024, Element.F32: 8192}
    step = scales + elements.get(stored.kind.element, 4096)
    return blob[len(blob) - panels * steps * step :].view(panels, steps, step)


def test_e4m3_vectors_hold_four_columns_of_sixteen_rows_ready_to_be_unpacked_to_pairs(kernels: Kernels) -> None:
    stored = make("fp8-channel", 40, 100)
    steps = vectors_of(kernels, stored)
    for row, col in ((0, 0), (5, 3), (17, 30), (31, 63), (32, 64), (39, 99)):
        panel, n, tile = row // 32, row % 16, row % 32 // 16
        step, k, half = col // 64, col % 32, col % 64 // 32
        vector = (half * 2 + tile) * 8 + k // 4
        byte = vector * 64 + n // 4 * 16 + k % 4 // 2 * 8 + n % 4 * 2 + k % 2
        assert steps[panel, step, byte] == stored.codes[row, col]
    filled = torch.zeros(64, 128, dtype=torch.uint8)
    filled[:40, :100] = stored.codes
    assert torch.equal(steps.flatten().sort().values, filled.flatten().sort().values)


def test_e2m1_words_hold_eight_columns_with_pairs_sixteen_bits_apart(kernels: Kernels) -> None:
    stored = make("mxfp4", 40, 100)
    assert stored.scales is not None
    steps = vectors_of(kernels, stored)
    for row, col in ((0, 0), (5, 3), (17, 30), (31, 63), (32, 64), (39, 99)):
        panel, n, tile = row // 32, row % 16, row % 32 // 16
        step, k, half = col // 64, col % 32, col % 64 // 32
        vector = (half * 2 + tile) * 4 + k // 8
        word = int.from_bytes(bytes(steps[panel, step, 64 + vector * 64 + n * 4 :][:4].tolist()), "little")
        position = (0, 4, 1, 5, 2, 6, 3, 7)[k % 8]
        assert word >> 4 * position & 0xF == stored.codes[row, col]
        distance = stored.scales[row].max() - stored.scales[row, col // 32]
        assert steps[panel, step, half * 32 + row % 32] == distance


def test_nvfp4_scales_lie_before_the_codes_of_their_step(kernels: Kernels) -> None:
    stored = make("nvfp4", 40, 100)
    assert stored.scales is not None
    steps = vectors_of(kernels, stored)
    for row, col in ((0, 0), (5, 16), (17, 40), (31, 63), (32, 64), (39, 99)):
        quarter = col % 64 // 16
        assert steps[row // 32, col // 64, quarter * 32 + row % 32] == stored.scales[row, col // 16]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_words_hold_pairs_of_columns_of_16_bits(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 40, 100)
    steps = vectors_of(kernels, stored).view(stored.codes.dtype)
    for row, col in ((0, 0), (5, 3), (17, 30), (31, 63), (32, 64), (39, 99)):
        half, tile, k = col % 64 // 32, row % 32 // 16, col % 32
        index = ((half * 2 + tile) * 16 + k // 2) * 32 + row % 16 * 2 + k % 2
        assert steps[row // 32, col // 64, index] == stored.codes[row, col]


def test_f32_vectors_hold_a_column(kernels: Kernels) -> None:
    stored = make("f32", 40, 100)
    steps = vectors_of(kernels, stored).view(torch.float32)
    for row, col in ((0, 0), (5, 3), (17, 30), (31, 63), (32, 64), (39, 99)):
        half, tile, k = col % 64 // 32, row % 32 // 16, col % 32
        index = ((half * 2 + tile) * 32 + k) * 16 + row % 16
        assert steps[row // 32, col // 64, index] == stored.codes[row, col]


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
