"""How much memory the KV cache gets, and how long the longest sequence may be."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch

from minifloat.engine.cache import blocks_for
from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.memory import available_memory
from minifloat.model.architecture.full_config import position_limit
from minifloat.report.text import size_text

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
    """The size of a KV cache."""

    bytes_per_block: int
    blocks: int
    max_model_len: int
    slots: int
    copies: int = 0


def tokens_of_a_step(options: EngineOptions, device: torch.device) -> int:
    """Return the most tokens that one step computes."""
    tokens = options.max_num_batched_tokens or (_STEP_TOKENS if device.type == "cpu" else _STEP_TOKENS_ON_GPU)
    if tokens <= options.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens: expected more than max_num_seqs, {options.max_num_seqs}; got {tokens}"
        )
    return tokens


def sequence_length(options: EngineOptions, config: Any) -> int:
    """Return the tokens of the longest sequence that the model allows."""
    positions = position_limit(config) or sys.maxsize
    length = options.max_model_len or positions
    if length > positions:
        raise UsageError(f"max_model_len: the model has {positions} positions, got {length}")
    return length


def cache_size(
    options: EngineOptions, config: Any, bytes_per_block: int, device: torch.device, state_bytes: int = 0
) -> CacheSize:
    """Choose the size of the KV cache; call this when the weights are in memory.

    States of sequences get at most half of the memory, or what 1 GiB of blocks leaves if that is more; where it is less
    than `max_num_seqs` states, fewer sequences run at a time.
    """
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
    """Refuse a cache for which there is no memory."""
    free = available_memory(device)
    if budget > free:
        raise UsageError(
            f"kv_cache_memory: {size_text(budget)} were asked for, and {size_text(free)} are free on {device} "
            "beside the weights; ask for less, or leave it out to take what fits"
        )
