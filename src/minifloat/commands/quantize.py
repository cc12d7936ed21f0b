"""The command `quantize`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from minifloat.commands.options import (
    COUNT,
    FOLDER,
    MODEL,
    POSITIVE,
    SIZE,
    complete_scheme,
    json_option,
    override_options,
    overrides_of,
    revision_option,
    rule_option,
    show,
    verbose_option,
)
from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.commands.report import draw_report, no_report_option
from minifloat.errors import UsageError
from minifloat.numerics.scheme import DEFAULT_SCHEME, SCHEMES
from minifloat.quantize.options import GgufOptions, QuantizeOptions

if TYPE_CHECKING:
    from minifloat.calibration.result import Calibration
    from minifloat.checkpoint.progress import Progress
    from minifloat.quantize.data import DataOptions
    from minifloat.quantize.options import Budget


def _scheme_help() -> str:
    return "\n".join(["\b", "Schemes:"] + [f"  {scheme.name:<12} {scheme.summary}" for scheme in SCHEMES.values()])


@click.command(cls=GroupedCommand, epilog=_scheme_help())
@click.argument("model", type=MODEL)
@click.argument("out", type=FOLDER)
@revision_option()
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    metavar="NAME",
    help=f"What to quantize to; with a budget the cheapest format.  [default: {DEFAULT_SCHEME}; mxfp4 with a budget]",
)
@override_options()
@click.option("--stats", type=FOLDER, help="Statistics of `calibrate`.")
@click.option("--calibration", "sources", multiple=True, metavar="DATA", help="Calibrate now on this text; repeatable.")
@click.option(
    "--data", multiple=True, metavar="DATA", help="Choose codes with this text, or with text of the model: self."
)
@click.option(
    "--target-bits", type=POSITIVE, metavar="BITS", help="Mix formats within these bits per weight; needs --data."
)
@click.option("--target-bytes", type=SIZE, metavar="SIZE", help="Mix formats within these bytes in all, e.g. 5GB.")
@click.option("--max-kl", type=POSITIVE, metavar="NATS", help="Mix formats within this KL from MODEL on held-out text.")
@click.option("--no-fold", is_flag=True, help="With --data: fold no scales of input channels into norms and linears.")
@click.option(
    "--calibration-samples", type=COUNT, help="Sequences of text.  [default: 512; --data: 284, more for wide linears]"
)
@click.option(
    "--minutes", type=POSITIVE, metavar="M", help="With --data self: as much text as fits in this time, by an estimate."
)
@click.option(
    "--calibration-seq-len", type=click.IntRange(min=2), help="Tokens per sequence.  [default: 512; 256 with --data]"
)
@click.option(
    "--calibration-seed",
    default=0,
    show_default=True,
    type=int,
    help="Seed of the choice of documents and of own text.",
)
@rule_option("How statistics become static scales")
@click.option(
    "--max-saturation",
    type=click.FloatRange(0, 1),
    help="Largest fraction of held-out inputs that may saturate.  [default: no limit]",
)
@click.option("--kv-cache", type=click.Choice(["fp8"]), help="Write calibrated scales of an FP8 KV cache.")
@options_from(
    QuantizeOptions,
    without=("overrides", "budget", "kv_cache", "impl", "revision", "gguf"),
    layout={"metavar": "NAME"},
    method={"metavar": "NAME"},
    target={"metavar": "ENGINE:HARDWARE[:tpN]"},
    base_model={"metavar": "ID"},
)
@options_from(GgufOptions, group="GGUF", prefix="gguf_", pre_tokenizer={"metavar": "NAME"})
@no_report_option()
@click.option("--dry-run", is_flag=True, help="Show what would be written, and which engines load it; write nothing.")
@verbose_option()
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@json_option()
def quantize(**values: Any) -> None:
    """Quantize the checkpoint MODEL, a folder or a model of the hub, into the new folder OUT.

    With --layout gguf, OUT is a file of llama.cpp, or the folder that it is put into.

    Weights are streamed: memory stays small whatever the size of the model. A run that is interrupted, even killed,
    leaves no half-written checkpoint behind; the same command continues it.
    """
    from minifloat.commands.progress import announce, progress_bar
    from minifloat.model.layouts.gguf import NAME as GGUF
    from minifloat.quantize.document import document
    from minifloat.quantize.job import quantize_checkpoint
    from minifloat.quantize.report import data_hint

    params = SimpleNamespace(**values)
    if params.dry_run:
        _preview(params)
        return
    only_casts = not (params.sources or params.data)
    with progress_bar(enabled=not (params.quiet or params.as_json), in_bytes=only_casts) as progress:
        report = quantize_checkpoint(
            params.model,
            params.out,
            params.scheme,
            _options(params, method=None if params.data else params.method),
            calibration=_calibration(params, progress),
            data=_data(params),
            progress=progress,
            announce=None if params.quiet else announce,
        )
    show(report, partial(document, verbose=params.verbose), as_json=params.as_json, quiet=params.quiet)
    if not params.no_report and params.layout != GGUF:
        draw_report(params.out, err=params.as_json, quiet=params.quiet)
    if not (params.as_json or params.quiet) and (hint := data_hint(report)):
        click.echo(hint)


def _preview(params: SimpleNamespace) -> None:
    """Print what would be written; exit with status 2 if disk or memory cannot hold the run."""
    from minifloat.calibration.result import Calibration
    from minifloat.quantize.document import preview_document
    from minifloat.quantize.preview import preview_quantization

    data = _data(params)
    preview = preview_quantization(
        params.model,
        params.out,
        params.scheme,
        _options(params, method=None if params.data else params.method),
        calibration=None
        if params.stats is None
        else Calibration.load(params.stats, params.rule, max_saturation=params.max_saturation),
        calibrates=bool(params.sources or params.data),
        data=data,
    )
    show(preview, partial(preview_document, verbose=params.verbose), as_json=params.as_json, quiet=params.quiet)
    if not preview.can_run:
        sys.exit(2)


def _options(params: SimpleNamespace, method: str | None = None) -> QuantizeOptions:
    return build(
        QuantizeOptions,
        vars(params),
        overrides=overrides_of(params.override, params.exclude),
        method=method,
        budget=_budget(params),
        kv_cache=params.kv_cache is not None,
        gguf=build(GgufOptions, vars(params), "gguf_"),
    )


def _calibration(params: SimpleNamespace, progress: Progress | None) -> Calibration | None:
    """Return the activation statistics to take scales from: those of ``--stats``, or collected now; None: none."""
    if params.stats is None and not params.sources:
        if params.max_saturation is not None:
            raise UsageError("--max-saturation needs --stats or --calibration")
        return None
    if params.stats is not None and params.sources:
        raise UsageError("--stats and --calibration both give activation statistics; give one of them")
    if params.data:
        option = "--calibration" if params.stats is None else "--stats"
        raise UsageError(
            f"{option}: with --data, static scales come from that text, after scales are folded; leave it out"
        )
    from minifloat.calibration.calibrate import calibrate
    from minifloat.calibration.options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, CalibrateOptions
    from minifloat.calibration.own_text import own_text_path
    from minifloat.calibration.result import Calibration
    from minifloat.quantize.own_text import prepare_own_text

    if params.stats is not None:
        return Calibration.load(params.stats, params.rule, max_saturation=params.max_saturation)
    seq_len = params.calibration_seq_len or DEFAULT_SEQ_LEN
    options = CalibrateOptions(
        samples=params.calibration_samples or DEFAULT_SAMPLES,
        seq_len=seq_len,
        seed=params.calibration_seed,
        rule=params.rule,
        max_saturation=params.max_saturation,
        own_text_file=own_text_path(params.model, params.out, seq_len),
        from_quantized=params.from_quantized,
        revision=params.revision,
    )
    prepare_own_text(params.model, params.sources, options, progress)
    return calibrate(params.model, params.sources, options, progress=progress)


def _budget(params: SimpleNamespace) -> Budget | None:
    """Return the budget of ``--target-bits``, ``--target-bytes`` or ``--max-kl``; None without them."""
    if params.target_bits is None and params.target_bytes is None and params.max_kl is None:
        return None
    from minifloat.quantize.options import Budget

    return Budget(bits=params.target_bits, nbytes=params.target_bytes, max_kl=params.max_kl)


def _data(params: SimpleNamespace) -> DataOptions | None:
    """Return the text of ``--data`` and the method; None without text."""
    if params.minutes is not None and not params.data:
        raise UsageError("--minutes needs --data self: without it no text is written")
    if not params.data:
        if params.no_fold:
            raise UsageError("--no-fold needs --data: without it nothing is folded")
        return None
    from minifloat.quantize.data import DataOptions
    from minifloat.quantize.estimate import DEFAULT_TEXT
    from minifloat.quantize.rounding.methods import DEFAULT_METHOD, RoundingOptions, get_method

    text = replace(
        DEFAULT_TEXT,
        samples=params.calibration_samples,
        seq_len=params.calibration_seq_len or DEFAULT_TEXT.seq_len,
        seed=params.calibration_seed,
    )
    method = get_method(params.method or DEFAULT_METHOD)
    rounding = RoundingOptions(method, fold=not params.no_fold, device=params.device)
    return DataOptions(params.data, text, rounding, minutes=params.minutes)
