"""The recipe and the provenance in the reports of `quantize` and `convert`: arguments, source, versions and command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from minifloat._version import __version__
from minifloat.calibration.result import Calibration
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import combine
from minifloat.checkpoint.hub import name_of, origin_of
from minifloat.model.layouts import compressed_tensors
from minifloat.model.plan.tensor_plan import QuantizationPlan


def describe_recipe(
    plan: QuantizationPlan,
    calibration: Calibration | None,
    rounding: dict[str, Any] | None = None,
    *,
    from_quantized: bool = False,
    allow_nonfinite: str | None = None,
) -> dict[str, Any]:
    """Return the arguments that determine the output of `quantize`, as JSON values."""
    weight = plan.scheme.weight
    return {
        "scheme": plan.scheme.name,
        "calibration": None if calibration is None else calibration.to_dict(),
        "kv_cache": None if plan.kv is None else plan.kv.element.name,
        "layout": plan.layout.name,
        "element": weight.element.name,
        "granularity": str(weight.granularity),
        "scale": weight.scale.name,
        "scale_rule": weight.rule.value,
        "inputs": sorted({str(scheme.activation) for scheme in plan.modules.values() if scheme.activation is not None}),
        "overrides": [str(override) for override in plan.overrides],
        "mtp": any(tensor.drafts and tensor.parts for tensor in plan.tensors),
        **({"from_quantized": True} if from_quantized else {}),
        **({} if allow_nonfinite is None else {"allow_nonfinite": allow_nonfinite}),
        **({} if rounding is None else {"rounding": rounding}),
    }


def quantize_options(recipe: dict[str, Any]) -> str:
    overrides = "".join(f" --override '{override}'" for override in recipe["overrides"])
    layout = "" if recipe["layout"] == compressed_tensors.NAME else f" --layout {recipe['layout']}"
    calibration = "" if recipe["calibration"] is None else f" --stats STATS --rule {recipe['calibration']['rule']}"
    rounding = recipe.get("rounding")
    data = ""
    if rounding is not None:
        calibration = ""  # static scales come from the same text
        sources = "".join(f" --data {_source_option(source)}" for source in rounding["data"].get("sources", ()))
        fold = "" if rounding["fold"] else " --no-fold"
        data = f" --method {rounding['method']}{sources}{fold}{_text_options(rounding['data'])}"
    kv_cache = " --kv-cache fp8" if recipe["kv_cache"] else ""
    drafts = " --mtp" if recipe.get("mtp") else ""
    source = " --from-quantized" if recipe.get("from_quantized") else ""
    allowed = f" --allow-nonfinite '{recipe['allow_nonfinite']}'" if recipe.get("allow_nonfinite") else ""
    return f"--scheme {recipe['scheme']}{source}{layout}{overrides}{drafts}{calibration}{data}{kv_cache}{allowed}"


def _source_option(source: Mapping[str, Any]) -> str:
    """Return the argument of ``--data`` that names a source, from its record, quoted for a shell."""
    named = {key: source.get(key) for key in ("column", "config", "split")}
    if "," in (named["column"] or ""):  # several tables with columns of their own: those that are found by default
        named["column"] = None
    if source.get("weight", 1.0) != 1.0:
        named["weight"] = f"{source['weight']:g}"
    options = ",".join(
        f"{key}={value}" for key, value in named.items() if value is not None and value != _DEFAULTS[key]
    )
    mark = f"#{options}" if options or "#" in source["name"] else ""
    return shlex.quote(source["name"] + mark)


#: Options of a source that need no mention.
_DEFAULTS = {"column": "text", "config": None, "split": "train", "weight": None}


def _text_options(data: dict[str, Any]) -> str:
    """Return the options for the text, where they are not the default; the number of sequences follows the model."""
    from minifloat.quantize.estimate import DEFAULT_TEXT

    samples, seq_len = data.get("sequences"), data.get("seq_len", DEFAULT_TEXT.seq_len)
    options = "" if samples is None else f" --calibration-samples {samples}"
    options += "" if seq_len == DEFAULT_TEXT.seq_len else f" --calibration-seq-len {seq_len}"
    seed = data.get("seed", DEFAULT_TEXT.seed)
    return options + ("" if seed == DEFAULT_TEXT.seed else f" --calibration-seed {seed}")


def provenance(
    checkpoint: Checkpoint, command: str, options: str, tensors: Iterable[Any], **facts: Any
) -> dict[str, Any]:
    """Return source, hashes, versions and command of an output; sharding does not change them."""
    origin = origin_of(checkpoint.path)
    source = checkpoint.name or checkpoint.path.name if origin is None else str(origin)
    return {
        "minifloat": __version__,
        "command": f"minifloat {command} {source} OUT {options}",
        "source": name_of(checkpoint),
        "source_revision": None if origin is None else origin.revision,
        **facts,
        "source_digest": combine((tensor.name, tensor.source_digest) for tensor in tensors),
    }
