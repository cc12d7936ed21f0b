"""The blocks of the KV cache: allocation, sharing of equal prefixes, and eviction.

A block holds the keys and values of `BLOCK_TOKENS` tokens in every layer. Its contents depend on its tokens and on all
tokens before them, so a full block is identified by a digest of both: SHA-256 over the digest of the block before and
the block's own tokens. The first block uses a salt in the place of a digest, made of random bytes of this process and
the request's own salt, so that neither the time a request takes nor a crafted collision reveals one tenant's prompts to
another (CVE-2025-46570). A block without users keeps its contents until the block is needed; the block that has been
unused for the longest time is taken first.

The runner owns the memory; this module only keeps account of blocks.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.kernels.decoder import BLOCK_TOKENS, SequenceStates
from minifloat.kernels.memory import available_memory
from minifloat.model.architecture.full_config import position_limit
from minifloat.report.text import size_text

_SALT_BYTES = 32
#: Tokens that a copy of a state must save at least: a piece of a prompt that ends at a copy costs a step of its own.
_LEAST_TOKENS = 64


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Blocks ``0 .. count - 1`` with their users."""

    def __init__(self, count: int, *, share: bool = True) -> None:
        self.count = count
        self.shares = share
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._users = [0] * count
        self._digests: list[bytes | None] = [None] * count
        self._known: dict[bytes, int] = {}
        #: Blocks without users, the longest unused first; those with contents that may be shared again come last.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        return len(self._unused)

    @property
    def usage(self) -> float:
        """Share of the blocks that have a user, 0 .. 1."""
        return 1.0 - self.free / self.count if self.count else 0.0

    def allocate(self, count: int) -> list[int]:
        """Take blocks, whose contents are forgotten."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        taken = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; their contents stay until the memory is needed."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._unused[block] = None
                if self._digests[block] is None:
                    self._unused.move_to_end(block, last=False)

    def root(self, salt: str) -> bytes:
        """Return the digest before the first block, for the sequences that may share blocks with each other."""
        return hashlib.sha256(self._salt + salt.encode()).digest()

    def digests(self, root: bytes, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        digests = list(known)
        before = digests[-1] if digests else root
        for start in range(len(digests) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before = hashlib.sha256(before + array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()).digest()
            digests.append(before)
        return digests

    def known(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks of the longest known prefix `share` would find."""
        return next((count for count, digest in enumerate(digests) if digest not in self._known), len(digests))

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Add a user to the blocks that hold the longest known prefix, and return them."""
        blocks: list[int] = []
        for digest in digests:
            block = self._known.get(digest)
            if block is None:
                break
            if self._users[block] == 0:
                del self._unused[block]
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """Record the digest of a full block, once its keys and values have been computed."""
        if self.shares and self._digests[block] is None and digest not in self._known:
            self._digests[block] = digest
            self._known[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None


# A state of a gated delta rule is that of one length alone, so a sequence can only begin behind a prefix whose state
# was copied: at the end of each prompt, and where a prompt parts from an earlier one (a system prompt is likely to come
# again). Copies have the digest of the block that they end with; the longest unused one makes room.
class StateSnapshots:
    """Copies of the states of sequences, from which others with the same beginning continue."""

    def __init__(self, states: SequenceStates, slots: Sequence[int]) -> None:
        self._states = states
        self._free = list(slots)
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first

    def longest(self, digests: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a sequence end with a copy."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._kept), 0)

    def restore(self, digest: bytes, slot: int) -> None:
        """Begin a sequence with the copy at the end of a block."""
        self._kept.move_to_end(digest)
        self._states.copy(self._kept[digest], slot)

    def keep(self, digest: bytes, slot: int) -> None:
        """Copy the state of a sequence that has seen all tokens up to the end of a block."""
        if digest not in self._kept:
            self._kept[digest] = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
            self._states.copy(slot, self._kept[digest])
        self._kept.move_to_end(digest)

    @staticmethod
    def ends(start: int, length: int, known: int) -> tuple[int, ...]:
        """Return the numbers of tokens behind which the state of a new sequence should be kept, in order."""
        ends = sorted({known * BLOCK_TOKENS, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS})
        return tuple(end for end in ends if end - start >= _LEAST_TOKENS)


_LOG = logging.getLogger(__name__)
#: The default KV cache holds all sequences at full length, but takes at most this many bytes and at most this share of
#: the memory that is available.
_KV_BYTES = 1 << 30
_KV_SHARE = 0.25
#: Most copies of states, which equal beginnings of prompts need, and their share of all states.
_COPIES, _COPIES_SHARE = 16, 0.25
#: Default of `max_num_batched_tokens`.
_STEP_TOKENS, _STEP_TOKENS_ON_GPU = 512, 4096
#: Share of the memory of a GPU that the weights leave; the rest is for the steps themselves.
_GPU_SHARE = 0.85


@dataclass(frozen=True)
class CacheSize:
    bytes_per_block: int
    blocks: int
    max_model_len: int
    slots: int
    copies: int = 0


def tokens_of_a_step(options: EngineOptions, device: torch.device) -> int:
    tokens = options.max_num_batched_tokens or (_STEP_TOKENS if device.type == "cpu" else _STEP_TOKENS_ON_GPU)
    if tokens <= options.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens: expected more than max_num_seqs, {options.max_num_seqs}; got {tokens}"
        )
    return tokens


def sequence_length(options: EngineOptions, config: Any) -> int:
    positions = position_limit(config) or sys.maxsize
    length = options.max_model_len or positions
    if length > positions:
        raise UsageError(f"max_model_len: the model has {positions} positions, got {length}")
    return length


def cache_size(
    options: EngineOptions, config: Any, bytes_per_block: int, device: torch.device, state_bytes: int = 0
) -> CacheSize:
    """Choose the size of the KV cache; call this when the weights are in memory."""
    # States get at most half of the memory, or what 1 GiB of blocks leaves if that is more.
    length = sequence_length(options, config)
    one_sequence = blocks_for(length) * bytes_per_block
    copies = _COPIES if options.prefix_cache and state_bytes else 0
    all_states = (options.max_num_seqs + copies) * state_bytes
    all_sequences = options.max_num_seqs * one_sequence + all_states
    budget = options.kv_cache_memory
    if budget is None and device.type == "cuda":
        torch.cuda.empty_cache()  # memory that loading took
        budget = min(all_sequences, int(available_memory(device) * _GPU_SHARE))
    elif budget is None:
        available = int(available_memory() * _KV_SHARE)
        least = max(_KV_BYTES, one_sequence if options.max_model_len else 0)
        budget = min(all_sequences, least + all_states, available)
    else:
        _require_free(budget, device)
    slots = options.max_num_seqs
    if state_bytes:
        states = max(1, min(slots + copies, max(budget // 2, budget - _KV_BYTES) // state_bytes))
        copies = min(copies, int(states * _COPIES_SHARE))
        slots = min(slots, states - copies)
    blocks = (budget - (slots + copies) * state_bytes) // bytes_per_block
    if blocks < (blocks_for(length) if options.max_model_len else 2):
        raise UsageError(
            f"kv_cache_memory: {size_text(budget)} hold {max(blocks, 0) * BLOCK_TOKENS} tokens, less than a sequence; "
            f"{size_text(one_sequence + state_bytes)} hold one of {length}"
        )
    if slots < options.max_num_seqs:
        _LOG.warning(
            "%d sequences run at a time, not %d: the state of each takes %.1f MiB, and states get at most half of the "
            "memory of the KV cache or what 1 GiB of blocks leaves; it has %.1f MiB (kv_cache_memory)",
            slots,
            options.max_num_seqs,
            state_bytes / (1 << 20),
            budget / (1 << 20),
        )
    return CacheSize(bytes_per_block, blocks, min(length, blocks * BLOCK_TOKENS), slots, copies)


def _require_free(budget: int, device: torch.device) -> None:
    free = available_memory(device)
    if budget > free:
        raise UsageError(
            f"kv_cache_memory: {size_text(budget)} were asked for, and {size_text(free)} are free on {device} "
            "beside the weights; ask for less, or leave it out to take what fits"
        )
