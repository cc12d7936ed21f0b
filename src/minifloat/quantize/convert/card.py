"""The model card of a converted checkpoint: the card of the source, with a section about the conversion."""

from __future__ import annotations

import re
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import read_small
from minifloat.checkpoint.hub import model_name
from minifloat.checkpoint.rewrite import CARD_FILE
from minifloat.deploy.check import ENGINES
from minifloat.deploy.check.deployment import Reports, deployment_section, engine_tags, library_name
from minifloat.errors import CheckpointError
from minifloat.model.layouts import TARGETS
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.convert.report import ConvertReport
from minifloat.report.card import read_metadata, replace_metadata, without_section

#: Name of the model in the card's commands until `push` knows its id.
MODEL = "MODEL"
_CARD_LIMIT = 1 << 24  #: bytes
#: The line in which the card of `quantize` names the layout.
_LAYOUT_LINE = re.compile(r"^(Elements .*), layout `[^`]*`\.$", re.MULTILINE)
_MAKER = "minifloat"  #: a tag that stays true after a conversion
_FORMATS = {part for name in SCHEMES for part in (name, name.partition("-")[0])}


def model_card(checkpoint: Checkpoint, report: ConvertReport, engines: Reports) -> str:
    """Return the card as Markdown. Metadata of the source (base_model, licence, ...) stays where it is still true."""
    name = model_name(checkpoint.path)
    try:
        source_card = read_small(checkpoint.path, CARD_FILE, _CARD_LIMIT, CheckpointError).decode(errors="replace")
    except FileNotFoundError:
        source_card = f"# {name}\n"
    if report.layout is None:
        conversion = f"dequantized from layout `{report.source_layout}` to {report.dtype}"
    else:
        precision = "up to the rounding of some scales" if report.rounding.scales else "with the same codes and scales"
        conversion = f"converted from layout `{report.source_layout}` to `{report.layout}`, {precision}"
    return "\n".join(
        [
            _with_true_layout(_with_true_metadata(source_card, report.layout, engines), report.layout).rstrip(),
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
            deployment_section(engines, MODEL),
        ]
    )


def _with_true_layout(card: str, layout: str | None) -> str:
    """Return the card without the former table of engines, and with the present layout in the line that names it."""
    present = "dequantized since, see below" if layout is None else f"layout `{layout}`"
    return _LAYOUT_LINE.sub(lambda match: f"{match[1]}, {present}.", without_section(card, "deployment"))


def _with_true_metadata(card: str, layout: str | None, engines: Reports) -> str:
    """Return the card with true tags (layout, engines, quantization) and the library that loads the output."""
    try:
        before = read_metadata(card)
    except ValueError:
        return card
    after: dict[str, Any] = dict(before)
    if layout is None and after.get("base_model_relation") == "quantized":
        del after["base_model_relation"]
    if isinstance(after.get("tags"), list):
        untrue = {*TARGETS, *ENGINES} - {_MAKER} - _FORMATS | (_FORMATS if layout is None else set())
        after["tags"] = [tag for tag in after["tags"] if tag not in untrue]
        after["tags"] += [] if layout is None else [layout, *engine_tags(engines)]
    if "library_name" in after:
        after["library_name"] = library_name(engines)
    return card if after == before else replace_metadata(card, after)
