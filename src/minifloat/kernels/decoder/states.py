"""`SequenceStates`: what layers with a gated delta rule keep of each sequence.

Unlike keys and values, a state has the same size for every length of the text, and only its newest version exists: a
step continues it, and nothing can go back to an earlier token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels.pack.memory import allocate

_UNKNOWN = -1


class SequenceStates:
    """The memory of the states of some sequences, of which each has a slot.

    A state is undefined until a step writes it; one whose first token is at position 0 begins with zeros.

    Attributes:
        data: float32 ``[slots, floats]``. A slot that was never used takes no memory of the machine.
        tokens: int32 ``[slots]``: how many tokens of its sequence each state has seen; -1: undefined.
    """

    def __init__(self, floats: int, slots: int) -> None:
        for name, size in (("floats", floats), ("slots", slots)):
            if size < 1:
                raise ShapeError(name, f"expected at least 1, got {size}")
        memory = allocate(slots * floats * torch.float32.itemsize)
        self.data = memory.view(torch.float32).view(slots, floats)
        self.tokens = torch.full((slots,), _UNKNOWN, dtype=torch.int32)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.data.nbytes

    def begin(self, slots: Tensor) -> None:
        """Note that a step changes the states of some slots; they are undefined until it ends."""
        self.tokens[slots.long()] = _UNKNOWN

    def end(self, slots: Tensor, contexts: Tensor) -> None:
        """Note that a step has ended, and how many tokens of their sequences the states of some slots have seen."""
        self.tokens[slots.long()] = contexts

    def copy(self, source: int, target: int) -> None:
        """Make the state in slot `target` that in slot `source`."""
        self.data[target].copy_(self.data[source])
        self.tokens[target] = self.tokens[source]

    def check(self, slots: Sequence[int], first: Sequence[int]) -> None:
        """Validate that slots can continue their sequences."""
        if len(set(slots)) < len(slots):
            raise ShapeError("slots", f"expected a slot for each sequence, got {list(slots)}")
        for sequence, (slot, position) in enumerate(zip(slots, first, strict=True)):
            if not 0 <= slot < self.slots:
                raise ShapeError("slots", f"expected a slot 0 to {self.slots - 1} for sequence {sequence}, got {slot}")
            seen = int(self.tokens[slot])
            if position and seen != position:
                what = "undefined" if seen == _UNKNOWN else f"that of {seen} tokens"
                raise ShapeError(
                    "slots",
                    f"the state in slot {slot} is {what}, and sequence {sequence} continues after {position}",
                )
