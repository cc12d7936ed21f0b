"""The interface of what computes the steps of a model."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Protocol

from torch import Tensor

from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.engine.snapshots import StateSnapshots


class Runner(Protocol):
    """Holds the weights and the memory of the KV cache.

    Attributes:
        name: "native", "device" or "transformers".
        weight_bytes: Bytes of the weights that one token is multiplied with.
        kv_element: Format of cached keys and values.
        kv_bytes: Bytes of the whole KV cache.
        state_bytes: Bytes of the states that some layers keep of sequences beside the KV cache.
        prefill_bytes: Bytes of the second copy of the weights that inputs in FP8 are multiplied with.
        reason_no_prefixes: Why sequences with equal beginnings cannot share blocks; empty if they can.
        snapshots: Copies of these states, which equal beginnings need; None: there are none.
        vocab: Number of logits per token.
    """

    name: str
    weight_bytes: int
    kv_element: str
    kv_bytes: int
    state_bytes: int
    prefill_bytes: int
    reason_no_prefixes: str
    snapshots: StateSnapshots | None
    vocab: int

    def run(self, works: Sequences[WorkItem]) -> Tensor:
        """Compute tokens and put their keys and values into the cache.

        A call that raised may be repeated with some of the same work.

        Returns:
            float32 ``[n, vocab]``: the logits after the last `WorkItem.logits` tokens of each work item in turn, on the
            runner's device. The next call may overwrite them.
        """

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of all steps so far by part ("linears", "attention", "rows"); empty if unknown."""

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""
