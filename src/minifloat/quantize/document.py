"""What `quantize` did or would do, as a document; and the record of it that minifloat.json keeps beside the weights.

A record is read as it is: an older one, or one of `convert`, has fewer entries, and shows what it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minifloat.deploy.check.document import verdict_section
from minifloat.model.plan.share import QuantizedShare
from minifloat.numerics.cast_stats import CastStats
from minifloat.quantize.convert.document import outcome_lines
from minifloat.quantize.preview import QuantizePreview
from minifloat.quantize.report import QuantizeReport
from minifloat.quantize.rounding_summary import summary_rows
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
from minifloat.report.text import fraction, layer_pattern, shape_text, size_text, times

#: The chart of a budget, a file beside the weights.
BUDGET_CHART = "budget.svg"
_WORST = 10

Record = Mapping[str, Any]


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
            section("", Text(f"Disk: {size_text(preview.disk_free)} free, {room}. Nothing was written (--dry-run).")),
        ],
    )


def _sizes(before: int, after: int) -> str:
    return f"{size_text(before)} -> {size_text(after)} ({times(before / max(after, 1))} smaller)."


def _share_text(share: QuantizedShare) -> str:
    """Say how much of the linear weights is quantized, and what the rest is."""
    reasons = ", ".join(f"{group.reason} {size_text(group.nbytes)}" for group in share.kept)
    return f"{share}; kept: {reasons}." if reasons else f"{share}."


# ------------------------------------------------------------------------------------------------- tensors


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


def worst_table(record: Record) -> Table:
    """Return the weights with the lowest SQNR, lowest first."""
    rows = [
        [
            tensor.name,
            "x".join(map(str, tensor.shape)),
            f"{stats.sqnr_db:.2f}",
            f"{stats.saturated_fraction:.2e}",
            f"{stats.flushed_fraction:.2e}",
        ]
        for tensor, stats in _worst_tensors(record)
    ]
    return Table(columns("weight", "shape", "SQNR dB", "saturated", "flushed to zero"), rows)


def _worst_tensors(record: Record) -> list[tuple[_Tensor, CastStats]]:
    found = [(tensor, tensor.stats) for tensor in _tensors(record) if tensor.stats is not None]
    return sorted(found, key=lambda pair: pair[1].sqnr_db)[:_WORST]


# ------------------------------------------------------------------------------------------------- from the record


def done_section(record: Record) -> Section:
    """Return what was done with the tensors, for the report beside a checkpoint."""
    nbytes = record["bytes"]
    return section(
        "What was done",
        done_table(record),
        Text(f"All tensors together: {_sizes(nbytes['source'], nbytes['output'])}", on=On.PAGE),
        Bullets(_done_sentences(record)),
        Code(record["provenance"]["command"], on=On.PAGE),
    )


def done_table(record: Record) -> Table:
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
    sentences += [f"{label.strip()}: {text}" for label, text in _rounding_rows(record)]
    return [*sentences, *record.get("notes", ())]


def _rounding_rows(record: Record) -> list[tuple[str, str]]:
    """Return what is said of codes that were chosen with data; the ``rounding`` of `convert` is about scales."""
    return summary_rows(record["rounding"]) if "weights" in record.get("rounding", {}) else []


def _rounding_section(record: Record, *, verbose: bool) -> Section:
    rows = _rounding_rows(record)
    blocks = [Facts(rows), *([_weight_table(record["rounding"])] if verbose else [])] if rows else []
    return section("", *blocks)


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
    """Return the sections of the page with the errors of weights, static scales and the origin."""
    quantized = [tensor for tensor in _tensors(record) if tensor.stats is not None]
    bars = [Bar(t.name, stats.sqnr_db, f"{stats.sqnr_db:.2f} dB") for t, stats in _worst_tensors(record) if stats.noise]
    chart = Figure(f"The {len(bars)} quantized weights with the lowest SQNR", Bars(bars, Axis("dB")))
    scales = _scale_table(record, verbose=True) if record.get("activations") else None
    origin = [(key.replace("_", " "), str(v)) for key, v in record["provenance"].items() if isinstance(v, str | int)]
    return [
        section(
            "Error of the weights",
            *([_tensor_table(quantized, verbose=False)] if quantized else []),
            chart if bars else None,
            on=On.PAGE,
        ),
        section(
            "Static scales",
            *([Text("Shares are of held-out text, which the scales were not made from.")] if scales else []),
            Folded(f"All {len(scales.rows)} scales", [scales]) if scales else None,
            on=On.PAGE,
        ),
        section("Where it comes from", Facts(origin), on=On.PAGE),
    ]


def budget_section(record: Record) -> Section:
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
            "Run 1 has the cheapest format everywhere; minifloat.json has the damage of each group."
        ),
        on=On.PAGE | On.CARD,
    )


def card_rounding_section(record: Record) -> Section:
    """Return how codes were chosen with data, for the card; empty without data."""
    rows = [(label.strip(), text) for label, text in _rounding_rows(record)]
    if not rows:
        return section("")
    folded = any(row["folded"] for row in record["rounding"]["folds"])
    return section(
        "Rounding",
        Text(
            "The codes were chosen with calibration text. KL is the divergence from the original model in nats per "
            "token, on a part of the text that is in no statistic."
        ),
        Facts(rows),
        Text(
            "Before that, powers of two that scale the input channels of some linears were folded into the norms and "
            "weights in front of them. The function of the unquantized model is unchanged. Norms and weights differ "
            "from the original's; the errors below are those of the codes against the folded weights."
            if folded
            else ""
        ),
        Text('The command under "Made with" repeats the run; minifloat.json has each weight under "rounding".'),
    )
