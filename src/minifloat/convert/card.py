"""The model card of a converted checkpoint: that of the source, and a section that says what was done."""

from __future__ import annotations

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.rewrite import CARD_FILE
from minifloat.convert.report import ConvertReport
from minifloat.hub import model_name
from minifloat.report.card import without_section


def model_card(checkpoint: Checkpoint, report: ConvertReport) -> str:
    """The card as Markdown. Metadata of the source (base_model, licence, ...) stays as it is; where it loads does not.

    Args:
        checkpoint: The source.
        report: What was done.
    """
    card = checkpoint.path / CARD_FILE
    name = model_name(checkpoint.path)
    before = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else f"# {name}\n"
    if report.layout is None:
        what = f"dequantized from layout `{report.source_layout}` to {report.dtype}"
    else:
        exactly = "up to the rounding of some scales" if report.rounding.scales else "with the same codes and scales"
        what = f"converted from layout `{report.source_layout}` to `{report.layout}`, {exactly}"
    return "\n".join(
        [
            without_section(before, "deployment").rstrip(),
            "",
            "## Converted",
            "",
            f"This is {name}, {what}:",
            "",
            f"    {report.provenance['command']}",
            "",
            f"minifloat {report.provenance['minifloat']}, from tensors with the content hash",
            f"`{report.provenance['source_digest']}`.",
            *(("", *report.notes) if report.notes else ()),
            "",
        ]
    )
