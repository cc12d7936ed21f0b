"""`Runner`: what computes the steps of a model."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from torch import Tensor

from minifloat.engine.cache import StateSnapshots
from minifloat.engine.scheduler import WorkItem
from minifloat.engine.sequence import Sequence


class Runner:
    """Holds the weights and the memory of the KV cache.

    Attributes:
        name: "native", "device" or "transformers".
        on_device: Whether logits stay on a device, which then chooses tokens and may begin the next step before.
        weight_bytes: Bytes of the weights that one token is multiplied with.
        kv_element: Format of cached keys and values.
        kv_bytes: Bytes of the whole KV cache.
        vocab: Number of logits per token.
        state_bytes: Bytes of the states that some layers keep of sequences beside the KV cache.
        prefill_bytes: Bytes of the second copy of the weights that inputs in FP8 are multiplied with.
        reason_no_prefixes: Why sequences with equal beginnings cannot share blocks; empty if they can.
        snapshots: Copies of these states, which equal beginnings need; None: there are none.
    """

    name: str
    on_device = False
    weight_bytes: int
    kv_element: str
    kv_bytes: int
    vocab: int
    state_bytes = 0
    prefill_bytes = 0
    reason_no_prefixes = ""
    snapshots: StateSnapshots | None = None

    def run(self, works: Sequences[WorkItem]) -> Tensor:
        """Compute tokens and put their keys and values into the cache.

        A call that raised may be repeated with some of the same work.

        Returns:
            float32 ``[n, vocab]``: the logits after the last `WorkItem.logits` tokens of each work item in turn, on the
            runner's device. The next call may overwrite them.
        """
        raise NotImplementedError

    def run_ahead(self, works: Sequences[WorkItem], tokens: Tensor) -> Tensor:
        """Compute one token of each sequence, as `run`, before the host knows the tokens; only if `on_device`."""
        raise NotImplementedError

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of all steps so far by part ("linears", "attention", "rows"); empty if unknown."""
        return {}

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""
