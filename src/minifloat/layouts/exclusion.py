"""Lists of modules that a config says are not quantized, held against the tensors.

A module that is listed and yet stored as codes is read by nobody as its maker meant it: transformers and
compressed-tensors take the codes for weights without their scale, and vLLM has no place for the scale.

Source: vLLM 0.32, `is_layer_skipped`, `should_ignore_layer` and `ModelOptQuantConfigBase.is_layer_excluded`;
compressed-tensors 0.20, `match_name`; transformers 5.23, `should_convert_module`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from minifloat.errors import ConfigError

#: Whether an entry of a list covers a module.
Covers = Callable[[str, str], bool]


def by_name_or_pattern(entry: str, module: str) -> bool:
    """compressed-tensors: the exact name, or ``re:`` and a regular expression that matches from the start."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def by_name_or_parent(entry: str, module: str) -> bool:
    """`quant_method: fp8`: the exact name, or (transformers) that of a module around it."""
    return entry == module or module.startswith(f"{entry}.")


def by_wildcard(entry: str, module: str) -> bool:
    """ModelOpt: the exact name, or one with ``*``."""
    return entry == module or fnmatch.fnmatchcase(module, entry)


def refuse_excluded(config_path: Path, key: str, entries: Any, modules: Iterable[str], covers: Covers) -> None:
    """Raise where a list of exceptions covers a module that is stored as codes with a scale.

    Args:
        config_path: The file, for the message.
        key: Name of the list in it.
        entries: The list as it was read; None where there is none.
        modules: Modules that are stored quantized.
        covers: How this layout's readers match an entry.

    Raises:
        ConfigError: A module is covered, the list is none of strings, or a pattern in it does not compile.
    """
    if entries is None:
        return
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(config_path, f"{key}: expected a list of names, found {entries!r}")
    for module in modules:
        for entry in entries:
            try:
                covered = covers(entry, module)
            except re.error as error:
                raise ConfigError(config_path, f"{key}: {entry!r} is not a regular expression: {error}") from None
            if covered:
                raise ConfigError(
                    config_path,
                    f"{key} lists {entry!r}, yet {module} is stored as codes with a scale: servers would read the "
                    "codes as weights; take it off the list, or store the weight unquantized",
                )
