"""Runs any causal language model of transformers by its own code, one sequence after the other.

For architectures that the decoders do not support. Each sequence has a cache of transformers' own kind, so models with
sliding windows, recurrent states or latent attention work as they are; the blocks that the scheduler hands out are only
counted. Nothing is batched and no prefix is shared: this runner supports every model, and is slow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence as Sequences
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from minifloat.engine.scheduler import Runner, WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.products import fast_products

#: Tokens from which a part of a prompt is worth the time that products in float32 cost for each operation.
_PROMPT = 16

#: Names of the cache in arguments and outputs of models: with attention; Mamba and xLSTM; RWKV.
_CACHE_NAMES = ("past_key_values", "cache_params", "state")


@dataclass
class _SequenceCache:
    """transformers' cache of one sequence as arguments of the forward pass, and the number of tokens in the cache."""

    arguments: dict[str, Any]
    tokens: int

    @classmethod
    def of(cls, output: Any, tokens: int) -> _SequenceCache:
        """Return the cache of an output; an empty one if the model returns none, so that all tokens run again."""
        found = {name: output[name] for name in _CACHE_NAMES if output.get(name) is not None}
        return cls(found, tokens if found else 0)


class TransformersRunner(Runner):
    name = "transformers"

    def __init__(self, model: PreTrainedModel, blocks: int, weight_bytes: int) -> None:
        self._model: Any = model
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        # Some models with recurrent states begin with an empty state in each call of several tokens (Jamba).
        self._is_stateful = bool(getattr(model, "_is_stateful", False))
        self._caches: dict[str, _SequenceCache] = {}
        self.weight_bytes = weight_bytes
        self.kv_element = str(model.dtype).removeprefix("torch.")
        self.kv_bytes = blocks * self.bytes_per_block(model)
        copies = [module.prefill for module in model.modules() if isinstance(module, QuantizedWeight)]
        self.prefill_bytes = sum(copy.nbytes for copy in copies if copy is not None)
        self.reason_no_prefixes = "transformers' code keeps a cache of its own for each sequence"
        self.vocab = int(model.config.get_text_config().vocab_size)

    @staticmethod
    def bytes_per_block(model: PreTrainedModel) -> int:
        """Return the bytes of a block's keys and values in a model with plain attention in every layer."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or math.ceil(
            config.hidden_size / max(getattr(config, "num_attention_heads", 1), 1)
        )
        return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * BLOCK_TOKENS)

    @torch.inference_mode()
    def run(self, works: Sequences[WorkItem], memory: Tensor | None = None) -> Tensor:
        return torch.cat([self._run_one(work) for work in works])

    def _run_one(self, work: WorkItem) -> Tensor:
        name = work.sequence.request_id
        cached = self._caches.pop(
            name, None
        )  # put back only when the model has returned: a forward that raised leaves the cache in an unknown state
        if self._is_stateful and not work.logits:
            return torch.empty(0, self.vocab)  # the last part of the prompt computes the whole prompt
        start = work.start
        if cached is None or cached.tokens != start:
            cached, start = _SequenceCache({}, 0), 0
        ids = torch.tensor([work.sequence.tokens[start : work.end]], device=self._model.device)
        arguments = {"use_cache": True, "logits_to_keep": max(work.logits, 1), **cached.arguments}
        if start and self._takes_positions:  # some models count from 0 in each call (Bamba)
            arguments["position_ids"] = torch.arange(start, work.end, device=ids.device)[None]
        with fast_products() if ids.shape[1] >= _PROMPT else nullcontext():
            output = self._model(input_ids=ids, **arguments)
        self._caches[name] = _SequenceCache.of(output, work.end)
        logits: Tensor = output.logits[0]
        return logits[len(logits) - work.logits :].float().cpu()

    def release(self, sequence: Sequence) -> None:
        self._caches.pop(sequence.request_id, None)
