"""Tests of packing against golden bytes and compressed-tensors."""

from __future__ import annotations

import pytest
import torch

from minifloat.numerics.cast import decode, encode, pack_nibbles, unpack_nibbles
from minifloat.numerics.formats import E2M1


def codes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_all_sixteen_codes_pack_to_the_golden_bytes() -> None:
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8))
    assert bytes(packed.tolist()) == bytes.fromhex("1032547698badcfe")


def test_a_row_of_numbers_packs_to_the_golden_bytes() -> None:
    row = torch.tensor([[0.5, -6.0, 1.0, -0.0, 3.0, 1.5, -4.0, 2.0]])
    packed = pack_nibbles(encode(row, E2M1))
    assert bytes(packed[0].tolist()) == bytes.fromhex("f182354e")
    assert torch.equal(decode(unpack_nibbles(packed), E2M1), row)


def test_every_byte_survives_unpacking_and_packing() -> None:
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 64)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


@pytest.mark.parametrize("shape", [(2,), (3, 4), (2, 3, 8), (0, 4), (3, 0)], ids=str)
def test_only_the_last_dimension_is_halved(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(unpack_nibbles(packed), codes)


def test_a_transposed_view_packs_like_its_copy() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(4, 4).T
    assert torch.equal(pack_nibbles(codes), pack_nibbles(codes.contiguous()))


def test_an_odd_number_of_columns_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"must be even, got \(2, 3\)"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))


def test_a_code_of_more_than_four_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.\.15, got 16"):
        pack_nibbles(codes_of(16, 0))


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.int32), torch.tensor(1, dtype=torch.uint8)], ids=repr)
def test_other_dtypes_and_scalars_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        pack_nibbles(bad)
    with pytest.raises(ValueError, match="expected uint8"):
        unpack_nibbles(bad)


def test_all_pairs_pack_as_compressed_tensors_packs_them() -> None:
    helpers = pytest.importorskip(
        "compressed_tensors.compressors.nvfp4.helpers", reason="compressed-tensors is not installed"
    )
    left, right = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack((left, right), dim=-1).reshape(-1, 2).to(torch.uint8)
    assert torch.equal(pack_nibbles(codes), helpers.pack_fp4_to_uint8(decode(codes, E2M1)))
    unpacked = helpers.unpack_fp4_from_uint8(pack_nibbles(codes), *codes.shape, dtype=torch.float32)
    assert torch.equal(unpacked.view(torch.int32), decode(codes, E2M1).view(torch.int32))
