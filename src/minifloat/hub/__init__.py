"""Models of the Hugging Face hub, by their ids, wherever a folder would do.

    ids.py       what is an id and what a folder; which model a folder of the hub's cache is
    errors.py    what the hub refuses, in our words
    fetch.py     a model's files into the cache: those that are used, and no pickle
    headers.py   headers of shards that stay on the hub, by range requests
    push.py      a checkpoint to the hub

The transport and the cache are huggingface_hub's, imported when a model of the hub is asked for. It follows HF_TOKEN,
HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

from __future__ import annotations

from minifloat.hub.fetch import model_folder
from minifloat.hub.headers import ModelFiles, list_model_files, open_headers
from minifloat.hub.ids import Origin, is_hub_id, model_name, origin_of

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
