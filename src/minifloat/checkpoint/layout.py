"""Which file of a model folder is what, by its name."""

from __future__ import annotations

import fnmatch

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_SUFFIX = ".safetensors"
HF_QUANT_CONFIG_FILE = "hf_quant_config.json"  #: where ModelOpt puts its quantization config
STATE_FILE = "minifloat-state.json"  #: marks the work folder of an output that is not finished

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHT_SUFFIXES = (SHARD_SUFFIX, *PICKLE_SUFFIXES, ".gguf", ".h5", ".msgpack", ".onnx", ".npz")

SIDECAR_FOLDER = "additional_chat_templates"
#: The files that make weights usable, matched without regard to case; everything in `SIDECAR_FOLDER` joins them.
#: config.json and README.md are missing on purpose: a quantized model gets new ones. So are the configs of other
#: tools (params.json, hf_quant_config.json), which describe weights that the output no longer has.
SIDECAR_PATTERNS = (
    "tokenizer*.json",
    "tokenizer.model*",
    "tekken.json",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "*.py",
    "license*",
    "notice*",
    "use_policy*",
)


def is_weights(name: str) -> bool:
    """Whether a file of that name holds weights, in any framework's format."""
    return name.lower().endswith(_WEIGHT_SUFFIXES)


def is_pickle(name: str) -> bool:
    """Whether a file of that name runs code when it is loaded."""
    return name.lower().endswith(PICKLE_SUFFIXES)


def is_sidecar(name: str) -> bool:
    """Whether a top-level file of that name is carried over to a quantized model unchanged."""
    lowered = name.lower()
    return not is_weights(name) and any(fnmatch.fnmatchcase(lowered, pattern) for pattern in SIDECAR_PATTERNS)
