"""What `convert` did, for a terminal; and the model card of its output: the card of the source, with a new section."""

from __future__ import annotations

import re
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import name_of, origin_of
from minifloat.deploy.check import ENGINES
from minifloat.deploy.check.document import DEPLOYMENT, MODEL, deployment_section, verdict_section
from minifloat.deploy.check.judge import Reports, engine_tags, library_name
from minifloat.model.layouts import TARGETS, gguf
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.convert.plan import ConvertedTensor, ConvertReport
from minifloat.report import markdown
from minifloat.report.document import Bullets, Code, Column, Document, Section, Table, Text, columns, section
from minifloat.report.markdown import read_card, read_metadata, replace_metadata, without_section
from minifloat.report.text import layer_pattern, size_text

#: The line in which the card of `quantize` names the layout; earlier versions wrote it as code.
_LAYOUT_LINE = re.compile(r"^(Elements .*), layout `?[\w-]+`?\.$", re.MULTILINE)
#: What the card of `quantize` says of the files beside it, which a conversion does not take along.
_BESIDE = re.compile(r" minifloat\.json has [^.\n]*\.|^!\[.*\]\(budget\.svg\)\n+", re.MULTILINE)
_MAKER = "minifloat"  #: a tag that stays true after a conversion
_FORMATS = {part for name in SCHEMES for part in (name, name.partition("-")[0])}


def document(report: ConvertReport, *, verbose: bool = False) -> Document:
    """Return a row per tensor, or one for the same tensor of all layers unless `verbose`; then the totals."""
    groups: dict[tuple[str, str, str, str], list[ConvertedTensor]] = {}
    for tensor in report.tensors:
        names = [tensor.name, tensor.becomes or ""]
        if not verbose:
            names = [layer_pattern(name) for name in names]
        groups.setdefault((names[0], names[1], tensor.action, tensor.detail), []).append(tensor)
    rows = [
        [
            name,
            str(len(tensors)),
            "" if becomes == name else becomes,
            detail if action == "converted" else f"{action} ({detail})",
            size_text(sum(tensor.output_bytes for tensor in tensors)),
        ]
        for (name, becomes, action, detail), tensors in groups.items()
    ]
    target = f"layout {report.layout}" if report.layout else report.dtype
    total = (
        f"{report.source_layout} to {target}. {len(report.tensors)} tensors: {report.count('converted')} converted, "
        f"{report.count('copied')} copied, {report.count('dropped')} dropped. "
        f"{size_text(report.source_bytes)} -> {size_text(report.output_bytes)}. {report.seconds:.2f} s."
    )
    words = (Column("becomes", left=True), Column("how", left=True))
    return Document(
        report.destination,
        [
            section(
                "",
                Table(columns("tensor", "count", *words, "bytes"), rows),
                Text(total),
                outcome_lines(report.resumed_shards, report.notes, report.destination),
            ),
            *([verdict_section(report.engines)] if report.engines else []),
        ],
    )


def outcome_lines(resumed_shards: int, notes: tuple[str, ...], destination: str) -> Bullets:
    """Return the resumed shards, the notes and the destination of a checkpoint that was written."""
    resumed = [f"{resumed_shards} shards were taken over from an interrupted run."] if resumed_shards else []
    return Bullets([*resumed, *(f"Note: {note}" for note in notes), f"Written to {destination}"])


def model_card(checkpoint: Checkpoint, report: ConvertReport, engines: Reports) -> str:
    """Return the card as Markdown. Metadata of the source (base_model, licence, ...) stays where it is still true."""
    name, origin = name_of(checkpoint), origin_of(checkpoint.path)
    base = None if origin is None or report.source_layout != gguf.PLAIN else origin.repo_id
    try:
        source_card = read_card(checkpoint.path).decode(errors="replace")
    except FileNotFoundError:
        source_card = f"# {name}\n"
    kept = _with_true_layout(_with_true_metadata(source_card, report.layout, engines, base), report.layout)
    section_text = markdown.write(Document("", [_card_section(name, report)]))
    return "\n".join([kept.rstrip(), "", section_text, deployment_section(engines, MODEL)])


def _card_section(name: str, report: ConvertReport) -> Section:
    if report.layout == gguf.NAME:
        rounded = any("SQNR" in tensor.detail for tensor in report.tensors)
        held = "weights that it has no codes for are rounded" if rounded else "no value was rounded"
        conversion = f"as a GGUF file for llama.cpp, from layout {report.source_layout}; {held}"
    elif report.layout is None:
        conversion = f"dequantized from layout {report.source_layout} to {report.dtype}"
    else:
        precision = "up to the rounding of some scales" if report.rounding.scales else "with the same codes and scales"
        conversion = f"converted from layout {report.source_layout} to {report.layout}, {precision}"
    provenance = report.provenance
    return section(
        "Converted",
        Text(f"This is {name}, {conversion}:"),
        Code(provenance["command"]),
        Text(f"minifloat {provenance['minifloat']}, from tensors with the content hash {provenance['source_digest']}."),
        *map(Text, report.notes),
    )


def _with_true_layout(card: str, layout: str | None) -> str:
    """Return the card without what was true of the source alone, and with the present layout."""
    present = "dequantized since, see below" if layout is None else f"layout {layout}"
    kept = _BESIDE.sub("", without_section(card, DEPLOYMENT))
    return _LAYOUT_LINE.sub(lambda match: f"{match[1]}, {present}.", kept)


def _with_true_metadata(card: str, layout: str | None, engines: Reports, base: str | None) -> str:
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
    if layout == gguf.NAME:  # by these, the hub files it under quantizations of its base, and names programs
        after |= {} if base is None else {"base_model": base, "base_model_relation": "quantized"}
        after |= {"quantized_by": _MAKER, "tags": after.get("tags") or [layout, _MAKER]}
    if "library_name" in after or layout == gguf.NAME:
        after["library_name"] = library_name(engines)
    return card if after == before else replace_metadata(card, after)
