"""The facts that an engine reports about its model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model."""

    name: str
    path: str
    architecture: str
    runner: str
    device: str
    reason_not_native: str
    scheme: str
    dtype: str
    lm_head: str
    activations: str
    weight_bytes: int
    bf16_bytes: int
    step_bytes: int
    kv_element: str
    kv_bytes: int
    kv_bytes_per_token: int
    kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    load_seconds: float
    prefill_bytes: int = 0
    speculation: str = ""
    draft_bytes: int = 0
    state_bytes: int = 0
    state_copies: int = 0
    reason_no_prefix_cache: str = ""
    deterministic: bool = False
    isa: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values."""
        return asdict(self)
