"""The report of `quantize` on every tensor, which is printed, saved and summed up on the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minifloat.checkpoint.schema import Check, exact_fields, list_of, natural, number, or_null, text
from minifloat.deploy.check.judge import EngineVerdict
from minifloat.kernels.speed import measure_product_rate
from minifloat.model.plan.tensor_plan import Part, QuantizedShare, TensorPlan
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import E2M1
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.estimate import (
    DEFAULT_TEXT,
    FEWEST_SEQUENCES,
    Rates,
    Tokens,
    layers_of,
    rounding_work,
    shapes_of,
    writing_seconds,
)
from minifloat.quantize.nonfinite import Copied, nonfinite_detail
from minifloat.quantize.static_scales import ActivationReport
from minifloat.report.document import ShortReport
from minifloat.report.text import size_text

#: Version of the JSON that `QuantizeReport.to_dict` returns.
SCHEMA_VERSION = 1


#: Says of a weight that its codes are those of a quantized source.
COPIED_CODES = "codes of the source"
#: Says of a copy that it has other values than the source.
CHANGED = "changed by rounding"


def name_of_part(plan: TensorPlan, part: Part) -> str:
    """Return the name of a weight in the report: that of its tensor, or of its module where the tensor is split."""
    return plan.source.name if len(plan.parts) == 1 else part.module


@dataclass(frozen=True)
class TensorReport:
    """One source tensor, or one weight of a tensor that was split."""

    name: str
    action: str
    detail: str
    shape: tuple[int, ...]
    source_bytes: int
    output_bytes: int
    source_digest: str  # content hash of the source's bytes, with its algorithm
    stats: CastStats | None = None  # error of the cast; None for a copy

    @classmethod
    def copied(cls, plan: TensorPlan, source_bytes: int, copied: Copied, *, changed: bool = False) -> TensorReport:
        """Return the report of a tensor that was copied; `changed`: by folded scales."""
        info = plan.source
        output_bytes = sum(tensor.nbytes for tensor in plan.outputs)
        detail = f"{plan.reason}, {CHANGED}" if changed else plan.reason
        if plan.dtype is not None:
            detail += f", dequantized to {plan.dtype}"
        detail += nonfinite_detail(copied.nonfinite)
        return cls(info.name, "copied", detail, info.shape, source_bytes, output_bytes, copied.digest)

    @classmethod
    def quantized(
        cls, plan: TensorPlan, part: Part, source_bytes: int, stats: CastStats, digest: str, *, copied: bool = False
    ) -> TensorReport:
        info = plan.source
        elements = part.shape[0] * part.shape[1]
        share = source_bytes * elements // math.prod(info.shape)
        detail = f"{part.scheme.name}, {COPIED_CODES}" if copied else part.scheme.name
        first = part is plan.parts[0]  # the scales of inputs and KV cache are counted with the first part
        constants = sum(constant.tensor.nbytes for constant in plan.constants) if first else 0
        output_bytes = sum(tensor.nbytes for tensor in part.tensors.all) + constants
        return cls(name_of_part(plan, part), "quantized", detail, part.shape, share, output_bytes, digest, stats)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TensorReport:
        stats = data.get("stats")
        return cls(**{**data, "shape": tuple(data["shape"]), "stats": CastStats(**stats) if stats else None})


#: Check of what `TensorReport.to_dict` returns.
TENSOR_ROW: Check = exact_fields(
    {
        "name": text,
        "action": text,
        "detail": text,
        "shape": list_of(natural),
        "source_bytes": natural,
        "output_bytes": natural,
        "source_digest": text,
        "stats": or_null(
            exact_fields(
                {"elements": natural, "signal": number(0), "noise": number(0), "saturated": natural, "flushed": natural}
            )
        ),
    }
)


class TensorsReport(ShortReport):
    """A report with one row per tensor, each with its action and its bytes in source and output."""

    tensors: Sequence[Any]

    @property
    def source_bytes(self) -> int:
        return sum(tensor.source_bytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        return sum(tensor.output_bytes for tensor in self.tensors)

    def count(self, action: str) -> int:
        """Return how many tensors have an action: ``"copied"``, ``"dropped"``, ``"quantized"``, ``"converted"``."""
        return sum(tensor.action == action for tensor in self.tensors)


@dataclass(frozen=True, repr=False)
class QuantizeReport(TensorsReport):
    """The result of `quantize_checkpoint`.

    Attributes:
        source: Path of the source, as the caller gave it.
        destination: Path of the output.
        recipe: The arguments: scheme, layout, overrides, scale rule.
        provenance: Source, hashes, versions and command.
        tensors: One entry per tensor, in the source's order.
        share: The quantized part of the linear weights, and why the rest is kept.
        engines: Which engines load the output on which machines, by `check`.
        activations: Static scales of inputs and of the KV cache, with their saturation on held-out text.
        notes: Sentences for the user.
        quantized_source: Layout and formats of a source that is quantized itself, as JSON values; None otherwise.
        rounding: Method, text and errors where codes were chosen with data, as JSON values; None without data.
        seconds: Wall time of this run.
        resumed_shards: Shards that an earlier, interrupted run had finished.
    """

    source: str
    destination: str
    recipe: dict[str, Any]
    provenance: dict[str, Any]
    tensors: tuple[TensorReport, ...]
    share: QuantizedShare
    engines: tuple[EngineVerdict, ...] = ()
    activations: tuple[ActivationReport, ...] = ()
    notes: tuple[str, ...] = ()
    quantized_source: dict[str, Any] | None = None
    rounding: dict[str, Any] | None = None
    seconds: float = field(default=0.0, compare=False)
    resumed_shards: int = field(default=0, compare=False)

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        sqnr = self.total.sqnr_db
        return {
            "scheme": str(self.recipe.get("scheme")),
            "tensors": f"{self.count('quantized')} quantized, {self.count('copied')} copied",
            "size": f"{size_text(self.source_bytes)} -> {size_text(self.output_bytes)}",
            "SQNR": f"{sqnr:.1f} dB" if math.isfinite(sqnr) else "exact",
            "written to": self.destination,
        }

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.stats is not None)

    @property
    def total(self) -> CastStats:
        """The error of all casts together."""
        return sum((tensor.stats for tensor in self.tensors if tensor.stats is not None), CastStats())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values that are saved beside the weights; without times, equal runs write equal files."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": self.recipe,
            "provenance": self.provenance,
            "notes": list(self.notes),
            "bytes": {"source": self.source_bytes, "output": self.output_bytes},
            "share": self.share.to_dict(),
            "engines": [verdict.to_dict() for verdict in self.engines],
            "total": asdict(self.total) | {"sqnr_db": finite_or_none(self.total.sqnr_db)},
            "tensors": [_with_sqnr(tensor) for tensor in self.tensors],
            "activations": [asdict(activation) for activation in self.activations],
            **({} if self.quantized_source is None else {"quantized_source": self.quantized_source}),
            **({} if self.rounding is None else {"rounding": self.rounding}),
        }


def _with_sqnr(tensor: TensorReport) -> dict[str, Any]:
    data = asdict(tensor)
    if tensor.stats is not None:
        data["stats"]["sqnr_db"] = finite_or_none(tensor.stats.sqnr_db)
    return data


def finite_or_none(value: float) -> float | None:
    """Return a rounded number, or None for infinity, which JSON lacks: the SQNR of an exact cast is infinite."""
    return round(value, 3) if math.isfinite(value) else None


_MINUTE, _HOUR = 60.0, 3600.0


def data_hint(report: QuantizeReport) -> str:
    """Return a sentence on `--data self`; an empty string if the codes were chosen with data, or have eight bits."""
    weights = [
        tensor
        for tensor in report.quantized
        if tensor.detail in SCHEMES and SCHEMES[tensor.detail].weight.element is E2M1
    ]
    if report.rounding is not None or not weights:
        return ""
    seconds = estimate_seconds([(tensor.name, tensor.shape) for tensor in report.quantized], measure_product_rate())
    return (
        "With --data self the codes are chosen with text that the model writes itself: KL from the original was 0.2 to "
        f"0.5 of this on the models measured so far. It would take about {duration_text(seconds)} here."
    )


def estimate_seconds(weights: Sequence[tuple[str, Sequence[int]]], rate: float) -> float:
    """Return the estimated time of a run with the default text, with usual rates for a rate of products."""
    shapes, rates = shapes_of(weights), Rates.of_product(rate)
    elements = sum(rows * width for rows, width in shapes.values())
    length = DEFAULT_TEXT.seq_len
    writing = writing_seconds(elements, 2.0 * elements, layers_of(shapes), FEWEST_SEQUENCES, length, rates)
    return rounding_work(shapes, {}, Tokens.of(FEWEST_SEQUENCES, DEFAULT_TEXT)).seconds(rates) + writing


def duration_text(seconds: float) -> str:
    """Return a time in minutes or hours, rounded as an estimate is."""
    if seconds < 1.5 * _MINUTE:
        return "a minute"
    if seconds < 1.5 * _HOUR:
        return f"{seconds / _MINUTE:.0f} minutes"
    return f"{seconds / _HOUR:.0f} hours" if seconds >= 10 * _HOUR else f"{seconds / _HOUR:.1f} hours"


#: KL on held-out text over KL on the text of the statistics, above which more text lowers the first by a tenth or more.
_OVERFIT = 1.2
#: Modules that a row names; the rest are counted.
_NAMES_SHOWN = 3


def summary_rows(rounding: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts: method, text, gain on held-out text, folds, and weights that are exceptions."""
    rows = [("method", _method_text(rounding)), ("text", _data_text(rounding)), ("held-out KL", _gain_text(rounding))]
    rows.append(("seen KL", _seen_text(rounding)))
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
    tokens = f"{sources}; {rounding['tokens']:,} tokens for statistics"
    chosen = f"chosen on {rounding['choosing']['tokens']:,}, reported on {found['tokens']:,} that nothing looked at"
    return f"{tokens}, {chosen}"


def _gain_text(rounding: Mapping[str, Any]) -> str:
    """Return the divergence of the method and of rounding to nearest on held-out text."""
    found = rounding["held_out"]
    nearest, method = found["nearest"], found["method"]
    ratio = f" ({method / nearest:.2f}x)" if nearest > 0 else ""
    method_text = _with_error(method, found["method_error"])
    return f"{method_text} nats; rounded to nearest {_with_error(nearest, found['nearest_error'])}{ratio}"


def _seen_text(rounding: Mapping[str, Any]) -> str:
    """Return the divergence on text that codes were chosen with, and how much larger it is on other text."""
    seen, unseen = rounding.get("seen"), rounding["held_out"].get("method")
    if not seen or not unseen or not seen["method"]:
        return ""
    ratio = unseen / seen["method"]
    advice = "; more text would help (--minutes, --calibration-samples)" if ratio > _OVERFIT else ""
    kl = _with_error(seen["method"], seen["method_error"])
    return f"{kl} nats on text of the statistics; held out {ratio:.2f}x{advice}"


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
    text += "; elsewhere that lowers no error" if count < sum("reason" not in row for row in sites) else ""
    return text + (f"; places that allow no folding: {'; '.join(reasons)}" if reasons else "")


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
