"""`full_config`: a config.json with the defaults of transformers' class; code of a checkpoint is never run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import CONFIG_FILE
from minifloat.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: What `layouts.describe` reads, and what could have transformers fetch kernels, which are code, from the hub.
_DROPPED_KEYS = (
    "quantization_config",
    "compression_config",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "auto_map",
)
#: Types whose config and model are those of another type, under the name of the repository's own code.
_SAME_AS = {"kimi_k2": "deepseek_v3"}
#: Key under which transformers 5 stores the numbers that JSON lacks, and its values.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def full_config(values: Mapping[str, Any], folder: Path) -> PreTrainedConfig:
    if "torch" in sys.modules:  # without these kernels, as `import_torch` leaves it, transformers' classes fail
        importlib.import_module("torch._meta_registrations")
    import transformers
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    path = folder / CONFIG_FILE
    model_type = _model_type(values)
    if model_type not in CONFIG_MAPPING:
        cure = f"transformers {transformers.__version__} does not have it; install a version that does"
        if values.get("auto_map"):
            cure = "it needs the Python code that comes with the checkpoint, which is not run here"
        raise ConfigError(path, f"model_type {model_type}: {cure}")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(_plain(values) | {"model_type": model_type})
    except Exception as error:  # config classes validate with errors of several libraries
        raise ConfigError(path, f"transformers {transformers.__version__} cannot use it: {error}") from error
    if not isinstance(config.get_text_config(decoder=True), PreTrainedConfig):
        raise ConfigError(path, f"model_type {model_type}: text_config is stated, and the type has no such part")
    config.name_or_path = str(folder)
    return config


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that the language model of a config can attend to; None if it states no limit."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def is_in_transformers(values: Mapping[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return _model_type(values) in CONFIG_MAPPING


def _model_type(values: Mapping[str, Any]) -> str:
    from transformers import CONFIG_MAPPING

    stated = str(values.get("model_type"))
    return stated if stated in CONFIG_MAPPING else _SAME_AS.get(stated, stated)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' warnings, for work that asks for shapes and fields only."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _plain(value: Any) -> Any:
    """Return a config with its tagged numbers as floats and without `_DROPPED_KEYS`, at any depth."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {_FLOAT_TAG} and value[_FLOAT_TAG] in _TAGGED_FLOATS:
        return _TAGGED_FLOATS[value[_FLOAT_TAG]]
    return {key: _plain(item) for key, item in value.items() if key not in _DROPPED_KEYS}


def merges_single_experts(model_types: Iterable[str]) -> bool:
    """Return whether transformers stacks single experts of a checkpoint for one of these values of ``model_type``."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import MergeModulelist
    except ImportError:
        return False
    mapping_of: Any = get_checkpoint_conversion_mapping
    conversions = (entry for name in model_types for entry in mapping_of(name) or ())
    return any(
        isinstance(operation, MergeModulelist)
        for entry in conversions
        for operation in getattr(entry, "operations", ())
    )
