"""What an engine serves, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model.

    Attributes:
        name: The folder's name, or the model's id on the hub.
        path: The folder.
        architecture: The class in transformers.
        runner: "native" or, on a GPU, "device"; "transformers" for models that these do not cover.
        device: Where it runs.
        reason_not_native: Why they do not; empty where one does.
        scheme: How the weights are quantized, in words; "none" where they are not.
        dtype: Of the activations.
        weight_bytes: Of the weights as checkpoints store them, the embedding included.
        bf16_bytes: What all parameters would take in BF16.
        step_bytes: Of the weights that one token is multiplied with, as they lie in memory.
        kv_element: Format of cached keys and values.
        kv_bytes: Memory of the KV cache.
        kv_bytes_per_token: Of it, per token.
        kv_blocks: Its blocks.
        max_model_len: Tokens of the longest sequence.
        max_num_seqs: Sequences that run at a time.
        vocab_size: Logits per token.
        load_seconds: How long loading took.
    """

    name: str
    path: str
    architecture: str
    runner: str
    device: str
    reason_not_native: str
    scheme: str
    dtype: str
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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
