"""The model card (README.md) beside the weights: the model, its quantization, and the commands to run it.

Measurements come later: `compare --update-card` and `bench --update-card` insert sections of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_name, origin_of
from minifloat.deploy.check.deployment import Reports, deployment_section, engine_tags, library_name
from minifloat.quantize.report import QuantizeReport, TensorReport, worst
from minifloat.quantize.rounding_summary import summary_rows
from minifloat.report.card import metadata_head, read_card, read_metadata

#: Name of the model in the card's commands until `push` knows its id.
MODEL = "MODEL"
#: The chart of a budget, a file beside the weights.
BUDGET_CHART = "budget.svg"
_WORST_SHOWN = 10
_CARRIED_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")


def model_card(checkpoint: Checkpoint, report: QuantizeReport, engines: Reports, base_model: str | None = None) -> str:
    """Return the card as Markdown with a Hugging Face metadata header."""
    origin = origin_of(checkpoint.path)
    base = base_model or (None if origin is None else origin.repo_id)
    name = base or model_name(checkpoint.path)
    recipe, provenance = report.recipe, report.provenance
    total = report.total
    kinds = Counter((tensor.action, tensor.detail) for tensor in report.tensors)
    rows = [f"| {action} | {detail} | {count} |" for (action, detail), count in sorted(kinds.items())]
    ratio = report.source_bytes / max(report.output_bytes, 1)
    tags = engine_tags(engines)
    lines = [
        f"# {name}, {recipe['scheme']}",
        "",
        f"{report.source_bytes:,} bytes of weights became {report.output_bytes:,} ({ratio:.2f}x smaller).",
        f"Elements {recipe['element']}, scales {recipe['scale']} per {recipe['granularity']}, "
        f"rule `{recipe['scale_rule']}`, layout `{recipe['layout']}`.",
        f"Inputs of the linears: {' and '.join(recipe['inputs']) or 'in 16 bits'}.",
        *report.notes,
        "",
        deployment_section(engines, MODEL),
        "## Made with",
        "",
        f"    {provenance['command']}",
        "",
        f"minifloat {provenance['minifloat']}, from weights with the content hash",
        f"`{provenance['source_digest']}`; `minifloat.json` has that of each tensor.",
        "",
        *_budget_section(report),
        *_rounding_section(report),
        "## Error of the weights",
        "",
        f"All quantized weights together: SQNR {total.sqnr_db:.2f} dB, {total.saturated_fraction:.2e} saturated, "
        f"{total.flushed_fraction:.2e} flushed to zero. `minifloat.json` has every tensor.",
        "The error of the weights is not the error of the model, which `minifloat compare` measures.",
        "",
        "| what | as | tensors |",
        "|---|---|---|",
        *rows,
        "",
        f"The {_WORST_SHOWN} weights with the lowest SQNR:",
        "",
        "| weight | shape | SQNR dB | saturated | flushed to zero |",
        "|---|---|---|---|---|",
        *(_row(tensor) for tensor in worst(report.tensors, _WORST_SHOWN)),
    ]
    return (
        metadata_head(_metadata(checkpoint, recipe, base, tags, library_name(engines))) + "\n" + "\n".join(lines) + "\n"
    )


def _budget_section(report: QuantizeReport) -> list[str]:
    """Return what a budget chose: bits, KL divergence, formats; nothing where none was given."""
    budget = (report.rounding or {}).get("budget")
    if budget is None:
        return []
    formats = Counter(group["format"] for group in budget["groups"])
    return [
        "## Formats within the budget",
        "",
        f"![KL divergence against bits per weight]({BUDGET_CHART})",
        "",
        "| run | bits per weight | KL predicted | KL measured |",
        "|---|---|---|---|",
        *(
            f"| {number} | {run['bits']:.3f} | {run['predicted']:.4f} | {run['kl']:.4f} |"
            for number, run in enumerate(budget["measured"], 1)
        ),
        "",
        f"Groups of weights by format: {', '.join(f'{name} {count}' for name, count in formats.most_common())}. Run 1 "
        "has the cheapest format everywhere; `minifloat.json` has the damage of each group.",
        "",
    ]


def _rounding_section(report: QuantizeReport) -> list[str]:
    """Return the lines on how codes were chosen with data; none without data."""
    rounding = report.rounding
    if rounding is None:
        return []
    folded = [
        "Before that, powers of two that scale the input channels of some linears were folded into the norms and",
        "weights in front of them. The function of the unquantized model is unchanged. Norms and weights differ from",
        "the original's; the errors below are those of the codes against the folded weights.",
        "",
    ]
    return [
        "## Rounding",
        "",
        "The codes were chosen with calibration text. KL is the divergence from the original model in nats per token,",
        "on a part of the text that is in no statistic.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label.strip()} | {text} |" for label, text in summary_rows(rounding)),
        "",
        *(folded if any(row["folded"] for row in rounding["folds"]) else []),
        'The command under "Made with" repeats the run; `minifloat.json` has each weight under `rounding`.',
        "",
    ]


def _metadata(
    checkpoint: Checkpoint, recipe: dict[str, Any], base: str | None, engines: list[str], library: str
) -> dict[str, Any]:
    """Return the metadata of the card, as hubs read it."""
    relation = {} if base is None else {"base_model": base, "base_model_relation": "quantized"}
    tags = [recipe["scheme"].partition("-")[0], recipe["scheme"], recipe["layout"], *engines, "minifloat"]
    return {
        **_carried_metadata(checkpoint),
        **relation,
        "library_name": library,
        "tags": list(dict.fromkeys(tags)),
    }


def _row(tensor: TensorReport) -> str:
    stats = tensor.stats
    assert stats is not None  # `worst` returns quantized tensors only
    shape = "x".join(map(str, tensor.shape))
    return (
        f"| `{tensor.name}` | {shape} | {stats.sqnr_db:.2f} | {stats.saturated_fraction:.2e} | "
        f"{stats.flushed_fraction:.2e} |"
    )


def _carried_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metadata of the source's card that is true of the quantized model too; nothing if it is no YAML."""
    try:
        source_metadata = read_metadata(read_card(checkpoint.path).decode("utf-8", errors="replace"))
    except (FileNotFoundError, ValueError):
        source_metadata = {}
    carried = {key: source_metadata[key] for key in _CARRIED_KEYS if source_metadata.get(key)}
    return carried | {"pipeline_tag": carried.get("pipeline_tag", "text-generation")}
