"""Checkpoints of known shapes with random weights, to measure speed and memory without downloading a model.

A decoder's time depends on the shapes and bytes of its weights and hardly on their values.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import CONFIG_FILE, INDEX_FILE, CheckpointWriter, OutputTensor, encode_index
from minifloat.checkpoint.files import storage_errors
from minifloat.deploy.estimate.model_source import tensors_of
from minifloat.errors import lookup
from minifloat.numerics.scheme import get_scheme

#: Number of random values that all weights are cut from: drawing billions would take longer than writing them.
_POOL = 1 << 22
_STANDARD_DEVIATION = 0.02
#: Number and magnitude of a few large weights, such as trained models have.
_OUTLIERS, _OUTLIER = 4096, 0.5
_SHARD_BYTES = 1 << 30
_PIECE_BYTES = 16 << 20
_BOS, _EOS = "<s>", "</s>"
#: Letters of the tokenizer's words; the last one represents a space.
_LETTERS = f"{ascii_letters}\u0120"


@dataclass(frozen=True)
class Shape:
    model_type: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM" if self.model_type == "llama" else "Qwen3ForCausalLM"],
            "model_type": self.model_type,
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        return tensors_of(self.config, Path())


#: Source: the `config.json` of Llama-3.2-1B, Qwen3-0.6B, Llama-3.1-8B and TinyLlama-1.1B.
SHAPES = {
    "llama-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "llama-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, tied=False),
    "tinyllama-1.1b": Shape("llama", 2048, 5632, 22, 32, 4, 64, 32000, tied=False),
}


def get_shape(name: str) -> Shape:
    return lookup("shape", name, SHAPES)


def write_random(destination: str | os.PathLike[str], shape: Shape, *, seed: int = 0) -> Path:
    tensors = shape.tensors
    facts = json.dumps([asdict(shape), seed])
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()
    shards = _shards(tensors)
    generator = np.random.default_rng(seed)
    pool = _pool(generator)
    with CheckpointWriter(
        destination, fingerprint=fingerprint, total_bytes=sum(tensor.nbytes for tensor in tensors)
    ) as writer:
        for name, members in shards.items():
            starts = {tensor.name: int(generator.integers(_POOL)) for tensor in members}
            if name in writer.finished:
                continue
            shard = writer.shard(name, members, {"format": "pt"})
            for tensor in members:
                offset = 0
                for piece in _values(tensor, pool, starts[tensor.name]):
                    shard.write(tensor.name, piece, offset)
                    offset += piece.nbytes
            shard.commit({})
        writer.write_file(INDEX_FILE, encode_index(shards))
        for file, content in _tokenizer(shape.vocab).items():
            writer.write_file(file, content)
        writer.write_file(CONFIG_FILE, json.dumps(shape.config, indent=2).encode())
        return writer.commit()


def _shards(tensors: tuple[OutputTensor, ...]) -> dict[str, list[OutputTensor]]:
    groups: list[list[OutputTensor]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(member.nbytes for member in groups[-1]) + tensor.nbytes > _SHARD_BYTES:
            groups.append([])
        groups[-1].append(tensor)
    count = len(groups)
    return {f"model-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _pool(generator: np.random.Generator) -> npt.NDArray[np.uint16]:
    """Return random weights as bits of BF16, truncated: the rounding of noise is noise."""
    values = generator.standard_normal(_POOL, np.float32) * np.float32(_STANDARD_DEVIATION)
    values[generator.integers(0, _POOL, _OUTLIERS)] = _OUTLIER
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _values(tensor: OutputTensor, pool: npt.NDArray[np.uint16], start: int) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield a tensor's weights as bits of BF16, piece by piece; the weights of a norm are 1."""
    left = tensor.nbytes // pool.itemsize
    if len(tensor.shape) == 1:
        one = np.array([1.0], np.float32).view(np.uint32) >> 16
        yield np.full(left, one[0], np.uint16)
        return
    while left:
        piece = pool[start : start + min(left, _PIECE_BYTES // pool.itemsize)]
        yield piece
        left, start = left - len(piece), (start + len(piece)) % _POOL


def _tokenizer(vocab: int) -> dict[str, bytes]:
    """Return the files of a byte tokenizer, filled up with longer words to the size of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [_BOS, _EOS, *letters]
    for length in (2, 3):
        words += ["".join(parts) for parts in product(_LETTERS, repeat=length)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words[:vocab])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_BOS, _EOS])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS, "eos_token": _EOS}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def make_pair(folder: str | os.PathLike[str], name: str, scheme: str) -> tuple[Path, Path]:
    """Write a random checkpoint of a shape, and quantize it; a checkpoint that exists already is kept."""
    from minifloat.quantize.job import quantize_checkpoint

    shape = get_shape(name)
    get_scheme(scheme)
    parent = Path(folder)
    with storage_errors(parent, "create"):
        parent.mkdir(parents=True, exist_ok=True)
    baseline, candidate = parent / name, parent / f"{name}-{scheme}"
    if not baseline.exists():
        write_random(baseline, shape)
    if not candidate.exists():
        quantize_checkpoint(baseline, candidate, scheme)
    return baseline, candidate


@contextlib.contextmanager
def model_pair(
    candidate: str | None, baseline: str | None, shape: str | None, scheme: str, folder: Path | None
) -> Iterator[tuple[str | Path, str | Path]]:
    """Yield the baseline and the candidate of a bench: the given models, or random ones from `make_pair`."""
    if shape is None:
        assert candidate is not None
        assert baseline is not None
        yield baseline, candidate
    elif folder is not None:
        yield make_pair(folder, shape, scheme)
    else:
        with tempfile.TemporaryDirectory(prefix="minifloat-bench-") as temporary:
            yield make_pair(temporary, shape, scheme)
