"""The files of a model folder, classified by their names."""

from __future__ import annotations

import fnmatch

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_SUFFIX = ".safetensors"
HF_QUANT_CONFIG_FILE = "hf_quant_config.json"  #: ModelOpt's file for its quantization config
OLLAMA_FILE = "Modelfile"  #: of Ollama, beside GGUF files
JOURNAL_FILE = "minifloat-journal.jsonl"  #: marks the work folder of an unfinished output

#: What a file of llama.cpp is, and what to give in its place.
GGUF_HINT = (
    "a GGUF file, llama.cpp's format, which only `inspect`, `check` and `compare` read; give the model that the file "
    "was made from: its folder with config.json and *.safetensors, or its id on the hub"
)
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WEIGHT_SUFFIXES = (SHARD_SUFFIX, *PICKLE_SUFFIXES, ".gguf", ".h5", ".msgpack", ".onnx", ".npz")

SIDECAR_FOLDER = "additional_chat_templates"
#: Folders of the modules of sentence-transformers, of which the config is a sidecar.
MODULE_FOLDERS = ("*_pooling", "*_normalize", "*_logitscore")
#: Name patterns of sidecars, the files that are copied to a quantized model unchanged. Case does not matter. All files
#: in `SIDECAR_FOLDER` are sidecars too. config.json and README.md are missing because a quantized model gets new ones.
#: The configs of other tools (params.json, hf_quant_config.json) are missing because they describe weights that the
#: output no longer has.
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
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "*processor_config.json",
    "*.py",
    "license*",
    "notice*",
    "use_policy*",
)


def is_gguf(name: str) -> bool:
    """Return whether a file of this name is of llama.cpp's format, which holds weights, config and tokenizer in one."""
    return name.lower().endswith(".gguf")


def is_weights(name: str) -> bool:
    """Return whether a file of this name holds weights, in the format of any framework."""
    return name.lower().endswith(_WEIGHT_SUFFIXES)


def is_pickle(name: str) -> bool:
    """Return whether a file of this name is a pickle file, which can run code when it is loaded."""
    return name.lower().endswith(PICKLE_SUFFIXES)


def is_module_folder(name: str) -> bool:
    """Return whether a folder of this name belongs to a module of sentence-transformers."""
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in MODULE_FOLDERS)


def is_sidecar(name: str) -> bool:
    """Return whether a top-level file of this name is copied to a quantized model unchanged."""
    lowered = name.lower()
    return not is_weights(name) and any(fnmatch.fnmatchcase(lowered, pattern) for pattern in SIDECAR_PATTERNS)
