"""What a packed cache was made from, stated so that a checkpoint which has changed since is noticed at once.

To hash all bytes of a checkpoint would take as long as to pack them. A file that is written to, replaced or copied gets
another time of change (ctime), which only the system sets. File systems without such times exist (images), so the
headers, the config and samples of every shard count too: another quantization of a model differs in all of them.
"""

from __future__ import annotations

import json
import os
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.digest import name_digest, new_hasher
from minifloat.checkpoint.files import open_regular, storage_errors

#: Samples of each shard and their bytes, from the first to the last.
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the identity of an open checkpoint, as JSON values."""
    hasher = new_hasher()
    described = [checkpoint.config, checkpoint.quantization_config]
    tensors = [[info.name, info.dtype, info.shape, info.shard, info.offset] for info in checkpoint.tensors.values()]
    metadata = {shard: dict(texts) for shard, texts in checkpoint.metadata.items()}
    hasher.update(json.dumps([described, tensors, metadata], sort_keys=True).encode())
    shards = {}
    for name in checkpoint.shards:
        path = checkpoint.shard_path(name)
        with storage_errors(path, "read it"):
            descriptor, status = open_regular(path)
            try:
                for index in range(_SAMPLES):
                    offset = max(0, status.st_size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)
                    hasher.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
            finally:
                os.close(descriptor)
        shards[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return {"model": str(checkpoint.path), "shards": shards, "headers and samples": name_digest(hasher)}
