"""What `quantize` did or would do; the record of it that minifloat.json keeps beside the weights; and the model card.

A record is read as it is: an older one, or one of `convert`, has fewer entries, and shows what it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_name, origin_of
from minifloat.deploy.check.document import MODEL, deployment_section, verdict_section
from minifloat.deploy.check.judge import Reports, engine_tags, library_name
from minifloat.model.plan.tensor_plan import QuantizedShare
from minifloat.numerics.cast_stats import CastStats
from minifloat.quantize.convert.document import outcome_lines
from minifloat.quantize.preview import QuantizePreview
from minifloat.quantize.report import QuantizeReport, summary_rows
from minifloat.report import markdown
from minifloat.report.document import (
    Axis,
    Bar,
    Bars,
    Bullets,
    Code,
    Column,
    Document,
    Facts,
    Figure,
    Folded,
    On,
    Section,
    Table,
    Text,
    columns,
    section,
)
from minifloat.report.markdown import metadata_head, read_card, read_metadata
from minifloat.report.text import fraction, layer_pattern, shape_text, size_text, times

#: The chart of a budget, a file beside the weights.
BUDGET_CHART = "budget.svg"
_WORST = 10
_CARRIED_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag")

Record = Mapping[str, Any]
_WRITTEN = On.PAGE | On.CARD


def document(report: QuantizeReport, *, verbose: bool = False) -> Document:
    """Return a row per tensor, or one for the same tensor of all layers unless `verbose`; then the totals."""
    record = report.to_dict()
    dropped = f", {report.count('dropped')} dropped" if report.count("dropped") else ""
    total = (
        f"{len(report.tensors)} tensors: {len(report.quantized)} quantized, {report.count('copied')} copied{dropped}. "
        f"{_sizes(report.source_bytes, report.output_bytes)} SQNR {report.total.sqnr_db:.2f} dB. "
        f"{report.seconds:.2f} s."
    )
    return Document(
        report.destination,
        [
            section("", _tensor_table(_tensors(record), verbose=verbose)),
            section("", _scale_table(record, verbose=verbose) if report.activations else None),
            _rounding_section(record, verbose=verbose),
            section(
                "",
                Text(total),
                Text(_share_text(report.share)),
                outcome_lines(report.resumed_shards, report.notes, report.destination),
            ),
            verdict_section(report.engines),
        ],
    )


def preview_document(preview: QuantizePreview, *, verbose: bool = False) -> Document:
    """Return a row per tensor, or one for the same tensor of all layers unless `verbose`; then totals and verdicts."""
    tensors = [
        _Tensor(tensor.name, becomes, tensor.shape, tensor.output_bytes)
        for tensor in preview.tensors
        for becomes in [tensor.becomes if tensor.quantized else f"copied ({tensor.becomes})"]
    ]
    room = "enough" if preview.fits_on_disk else f"too little: {size_text(preview.output_bytes)} are needed"
    total = (
        f"{len(tensors)} tensors: {sum(tensor.quantized for tensor in preview.tensors)} to quantize in "
        f"{preview.layout}. {_sizes(preview.source_bytes, preview.output_bytes)}"
    )
    return Document(
        preview.destination,
        [
            section(
                "",
                _tensor_table(tensors, verbose=verbose),
                Text(total),
                Text(_share_text(preview.share)),
                Bullets([f"Note: {note}" for note in preview.notes]),
            ),
            verdict_section(preview.engines),
            section("", *_cost_blocks(preview)),
            section("", Text(f"Disk: {size_text(preview.disk_free)} free, {room}. Nothing was written (--dry-run).")),
        ],
    )


def _cost_blocks(preview: QuantizePreview) -> list[Text | Bullets]:
    """Return what choosing codes with text takes, and why this machine cannot do it."""
    cost = preview.cost
    return [] if cost is None else [Text(cost.text()), Bullets([f"Refused: {each}." for each in cost.problems()])]


def _sizes(before: int, after: int) -> str:
    return f"{size_text(before)} -> {size_text(after)} ({times(before / max(after, 1))} smaller)."


def _share_text(share: QuantizedShare) -> str:
    """Say how much of the linear weights is quantized, and what the rest is."""
    reasons = ", ".join(f"{group.reason} {size_text(group.nbytes)}" for group in share.kept)
    return f"{share}; kept: {reasons}." if reasons else f"{share}."


class _Tensor(NamedTuple):
    name: str
    becomes: str
    shape: tuple[int, ...]
    nbytes: int
    stats: CastStats | None = None


def _tensors(record: Record) -> list[_Tensor]:
    return [
        _Tensor(
            entry["name"],
            entry["detail"] if entry["action"] == "quantized" else f"{entry['action']} ({entry['detail']})",
            tuple(entry.get("shape", ())),
            entry["output_bytes"],
            _stats(entry),
        )
        for entry in record["tensors"]
    ]


def _stats(entry: Record) -> CastStats | None:
    """Return the error of a cast; None for a copy."""
    values = entry.get("stats")
    return CastStats(**{name: values[name] for name in CastStats.__dataclass_fields__}) if values else None


def _tensor_table(tensors: Sequence[_Tensor], *, verbose: bool) -> Table:
    """Return a row per tensor, or per group of tensors that differ in their layer only, with the errors of casts."""
    groups: dict[tuple[str, str], list[_Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.name if verbose else layer_pattern(tensor.name), tensor.becomes), []).append(tensor)
    errors = ("SQNR dB", "worst dB", "saturated", "flushed") if any(tensor.stats for tensor in tensors) else ()
    rows = [
        [
            name,
            str(len(group)),
            shape_text({tensor.shape for tensor in group}),
            becomes,
            size_text(sum(tensor.nbytes for tensor in group)),
            *(_error_cells(group) if errors else ()),
        ]
        for (name, becomes), group in groups.items()
    ]
    words = (Column("shape", left=True), Column("becomes", left=True))
    return Table(columns("tensor", "count", *words, "bytes", *errors), rows)


def _error_cells(group: Sequence[_Tensor]) -> tuple[str, str, str, str]:
    stats = [tensor.stats for tensor in group if tensor.stats is not None]
    if not stats:
        return ("", "", "", "")
    total = sum(stats[1:], stats[0])
    worst = min(errors.sqnr_db for errors in stats)
    lost = (fraction(total.saturated_fraction), fraction(total.flushed_fraction))
    return (f"{total.sqnr_db:.2f}", f"{worst:.2f}", *lost)


def _scale_table(record: Record, *, verbose: bool) -> Table:
    """Return a table of static scales, with the worst saturation and flushing on held-out text in each group."""
    groups: dict[str, list[Record]] = {}
    for entry in record["activations"]:
        groups.setdefault(entry["module"] if verbose else layer_pattern(entry["module"]), []).append(entry)
    rows = []
    for name, members in groups.items():
        scales = [member["scale"] for member in members]
        tokens = [member["tokens"] for member in members if member.get("tokens") is not None]
        rows.append(
            [
                name,
                str(len(members)),
                f"{min(tokens):,}" if tokens else "",
                f"{min(scales):.4g}",
                f"{max(scales):.4g}",
                *(_worst_fraction(members, key) for key in ("saturated", "flushed")),
            ]
        )
    names = ("static scale of", "count", "tokens", "smallest scale", "largest scale", "saturated", "flushed")
    return Table(columns(*names), rows)


def _worst_fraction(members: Sequence[Record], key: str) -> str:
    return fraction(max((member[key] for member in members if member.get(key) is not None), default=None))


def _worst(record: Record) -> list[tuple[_Tensor, CastStats]]:
    """Return the weights with the lowest SQNR, lowest first."""
    found = [(tensor, tensor.stats) for tensor in _tensors(record) if tensor.stats is not None]
    return sorted(found, key=lambda pair: pair[1].sqnr_db)[:_WORST]


def done_section(record: Record) -> Section:
    nbytes, recipe = record["bytes"], record.get("recipe", {})
    lines = [f"All tensors together: {_sizes(nbytes['source'], nbytes['output'])}"]
    if "element" in recipe:
        lines += [
            f"Elements {recipe['element']}, scales {recipe['scale']} per {recipe['granularity']}, "
            f"rule {recipe['scale_rule']}, layout {recipe['layout']}.",
            f"Inputs of the linears: {' and '.join(recipe['inputs']) or 'in 16 bits'}.",
        ]
    return section(
        "What was done",
        *(Text(line, on=_WRITTEN) for line in lines),
        _done_table(record),
        Bullets(_done_sentences(record)),
        Bullets([f"{label.strip()}: {text}" for label, text in _rounding_rows(record)], on=On.TERMINAL),
    )


def _done_table(record: Record) -> Table:
    """Return a row for each thing that was done with tensors: their number and bytes."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for tensor in record["tensors"]:
        groups.setdefault((tensor["action"], tensor["detail"]), []).append(tensor)
    rows = []
    for (action, detail), tensors in groups.items():
        before, after = (sum(tensor[f"{side}_bytes"] for tensor in tensors) for side in ("source", "output"))
        name = f"{action} ({detail})" if action != "quantized" else f"quantized to {detail}"
        smaller = times(before / after) if after and before != after else ""
        rows.append([name, f"{len(tensors):,}", size_text(before), size_text(after), smaller])
    rows.sort(key=lambda row: row[0].split()[0] not in {"quantized", "converted"})
    return Table(columns("what was done", "tensors", "before", "after", "smaller"), rows)


def _done_sentences(record: Record) -> list[str]:
    """Return the sentences about the run: how much was quantized, its error, and the notes of the command."""
    sentences = []
    share, total = record.get("share"), record.get("total")
    if share is not None and share["total"]:
        sentences.append(f"{share['quantized'] / share['total']:.1%} of the linear weights are quantized.")
        sentences += [f"Kept: {kept['reason']}, {size_text(kept['bytes'])}." for kept in share["kept"]]
    if total is not None and total["sqnr_db"] is not None:
        sentences.append(
            f"The error of the quantized weights: SQNR {total['sqnr_db']:.2f} dB. It is not the error of the model."
        )
    return [*sentences, *record.get("notes", ())]


def _rounding_rows(record: Record) -> list[tuple[str, str]]:
    """Return what is said of codes that were chosen with data; the ``rounding`` of `convert` is about scales."""
    return summary_rows(record["rounding"]) if "weights" in record.get("rounding", {}) else []


def _rounding_section(record: Record, *, verbose: bool = False) -> Section:
    """Return how codes were chosen with data; empty without data."""
    rows = _rounding_rows(record)
    if not rows:
        return section("")
    rounding = record["rounding"]
    weights = _weight_table(rounding)
    folded = (
        "Before that, factors that scale the input channels of some linears were folded into the norms and weights in "
        "front of them: powers of two, which change no result, and in FP8 whose scales are powers of two "
        "other factors of single channels, by which weights are rounded once more. Norms and weights differ from the "
        "original's; the errors below are those of the codes against the folded weights."
    )
    return section(
        "Rounding",
        Text(
            "The codes were chosen with calibration text. KL is the divergence from the original model in nats per "
            "token, on a part of the text that is in no statistic.",
            on=_WRITTEN,
        ),
        Facts(rows),
        Text(folded if any(row["folded"] for row in rounding["folds"]) else "", on=_WRITTEN),
        Text(
            'The command under "Made with" repeats the run. minifloat.json has each weight under "rounding".',
            on=On.CARD,
        ),
        Folded(f"All {len(weights.rows)} weights", [weights], on=On.PAGE | On.TERMINAL if verbose else On.PAGE),
    )


def _weight_table(rounding: Record) -> Table:
    """Return a table of the relative squared errors of outputs on held-out text."""
    rows = [
        [
            row["module"],
            row["method"],
            f"{row['tokens']:,}" if "tokens" in row else "",
            *(_figure(row, key, "{:.3e}") for key in ("nearest_error", "method_error")),
            _figure(row, "drift_factor", "{:.2f}"),
            _figure(row, "damping", "{:.3g}"),
        ]
        for row in rounding["weights"]
    ]
    names = ("tokens", "error nearest", "error method", "drift", "damping")
    return Table(columns("weight", Column("codes by", left=True), *names), rows)


def _figure(row: Record, key: str, form: str) -> str:
    return form.format(row[key]) if row.get(key) is not None else ""


def detail_sections(record: Record) -> list[Section]:
    """Return how the output was made, and the errors of its weights, for page and model card."""
    pairs = [(key.replace("_", " "), str(value)) for key, value in record["provenance"].items()]
    return [
        section("Made with", Code(record["provenance"]["command"]), Facts(pairs), on=_WRITTEN),
        _budget_section(record),
        _rounding_section(record),
        _error_section(record),
        _scale_section(record),
    ]


def _error_section(record: Record) -> Section:
    quantized = [tensor for tensor in _tensors(record) if tensor.stats is not None]
    if not quantized:
        return section("")
    total, worst = sum((tensor.stats for tensor in quantized if tensor.stats), CastStats()), _worst(record)
    bars = [Bar(tensor.name, stats.sqnr_db, f"{stats.sqnr_db:.2f} dB") for tensor, stats in worst if stats.noise]
    rows = [
        [
            tensor.name,
            shape_text({tensor.shape}),
            f"{stats.sqnr_db:.2f}",
            f"{stats.saturated_fraction:.2e}",
            f"{stats.flushed_fraction:.2e}",
        ]
        for tensor, stats in worst
    ]
    caption = f"The {len(worst)} quantized weights with the lowest SQNR"
    return section(
        "Error of the weights",
        Text(
            f"All quantized weights together: SQNR {total.sqnr_db:.2f} dB, {total.saturated_fraction:.2e} saturated, "
            f"{total.flushed_fraction:.2e} flushed to zero. minifloat.json has every tensor. The error of the weights "
            "is not the error of the model, which minifloat compare measures."
        ),
        Figure(caption, Bars(bars, Axis("dB"))) if bars else None,
        Folded("All of them", [_tensor_table(quantized, verbose=False)], on=On.PAGE),
        Table(columns("weight", "shape", "SQNR dB", "saturated", "flushed to zero"), rows, f"{caption}:", on=On.CARD),
        on=_WRITTEN,
    )


def _scale_section(record: Record) -> Section:
    if not record.get("activations"):
        return section("")
    table = _scale_table(record, verbose=True)
    return section(
        "Static scales",
        Text("Shares are of held-out text, which the scales were not made from."),
        Folded(f"All {len(table.rows)} scales", [table]),
        on=On.PAGE,
    )


def _budget_section(record: Record) -> Section:
    """Return what a budget chose: bits, KL divergence, formats; empty where none was given."""
    budget = (record.get("rounding") or {}).get("budget")
    if budget is None:
        return section("")
    formats = Counter(group["format"] for group in budget["groups"])
    rows = [
        [str(number), f"{run['bits']:.3f}", f"{run['predicted']:.4f}", f"{run['kl']:.4f}"]
        for number, run in enumerate(budget["measured"], 1)
    ]
    return section(
        "Formats within the budget",
        Figure("KL divergence against bits per weight", BUDGET_CHART, on=On.CARD),
        Table(columns("run", "bits per weight", "KL predicted", "KL measured"), rows),
        Text(
            f"Groups of weights by format: {', '.join(f'{name} {count}' for name, count in formats.most_common())}. "
            "minifloat.json has the damage of each group."
        ),
        on=_WRITTEN,
    )


def model_card(checkpoint: Checkpoint, report: QuantizeReport, engines: Reports, base_model: str | None = None) -> str:
    """Return the card (README.md) with its metadata; `compare` and `bench` insert sections of their own later."""
    origin = origin_of(checkpoint.path)
    base = base_model or (None if origin is None else origin.repo_id)
    title = f"{base or model_name(checkpoint.path)}, {report.recipe['scheme']}"
    record = report.to_dict()
    return "\n".join(
        [
            metadata_head(_metadata(checkpoint, report.recipe, base, engines)),
            f"# {markdown.escape(title)}\n",
            markdown.write(Document(title, [done_section(record)])),
            deployment_section(engines, MODEL),
            markdown.write(Document(title, detail_sections(record))),
        ]
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
