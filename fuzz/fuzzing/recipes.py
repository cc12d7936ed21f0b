"""What a person asks of `quantize`: schemes, layouts, overrides, targets. A recipe is refused, or its output opens."""

from __future__ import annotations

from typing import Any

from fuzzing import small
from fuzzing.mutation import decoded, encoded, json_mutator
from fuzzing.target import Target
from minifloat import Checkpoint, QuantizeOptions, check_checkpoint, quantize_checkpoint
from minifloat.model.layouts import WRITERS, describe
from minifloat.numerics.scheme import SCHEMES

_FIELDS = ("scheme", "layout", "overrides", "target", "impl", "device", "workers", "allow_partial", "mtp", "base_model")


def _run(data: bytes) -> None:
    value = decoded(data)
    if not isinstance(value, dict):
        return
    options: dict[str, Any] = {name: value[name] for name in _FIELDS if name in value}
    texts = (options.get(name) for name in ("scheme", "layout", "target", "impl", "device", "base_model"))
    if not all(text is None or isinstance(text, str) for text in texts):
        return  # the command line passes texts
    overrides = options.setdefault("overrides", [])
    if not isinstance(overrides, list) or not all(isinstance(item, str) and len(item) < 200 for item in overrides):
        return
    if options.get("workers", 1) not in (1, 2):
        options["workers"] = 1
    if str(value.get("device", "cpu")).startswith("cuda") or value.get("impl") not in (None, "auto", "cpu"):
        return  # torch's and Triton's own errors on a machine without a GPU
    scheme = options.pop("scheme", None)
    output = small.fresh("recipe")
    if isinstance(target := value.get("judge"), str):
        check_checkpoint(small.checkpoint(), target, scheme=scheme, overrides=overrides)
    quantize_checkpoint(small.checkpoint(), output, scheme, QuantizeOptions(**options))
    with Checkpoint.open(output) as written:
        assert describe(written).layout is not None
        for name in written.tensors:
            written.read(name)


def _seeds() -> dict[str, bytes]:
    seeds: dict[str, bytes] = {
        f"{scheme}": encoded({"scheme": scheme, "overrides": [r"layers\.0\.=bf16", "down_proj=fp8-dynamic"]})
        for scheme in ("fp8-dynamic", "mxfp4", "nvfp4")
    }
    seeds["layout"] = encoded(
        {"scheme": "fp8-block", "layout": "fp8", "allow_partial": True, "target": "vllm:h100:tp2"}
    )
    seeds["judge"] = encoded({"scheme": "mxfp8", "judge": "sglang:b200", "base_model": "org/name", "mtp": True})
    return seeds


_WORDS = {
    *SCHEMES,
    *WRITERS,
    "modelopt",
    "=bf16",
    "(q|k)_proj=",
    r"layers\.(0|1)\.",
    "vllm:",
    "sglang:",
    ":tp4",
    "vllm",
}
_WORDS |= {"h100", "b200", "cpu", "lm_head=mxfp4", "embed=fp8-block", ".*=nvfp4", *_FIELDS}

TARGET = Target(_run, _seeds, seconds=10, mutate=json_mutator(_WORDS))
