"""The model card of a converted checkpoint: the card of the source, with a section about the conversion."""

from __future__ import annotations

from typing import Any

from minifloat.check import ENGINES
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.rewrite import CARD_FILE
from minifloat.convert.report import ConvertReport
from minifloat.hub import model_name
from minifloat.layouts import TARGETS
from minifloat.numerics.scheme import SCHEMES
from minifloat.report.card import read_metadata, replace_metadata, without_section

_MAKER = "minifloat"  #: a tag that stays true after a conversion
_FORMATS = {part for name in SCHEMES for part in (name, name.partition("-")[0])}


def model_card(checkpoint: Checkpoint, report: ConvertReport) -> str:
    """Return the card as Markdown. Metadata of the source (base_model, licence, ...) stays where it is still true.

    Args:
        checkpoint: The source.
        report: The report of the conversion.
    """
    card = checkpoint.path / CARD_FILE
    name = model_name(checkpoint.path)
    source_card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else f"# {name}\n"
    if report.layout is None:
        conversion = f"dequantized from layout `{report.source_layout}` to {report.dtype}"
    else:
        precision = "up to the rounding of some scales" if report.rounding.scales else "with the same codes and scales"
        conversion = f"converted from layout `{report.source_layout}` to `{report.layout}`, {precision}"
    return "\n".join(
        [
            without_section(_with_true_metadata(source_card, report.layout), "deployment").rstrip(),
            "",
            "## Converted",
            "",
            f"This is {name}, {conversion}:",
            "",
            f"    {report.provenance['command']}",
            "",
            f"minifloat {report.provenance['minifloat']}, from tensors with the content hash",
            f"`{report.provenance['source_digest']}`.",
            *(("", *report.notes) if report.notes else ()),
            "",
        ]
    )


def _with_true_metadata(card: str, layout: str | None) -> str:
    """Return the card without tags that are no longer true: the former layout, its engines, and quantization."""
    try:
        before = read_metadata(card)
    except ValueError:
        return card
    after: dict[str, Any] = dict(before)
    if layout is None and after.get("base_model_relation") == "quantized":
        del after["base_model_relation"]
    if isinstance(after.get("tags"), list):
        untrue = {*TARGETS, *ENGINES} - {_MAKER} - _FORMATS | (_FORMATS if layout is None else set())
        after["tags"] = [tag for tag in after["tags"] if tag not in untrue] + ([] if layout is None else [layout])
    return card if after == before else replace_metadata(card, after)
