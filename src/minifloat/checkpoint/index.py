"""The shard index, model.safetensors.index.json, which maps tensors to shards, and the choice of a model's shards.

The index repeats what the shards' headers say, so this module compares the two: a tensor that only one of them names
would be dropped by some tools and loaded by others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from minifloat.checkpoint.files import is_safe_name, parse_object, read_small
from minifloat.checkpoint.header import MAX_HEADER_BYTES, strict_json
from minifloat.checkpoint.layout import GGUF_HINT, INDEX_FILE, SHARD_SUFFIX, SINGLE_FILE, is_gguf, is_pickle
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import NotACheckpointError, ShardIndexError, UnsafeFileError


def read_index(root: Path) -> dict[str, str] | None:
    """Return the map from tensor name to shard file, or None if the folder has no index."""
    path = root / INDEX_FILE
    try:
        data = read_small(root, INDEX_FILE, MAX_HEADER_BYTES, ShardIndexError)
    except FileNotFoundError:
        return None
    weight_map = parse_object(data, path, ShardIndexError, strict_json).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardIndexError(path, "no weight_map that names a tensor")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ShardIndexError(path, f"tensor {tensor!r}: expected a file name, found {type(shard).__name__}")
    for shard in set(weight_map.values()):
        if not is_safe_name(shard) or not shard.endswith(SHARD_SUFFIX):
            raise UnsafeFileError(path, f"shard name {shard!r} is not the bare name of a *{SHARD_SUFFIX} file")
    return weight_map


def shard_names(root: Path, names: Collection[str], weight_map: Mapping[str, str] | None) -> list[str]:
    """Return the file names of the shards of a model, sorted."""
    present = sorted(name for name in names if name.endswith(SHARD_SUFFIX))
    if weight_map is not None:
        claimed = sorted(set(weight_map.values()))
        missing = [shard for shard in claimed if shard not in names]
        if missing:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"{len(missing)} of {len(claimed)} shards are missing, the first is {missing[0]!r}; download it again",
            )
        if SINGLE_FILE in present and SINGLE_FILE not in claimed:
            raise ShardIndexError(
                root / INDEX_FILE,
                f"two models in one folder: {SINGLE_FILE}, which transformers loads, and the shards of this index; "
                "move one of them away",
            )
        return claimed
    if SINGLE_FILE in present:
        return [SINGLE_FILE]  # every loader takes this file; others are adapters, originals of the same model, ...
    if len(present) > 1:
        raise ShardIndexError(
            root, f"{len(present)} {SHARD_SUFFIX} files but no {INDEX_FILE}: which of them are the model is unknown"
        )
    if present:
        return present
    pickles = sorted(filter(is_pickle, names))
    if pickles:
        raise UnsafeFileError(
            root / pickles[0],
            "a pickle file can run code and is not read; convert the model first, if you trust it: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW) writes safetensors",
        )
    gguf = sorted(filter(is_gguf, names))
    if gguf:
        raise NotACheckpointError(root / gguf[0], GGUF_HINT)
    raise NotACheckpointError(root, f"no {SHARD_SUFFIX} file")


def check_index(weight_map: Mapping[str, str], shards: Mapping[str, Sequence[TensorInfo]], path: Path) -> None:
    """Raise unless the index and the headers of the shards agree."""
    for shard, infos in shards.items():
        for info in infos:
            claimed = weight_map.get(info.name)
            if claimed != shard:
                place = f"says it is in {claimed}" if claimed else "does not name it"
                raise ShardIndexError(path, f"{shard} holds tensor {info.name!r}, but the index {place}")
    held = {info.name for infos in shards.values() for info in infos}
    for tensor, shard in weight_map.items():
        if tensor not in held:
            raise ShardIndexError(path, f"tensor {tensor!r} should be in {shard}, which does not hold it")


def encode_index(shards: Mapping[str, Sequence[OutputTensor]]) -> bytes:
    """Encode the index; the bytes depend on the arguments only."""
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors)
    weight_map = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
