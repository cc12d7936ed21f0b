"""What computes a step: the interface, and how one is chosen for a model."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Protocol

from torch import Tensor

from minifloat.serve.engine.scheduler import Work
from minifloat.serve.engine.sequence import Sequence


class Runner(Protocol):
    """Holds the weights and the memory of the KV cache.

    Attributes:
        name: "native", "device" or "transformers".
        weight_bytes: Bytes of the weights that one token is multiplied with.
        kv_element: Format of cached keys and values.
        kv_bytes: Memory of the whole cache.
        vocab: Logits per token.
    """

    name: str
    weight_bytes: int
    kv_element: str
    kv_bytes: int
    vocab: int

    def run(self, works: Sequences[Work]) -> Tensor:
        """Compute tokens and put their keys and values into the cache.

        A call that raised may be repeated with some of the same works.

        Returns:
            float32 ``[n, vocab]``: of each work in turn, the logits after its last `Work.logits` tokens; on the
            runner's device. The next call may overwrite them.
        """

    def release(self, sequence: Sequence) -> None:
        """A sequence has lost its blocks or is finished: forget what is held for it."""
