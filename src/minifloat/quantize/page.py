"""What `quantize` or `convert` did, as HTML, from minifloat.json beside the weights.

The file is read as it is: an older file, or one of `convert`, has fewer entries, and shows what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minifloat.quantize.rounding_summary import summary_rows
from minifloat.report.axes import Axis
from minifloat.report.charts import Bar, bar_chart
from minifloat.report.page import bullets, code, facts, figure, folded, paragraph, section, table
from minifloat.report.text import layer_pattern, size_text, visible

_WORST = 10


def done_section(record: Mapping[str, Any]) -> str:
    """Return the section about what was done with every tensor."""
    nbytes = record["bytes"]
    ratio = nbytes["source"] / max(nbytes["output"], 1)
    return section(
        "What was done",
        table(("tensors", "number", "before", "after", "smaller"), done_rows(record)),
        paragraph(
            f"All tensors together: {size_text(nbytes['source'])} became {size_text(nbytes['output'])}, "
            f"{ratio:.2f}x smaller."
        ),
        bullets(done_sentences(record)),
        code(visible(record["provenance"]["command"])),
    )


def done_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each thing that was done with tensors: their number and bytes; the terminal shows the same."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for tensor in record["tensors"]:
        groups.setdefault((tensor["action"], tensor["detail"]), []).append(tensor)
    rows = []
    for (action, detail), tensors in groups.items():
        before, after = (sum(tensor[f"{side}_bytes"] for tensor in tensors) for side in ("source", "output"))
        smaller = f"{before / after:.2f}x" if after and before != after else ""
        name = f"{action} ({detail})" if action != "quantized" else f"quantized to {detail}"
        rows.append([visible(name), f"{len(tensors):,}", size_text(before), size_text(after), smaller])
    order = {"quantized": 0, "converted": 0}
    return sorted(rows, key=lambda row: order.get(row[0].split()[0], 1))


def done_sentences(record: Mapping[str, Any]) -> list[str]:
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
    for label, text in summary_rows(record["rounding"]) if _has_rounding(record) else ():
        sentences.append(f"{label.strip()}: {text}")
    return [visible(text) for text in [*sentences, *record.get("notes", ())]]


def _has_rounding(record: Mapping[str, Any]) -> bool:
    """Return whether the codes were chosen with data; the ``rounding`` of `convert` is about scales."""
    return "weights" in record.get("rounding", {})


def tensor_sections(record: Mapping[str, Any]) -> list[str]:
    """Return the sections with the errors of the weights and the static scales of inputs."""
    return [_errors(record), _scales(record.get("activations", ()))]


def _errors(record: Mapping[str, Any]) -> str:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for tensor in record["tensors"]:
        if tensor.get("stats") is not None:
            kinds.setdefault(layer_pattern(tensor["name"]), []).append(tensor)
    if not kinds:
        return ""
    rows = [[visible(name), *_error_cells(tensors)] for name, tensors in kinds.items()]
    worst = sorted((t for t in record["tensors"] if _sqnr(t) is not None), key=lambda t: _sqnr(t) or 0.0)[:_WORST]
    bars = [Bar(visible(tensor["name"]), _sqnr(tensor) or 0.0, f"{_sqnr(tensor):.2f} dB") for tensor in worst]
    caption = f"The {len(bars)} quantized weights with the lowest SQNR"
    chart = figure(caption, lambda width: bar_chart(bars, title=caption, axis=Axis("dB"), width=width)) if bars else ""
    columns = ("weight", "number", "worst SQNR dB", "saturated", "flushed to zero")
    return section("Error of the weights", table(columns, rows), chart)


def _error_cells(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    sqnr = [value for tensor in tensors if (value := _sqnr(tensor)) is not None]
    elements = sum(tensor["stats"]["elements"] for tensor in tensors)
    shares = [sum(tensor["stats"][name] for tensor in tensors) / max(elements, 1) for name in ("saturated", "flushed")]
    return [
        f"{len(tensors):,}",
        f"{min(sqnr):.2f}" if sqnr else "exact",
        *(f"{share:.2%}" if share else "0" for share in shares),
    ]


def _sqnr(tensor: Mapping[str, Any]) -> float | None:
    """Return the SQNR of a weight in dB; None for a copy, and where the cast was exact."""
    stats = tensor.get("stats")
    return None if stats is None else stats["sqnr_db"]


def _scales(activations: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        [
            visible(entry["module"]),
            f"{entry['scale']:.4g}",
            *("" if entry.get(name) is None else f"{entry[name]:.2%}" for name in ("saturated", "flushed")),
        ]
        for entry in activations
    ]
    if not rows:
        return ""
    columns = ("input of", "scale", "saturated", "flushed to zero")
    saturated = paragraph("Shares are of held-out text, which the scales were not made from.")
    return section("Static scales", saturated, folded(f"All {len(rows)} scales", table(columns, rows)))


def provenance_section(record: Mapping[str, Any]) -> str:
    """Return the section on where the weights come from."""
    provenance = record["provenance"]
    pairs = [(key.replace("_", " "), str(value)) for key, value in provenance.items() if isinstance(value, str | int)]
    return section("Where it comes from", facts([(visible(name), visible(value)) for name, value in pairs]))
