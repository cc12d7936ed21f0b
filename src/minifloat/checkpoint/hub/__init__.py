"""Access to models of the Hugging Face hub, whose ids are accepted wherever a model folder is.

    ids.py       tells ids from folders; finds the model of a folder in the hub's cache
    errors.py    errors of the hub as messages with a cure
    fetch.py     downloads the files of a model that are used, and no pickle files, into the cache
    headers.py   reads the headers of shards on the hub by range requests

huggingface_hub does transport and caching, and is imported at the first use of a model of the hub. It reads HF_TOKEN,
HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

from minifloat.checkpoint.hub import (
    ModelFiles,
    Origin,
    is_hub_id,
    list_model_files,
    model_folder,
    model_name,
    open_headers,
    origin_of,
)

__all__ = [
    "ModelFiles",
    "Origin",
    "is_hub_id",
    "list_model_files",
    "model_folder",
    "model_name",
    "open_headers",
    "origin_of",
]
