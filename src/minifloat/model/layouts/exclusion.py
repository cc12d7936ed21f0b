"""A check of the config's lists of unquantized modules against the tensors.

No server reads a listed module correctly if its weight is stored as codes: transformers and compressed-tensors use the
codes as weights, without their scale, and vLLM has no parameter for the scale.

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

#: ``covers(entry, module)`` returns whether an entry of a list matches a module.
Covers = Callable[[str, str], bool]


def by_name_or_pattern(entry: str, module: str) -> bool:
    """Match as compressed-tensors does: the exact name, or ``re:`` and a regular expression from the start."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def by_name_or_parent(entry: str, module: str) -> bool:
    """Match as readers of `quant_method: fp8` do: the exact name, or (transformers) the name of a parent module."""
    return entry == module or module.startswith(f"{entry}.")


def by_wildcard(entry: str, module: str) -> bool:
    """Match as ModelOpt does: the exact name, or a pattern with ``*``."""
    return entry == module or fnmatch.fnmatchcase(module, entry)


def refuse_excluded(config_path: Path, key: str, entries: Any, modules: Iterable[str], covers: Covers) -> None:
    """Raise if a list of unquantized modules matches a module that is stored as codes with a scale."""
    if entries is None:
        return
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
