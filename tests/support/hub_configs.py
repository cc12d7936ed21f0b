"""The configs of the most used open models, as they are on the hub: `tests/data/hub_configs.json`.

`source` says where a config comes from: "published", if a copy of its config.json was read; "recalled", if only its
sizes could be looked up, and other keys are those of its family and version as far as they are known. Long lists are
written as ``{"cycle": items, "length": n}``, and the rotary factors of Phi-3.5, whose values are ours, as
``{"linear": [first, last], "length": n}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data" / "hub_configs.json"


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"cycle", "length"}:
        return [value["cycle"][index % len(value["cycle"])] for index in range(value["length"])]
    if set(value) == {"linear", "length"}:
        (first, last), count = value["linear"], value["length"]
        return [round(first + (last - first) * index / (count - 1), 6) for index in range(count)]
    return {key: _expand(item) for key, item in value.items()}


#: Name on the hub -> its config.json.
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    entry["name"]: _expand(entry["config"]) for entry in json.loads(_FILE.read_text(encoding="utf-8"))
}
