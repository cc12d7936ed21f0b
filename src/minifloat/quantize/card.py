"""The model card (README.md) beside the weights: the model, its quantization, and the commands to run it.

Measurements come later: `compare --update-card` and `bench --update-card` insert sections of their own.
"""

from __future__ import annotations

from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_name, origin_of
from minifloat.deploy.check.deployment import Reports, engine_tags, library_name
from minifloat.deploy.check.document import MODEL, deployment_section
from minifloat.quantize.document import (
    Record,
    budget_section,
    card_rounding_section,
    done_table,
    worst_table,
)
from minifloat.quantize.report import QuantizeReport
from minifloat.report import markdown
from minifloat.report.card import metadata_head, read_card, read_metadata
from minifloat.report.document import Code, Document, Text, section

_CARRIED_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")


def model_card(checkpoint: Checkpoint, report: QuantizeReport, engines: Reports, base_model: str | None = None) -> str:
    """Return the card as Markdown with a Hugging Face metadata header."""
    origin = origin_of(checkpoint.path)
    base = base_model or (None if origin is None else origin.repo_id)
    title = f"{base or model_name(checkpoint.path)}, {report.recipe['scheme']}"
    return "\n".join(
        [
            metadata_head(_metadata(checkpoint, report.recipe, base, engines)),
            f"# {markdown.escape(title)}\n",
            markdown.write(_summary(report)),
            deployment_section(engines, MODEL),
            markdown.write(_details(report)),
        ]
    )


def _summary(report: QuantizeReport) -> Document:
    recipe, ratio = report.recipe, report.source_bytes / max(report.output_bytes, 1)
    return Document(
        "",
        [
            Text(
                f"{report.source_bytes:,} bytes of weights became {report.output_bytes:,} ({ratio:.2f}x smaller). "
                f"Inputs of the linears: {' and '.join(recipe['inputs']) or 'in 16 bits'}."
            ),
            Text(
                f"Elements {recipe['element']}, scales {recipe['scale']} per {recipe['granularity']}, "
                f"rule {recipe['scale_rule']}, layout {recipe['layout']}."
            ),
            *map(Text, report.notes),
        ],
    )


def _details(report: QuantizeReport) -> Document:
    record: Record = report.to_dict()
    provenance, total = report.provenance, report.total
    worst = worst_table(record)
    return Document(
        "",
        [
            section(
                "Made with",
                Code(provenance["command"]),
                Text(
                    f"minifloat {provenance['minifloat']}, from weights with the content hash "
                    f"{provenance['source_digest']}; minifloat.json has that of each tensor."
                ),
            ),
            budget_section(record),
            card_rounding_section(record),
            section(
                "Error of the weights",
                Text(
                    f"All quantized weights together: SQNR {total.sqnr_db:.2f} dB, {total.saturated_fraction:.2e} "
                    f"saturated, {total.flushed_fraction:.2e} flushed to zero. minifloat.json has every tensor. The "
                    "error of the weights is not the error of the model, which minifloat compare measures."
                ),
                done_table(record),
                Text(f"The {len(worst.rows)} weights with the lowest SQNR:"),
                worst,
            ),
        ],
    )


def _metadata(checkpoint: Checkpoint, recipe: dict[str, Any], base: str | None, engines: Reports) -> dict[str, Any]:
    """Return the metadata of the card, as hubs read it."""
    relation = {} if base is None else {"base_model": base, "base_model_relation": "quantized"}
    tags = [recipe["scheme"].partition("-")[0], recipe["scheme"], recipe["layout"], *engine_tags(engines), "minifloat"]
    return {
        **_carried_metadata(checkpoint),
        **relation,
        "library_name": library_name(engines),
        "tags": list(dict.fromkeys(tags)),
    }


def _carried_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metadata of the source's card that is true of the quantized model too; nothing if it is no YAML."""
    try:
        source_metadata = read_metadata(read_card(checkpoint.path).decode("utf-8", errors="replace"))
    except (FileNotFoundError, ValueError):
        source_metadata = {}
    carried = {key: source_metadata[key] for key in _CARRIED_KEYS if source_metadata.get(key)}
    return carried | {"pipeline_tag": carried.get("pipeline_tag", "text-generation")}
