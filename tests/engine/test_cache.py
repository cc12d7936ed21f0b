"""Blocks are shared and forgotten as they should be."""

from __future__ import annotations

import random

import pytest

from minifloat.engine.cache import BlockPool, blocks_for

SIZE = 16


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Run a sequence to its end: its blocks, published and released."""
    digests = pool.digests(pool.root(salt), tokens)
    shared = pool.share(digests)
    blocks = shared + pool.allocate(blocks_for(len(tokens)) - len(shared))
    for block, digest in zip(blocks, digests, strict=False):
        pool.publish(block, digest)
    pool.release(blocks)
    return shared


def test_equal_beginnings_are_found_block_by_block() -> None:
    pool = BlockPool(10)
    first = list(range(40))
    assert fill(pool, first) == []
    assert len(fill(pool, first)) == 2
    assert len(fill(pool, [*first[:20], 99, *first[21:]])) == 1
    assert fill(pool, [99, *first[1:]]) == []


def test_the_same_block_after_another_beginning_is_not_the_same() -> None:
    pool = BlockPool(10)
    tail = list(range(SIZE))
    fill(pool, [1] * SIZE + tail)
    assert len(fill(pool, [1] * SIZE + tail)) == 2
    assert fill(pool, [2] * SIZE + tail) == []


def test_salts_share_nothing_and_digests_differ_between_processes() -> None:
    pool, other = BlockPool(10), BlockPool(10)
    tokens = list(range(SIZE))
    fill(pool, tokens, "a")
    assert fill(pool, tokens, "b") == []
    assert len(fill(pool, tokens, "a")) == 1
    assert pool.root("a") != other.root("a")


def test_blocks_are_evicted_longest_unused_first_and_the_end_before_the_start() -> None:
    pool = BlockPool(4)
    old, new = [1] * 32, [2] * 32
    fill(pool, old)
    fill(pool, new)
    pool.release(pool.allocate(1))
    assert len(fill(pool, old)) == 1
    pool = BlockPool(4)
    fill(pool, old)
    fill(pool, new)
    pool.release(pool.allocate(2))
    assert len(pool.share(pool.digests(pool.root(""), new))) == 2


def test_blocks_without_contents_are_taken_first() -> None:
    pool = BlockPool(4)
    fill(pool, [1] * 32)
    pool.release(pool.allocate(2))
    assert len(fill(pool, [1] * 32)) == 2


def test_a_shared_block_is_free_when_its_last_user_releases_it() -> None:
    pool = BlockPool(3)
    tokens = [1] * SIZE
    fill(pool, tokens)
    digests = pool.digests(pool.root(""), tokens)
    first, second = pool.share(digests), pool.share(digests)
    assert first == second
    assert pool.free == 2
    pool.release(first)
    assert pool.free == 2
    pool.release(second)
    assert (pool.free, pool.usage) == (3, 0.0)
    with pytest.raises(ValueError, match="4 blocks wanted"):
        pool.allocate(4)


def test_without_sharing_nothing_is_found() -> None:
    pool = BlockPool(4, share=False)
    fill(pool, [1] * 32)
    assert fill(pool, [1] * 32) == []


def test_any_order_of_use_keeps_the_books() -> None:
    generator = random.Random(0)
    pool = BlockPool(12)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and generator.random() < 0.5:
            pool.release(held.pop(generator.randrange(len(held))))
            continue
        tokens = [generator.randrange(2)] * generator.randrange(1, 60)
        digests = pool.digests(pool.root(""), tokens)
        shared = pool.share(digests)
        needed = blocks_for(len(tokens)) - len(shared)
        if needed > pool.free:
            pool.release(shared)
            continue
        blocks = shared + pool.allocate(needed)
        for block, digest in zip(blocks, digests, strict=False):
            pool.publish(block, digest)
        held.append(blocks)
        assert len(set(blocks)) == len(blocks)
        assert pool.free == 12 - len({block for each in held for block in each})
    for blocks in held:
        pool.release(blocks)
    assert pool.free == 12
