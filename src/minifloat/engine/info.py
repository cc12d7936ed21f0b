"""The facts that an engine reports about its model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model.

    Attributes:
        name: The folder's name, or the model's id on the hub.
        path: The folder.
        architecture: Class of the model in transformers.
        runner: "native" or, on a GPU, "device"; "transformers" for models that neither supports.
        device: Device of the model.
        reason_not_native: Why "transformers" runs the model; empty where another runner does.
        scheme: Schemes of the quantized weights; "none" if no weight is quantized.
        dtype: Dtype of the activations.
        lm_head: Format of the output layer in memory, and whether it was quantized while it was loaded.
        activations: Format that inputs of quantized weights are rounded to where that is faster: "int8", "fp8", or
            `dtype`.
        prefill_bytes: Bytes of the second copy of the weights that inputs in FP8 are multiplied with.
        weight_bytes: Bytes of the weights as the checkpoint stores them, the embedding included.
        bf16_bytes: Bytes that all parameters would take in BF16.
        step_bytes: Bytes in memory of the weights that one token is multiplied with.
        kv_element: Format of cached keys and values.
        kv_bytes: Bytes of the KV cache.
        kv_bytes_per_token: Bytes of the KV cache per token.
        kv_blocks: Number of blocks of the KV cache.
        state_bytes: Bytes of the states that some layers keep of sequences beside the KV cache, copies included.
        state_copies: States that are kept so that equal beginnings of prompts are not computed again.
        reason_no_prefix_cache: Why equal beginnings of prompts are computed again; empty where blocks are shared.
        max_model_len: Tokens of the longest sequence.
        max_num_seqs: Sequences that run at a time.
        vocab_size: Number of logits per token.
        load_seconds: Seconds that loading took.
        speculation: What proposes tokens: "self", "model" or "prompt"; empty if nothing does.
        draft_bytes: Bytes of memory that drafts take beside the model.
        deterministic: Whether answers do not depend on the other requests, to the last bit.
        isa: Instruction set of the kernels of the CPU; empty where another runner computes.
    """

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
