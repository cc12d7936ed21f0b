"""Runs any causal language model of transformers by its own code, one sequence after the other.

For architectures that the native decoder does not cover. Each sequence has a cache of transformers' own kind, so models
with sliding windows, recurrent states or latent attention work as they are; the blocks that the scheduler hands out
are only counted. Nothing is batched and no prefix is shared: this is the way that always works, not the fast one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.serve.engine.scheduler import Work
from minifloat.serve.engine.sequence import Sequence


@dataclass
class _Held:
    """What one sequence holds: transformers' cache, and how many tokens are in it."""

    cache: Any
    tokens: int


class TransformersRunner:
    """See `minifloat.serve.engine.runner.Runner`.

    Args:
        model: In eval mode.
        blocks: Blocks that the scheduler hands out.
        weight_bytes: Of the model, as it is held.
    """

    name = "transformers"

    def __init__(self, model: PreTrainedModel, blocks: int, weight_bytes: int) -> None:
        self._model: Any = model
        self._held: dict[str, _Held] = {}
        self.weight_bytes = weight_bytes
        self.kv_element = str(model.dtype).removeprefix("torch.")
        self.kv_bytes = blocks * self.bytes_per_block(model)
        self.vocab = int(model.config.get_text_config().vocab_size)

    @staticmethod
    def bytes_per_block(model: PreTrainedModel) -> int:
        """What keys and values of a block take in a model with plain attention in every layer."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or math.ceil(
            config.hidden_size / max(getattr(config, "num_attention_heads", 1), 1)
        )
        return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * BLOCK_TOKENS)

    @torch.inference_mode()
    def run(self, works: Sequences[Work]) -> Tensor:
        """As the interface says."""
        return torch.cat([self._run_one(work) for work in works])

    def _run_one(self, work: Work) -> Tensor:
        name = work.sequence.request_id
        held = self._held.pop(name, None)  # put back when the model has returned: one that raised left it half done
        start = work.start
        if held is None or held.tokens != start:
            held, start = _Held(None, 0), 0
        ids = torch.tensor([work.sequence.tokens[start : work.end]], device=self._model.device)
        output = self._model(
            input_ids=ids, past_key_values=held.cache, use_cache=True, logits_to_keep=max(work.logits, 1)
        )
        self._held[name] = _Held(output.past_key_values, work.end)
        logits: Tensor = output.logits[0]
        return logits[len(logits) - work.logits :].float().cpu()

    def release(self, sequence: Sequence) -> None:
        """As the interface says."""
        self._held.pop(sequence.request_id, None)
