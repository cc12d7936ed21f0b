"""The model card (README.md) that is written beside the weights: what this is, how it was made, how to run it."""

from __future__ import annotations

import re
from collections import Counter

from minifloat.checkpoint import Checkpoint
from minifloat.quantize.report import QuantizeReport, TensorReport, worst

_WORST_SHOWN = 10
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
_CARRIED_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")


def model_card(checkpoint: Checkpoint, report: QuantizeReport) -> str:
    """The card as Markdown with a Hugging Face metadata header.

    Args:
        checkpoint: The source; licence and language are carried over from its own card.
        report: What was done.
    """
    name = checkpoint.path.name
    recipe, provenance = report.recipe, report.provenance
    total = report.total
    kinds = Counter((tensor.action, tensor.detail) for tensor in report.tensors)
    rows = [f"| {action} | {detail} | {count} |" for (action, detail), count in sorted(kinds.items())]
    ratio = report.source_bytes / max(report.output_bytes, 1)
    lines = [
        "---",
        *_carried_metadata(checkpoint),
        f"base_model: {name}",
        "base_model_relation: quantized",
        "library_name: transformers",
        f"tags: [minifloat, {recipe['scheme']}, {recipe['layout']}]",
        "---",
        "",
        f"# {name}, {recipe['scheme']}",
        "",
        f"{report.source_bytes:,} bytes of weights became {report.output_bytes:,} ({ratio:.2f}x smaller).",
        f"Elements {recipe['element']}, scales {recipe['scale']} per {recipe['granularity']}, "
        f"rule `{recipe['scale_rule']}`, layout `{recipe['layout']}`.",
        *report.notes,
        "",
        "## Made with",
        "",
        f"    {provenance['command']}",
        "",
        f"minifloat {provenance['minifloat']}, from weights with the content hash",
        f"`{provenance['source_digest']}`; `minifloat.json` has that of each tensor.",
        "",
        "## Error of the weights",
        "",
        f"All quantized weights together: SQNR {total.sqnr_db:.2f} dB, {total.saturated_fraction:.2e} saturated, "
        f"{total.flushed_fraction:.2e} flushed to zero. `minifloat.json` has every tensor.",
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
        "",
        "The error of the weights is not the error of the model: measure that with "
        "`minifloat compare ORIGINAL THIS --update-card`.",
    ]
    return "\n".join(lines) + "\n"


def _row(tensor: TensorReport) -> str:
    stats = tensor.stats
    assert stats is not None  # `worst` returns quantized tensors only
    shape = "x".join(map(str, tensor.shape))
    return (
        f"| `{tensor.name}` | {shape} | {stats.sqnr_db:.2f} | {stats.saturated_fraction:.2e} | "
        f"{stats.flushed_fraction:.2e} |"
    )


def _carried_metadata(checkpoint: Checkpoint) -> list[str]:
    """The lines of the source card's header that stay true for the quantized model."""
    card = checkpoint.path / "README.md"
    if not card.is_file():
        return []
    match = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
    lines = match[1].splitlines() if match else []
    return [line for line in lines if line.split(":")[0] in _CARRIED_KEYS and line.partition(":")[2].strip()]
