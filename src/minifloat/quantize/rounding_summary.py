"""What the report of a run with data says in a few lines; the terminal and the model card print the same lines.

Everything is read from `QuantizeReport.rounding`, the section ``rounding`` of minifloat.json; no torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Modules that a row names; the rest are counted.
_NAMES_SHOWN = 3


def summary_rows(rounding: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts: method, text, gain on held-out text, folds, and weights that are exceptions."""
    rows = [("method", _method_text(rounding)), ("text", _data_text(rounding)), ("held-out KL", _gain_text(rounding))]
    rows += [(f"  {row['name']}", _source_text(row)) for row in rounding["held_out"].get("by_source", ())]
    rows.append(("folded", fold_text(rounding)))
    rows += _exceptions(rounding)
    return [(label, text) for label, text in rows if text]


def _method_text(rounding: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for row in rounding["weights"]:
        counts[row["method"]] = counts.get(row["method"], 0) + 1
    return ", ".join(f"{name} for {count} weights" for name, count in counts.items())


def _data_text(rounding: Mapping[str, Any]) -> str:
    """Return the sources with their tokens, and how much of the text was held out."""
    data, found = rounding["data"], rounding["held_out"]
    sources = ", ".join(f"{source['name']} ({source['tokens']:,} tokens)" for source in data.get("sources", ()))
    held_out = f"{found['tokens']:,} held out" if found else "run before, from stored Hessians"
    return f"{sources}; {rounding['tokens']:,} tokens for statistics, {held_out}"


def _gain_text(rounding: Mapping[str, Any]) -> str:
    """Return the divergence of the method and of rounding to nearest on held-out text."""
    found = rounding["held_out"]
    if not found:
        return "not measured: the codes come from stored Hessians, without text"
    nearest, method = found["nearest"], found["method"]
    ratio = f" ({method / nearest:.2f}x)" if nearest > 0 else ""
    method_text = _with_error(method, found["method_error"])
    return f"{method_text} nats; rounded to nearest {_with_error(nearest, found['nearest_error'])}{ratio}"


def _source_text(row: Mapping[str, Any]) -> str:
    return (
        f"{row['method']:.4f} nats; rounded to nearest {row['nearest']:.4f} ({row['sequences']} sequences, "
        f"{row['tokens']:,} tokens)"
    )


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} +- {error:.4f}"


def fold_text(rounding: Mapping[str, Any]) -> str:
    """Return how many sites scales were folded at; an empty string if folding was switched off."""
    if not rounding["fold"]:
        return ""
    sites = [row for row in rounding["folds"] if "site" in row]
    reasons = list(dict.fromkeys(row["reason"] for row in rounding["folds"] if row.get("reason")))
    count = sum(row["folded"] for row in sites)
    text = f"scales of input channels at {count} of {len(sites)} places"
    text += "; elsewhere that lowers no error" if count < len(sites) else ""
    return text + (f"; layers that allow no folding: {'; '.join(reasons)}" if reasons else "")


def _exceptions(rounding: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows for the weights that kept nearest, experts with few tokens, damping, and inputs that are zero."""
    weights = rounding["weights"]
    kept = [row["module"] for row in weights if row["method"] != rounding["method"]]
    few = [row["module"] for row in weights if row.get("hessian_share", 1.0) < 1.0]
    damped = {row["module"]: row["damping"] for row in weights if "damping" in row}
    dead = {row["module"]: row["dead_columns"] for row in weights if "dead_columns" in row}
    rows = []
    if kept:
        rows.append(("kept nearest", f"{_names(kept)}: the method loses more on held-out text"))
    if few:
        rows.append(
            ("few tokens", f"{_names(few)}: fewer tokens than inputs; the Hessian is partly that of all experts")
        )
    if damped:
        rows.append(("damping", f"{_names(list(damped))}: up to {max(damped.values()):.3g} of the mean diagonal"))
    if dead:
        rows.append(
            ("no input", f"{_names(list(dead))}: up to {max(dead.values()):,} columns that the text never used")
        )
    return rows


def _names(modules: list[str]) -> str:
    """Return the number of some modules and the names of the first ones."""
    shown = ", ".join(modules[:_NAMES_SHOWN])
    return f"{len(modules)} ({shown}{', ...' if len(modules) > _NAMES_SHOWN else ''})"
