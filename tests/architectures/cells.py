"""The cells of a row: what is done with a small model, and what its numbers must be.

Each function returns an `Outcome`; `row.py` runs them. "Exact" is against the source with the decoded weights.
"""

from __future__ import annotations

import enum
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plain
import torch
from compressed_tensors.quantization import disable_quantization
from decoded import decode_checkpoint, decoded_tensors, read_tensors
from products import InputRecorder, InputRounder, round_static, row_key
from references import Reference, make_reference, slice_of
from small_models import Case
from torch import Tensor, nn

from minifloat import (
    ConvertOptions,
    Engine,
    EngineOptions,
    LoadOptions,
    SamplingParams,
    check_checkpoint,
    convert_checkpoint,
    load,
    plan_model,
)
from minifloat.calibration.calibrate import calibrate_set
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.calibration.stats import ActivationStats
from minifloat.deploy.check import LoadVerdict
from minifloat.engine.sampling import MAX_LOGPROBS, TokenLogprob
from minifloat.engine.sequence import Request
from minifloat.errors import MinifloatError
from minifloat.model.layouts import WRITERS
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.numerics.scheme import get_scheme
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

#: Largest relative error of logits, in float32, where the computation is the same.
EXACT = 2e-5
SCHEMES = ("fp8-block", "mxfp8", "mxfp4", "nvfp4")
STATIC = "fp8-static"
#: Schemes whose weights compressed-tensors decodes to bfloat16.
_DECODED_TO_BFLOAT16 = ("mxfp8", "mxfp4", "nvfp4")
#: Largest error of logits where inputs are rounded: of the flips that `_judge_products` describes.
_FLIPPED = 0.2
#: Largest difference of a log-probability of one of the most probable tokens.
_LOGPROB = 1e-3
#: Tokens of a step of the engine: prompts are computed in several steps.
_STEP_TOKENS = 20
#: Largest share of a model's bytes that the config alone may not tell: the dtype of biases of routers and the like.
_SMALL_PARAMETERS = 1e-4
_TARGET = "transformers:cpu-no-amx"
_OURS = "minifloat:cpu-no-amx"
_SEQUENCES = tuple(tuple((step * index + 11 * step) % 220 + 20 for index in range(64)) for step in (3, 7, 11, 13))


class Status(enum.Enum):
    """How a cell ended; the value is what the page shows."""

    EXACT = "exact"
    WITHIN = "within"
    REFUSED = "refused"
    WRONG = "WRONG"
    LEFT_OUT = "-"


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    status: Status
    detail: str = ""

    @classmethod
    def of_error(cls, error: float, note: str = "") -> Outcome:
        """Return the outcome of a comparison of logits."""
        status = Status.EXACT if error <= EXACT else Status.WRONG
        return cls(status, f"{error:.1e}{note}")

    @classmethod
    def refused(cls, error: Exception) -> Outcome:
        """Return the outcome of a refusal with a reason, or of a crash."""
        text = " ".join(str(error).split())
        if isinstance(error, MinifloatError):
            return cls(Status.REFUSED, text)
        return cls(Status.WRONG, f"{type(error).__name__}: {text}")


@dataclass
class Quantized:
    """A quantized checkpoint of a row, with its reference and the answers that it must give."""

    scheme: str
    folder: Path
    reference: Reference
    model: Any
    logits: Tensor


def stored_source(case: Case, plain_source: Path, work: Path) -> Path:
    """Return the source of a case: the plain checkpoint, or a quantized one that is made of it."""
    if case.stored is None:
        return plain_source
    scheme, layout = case.stored
    stored = work / "stored"
    if layout in WRITERS:
        quantize_checkpoint(plain_source, stored, scheme, QuantizeOptions(layout=layout, workers=1))
        return stored
    quantize_checkpoint(plain_source, work / "to-convert", scheme, QuantizeOptions(workers=1))
    convert_checkpoint(work / "to-convert", stored, layout, ConvertOptions(allow_rounding=True, workers=1))
    return stored


def quantize(case: Case, source: Path, work: Path, scheme: str, **options: Any) -> tuple[Outcome, Quantized | None]:
    """Quantize, and compare every tensor of the output with the source."""
    folder = work / scheme
    try:
        how = QuantizeOptions(workers=1, from_quantized=case.stored is not None)
        quantize_checkpoint(source, folder, scheme, how, **options)
    except Exception as error:
        return Outcome.refused(error), None
    tensors = decoded_tensors(source)
    reference = make_reference(tensors, decode_checkpoint(folder))
    if reference.problems:
        more = f" (and {len(reference.problems) - 1} more)" if len(reference.problems) > 1 else ""
        return Outcome(Status.WRONG, reference.problems[0] + more), None
    model = plain.load_plain(case, reference.write(source, work / f"{scheme}-reference"))
    embedding = model.get_input_embeddings()
    tables = {id(embedding)}
    linears = sum(
        p.numel()
        for m in model.modules()
        if id(m) not in tables
        for p in m._parameters.values()
        if p is not None and p.ndim >= 2
    )
    share = reference.quantized / max(1, linears)
    return Outcome(Status.EXACT, f"{share:.0%}"), Quantized(scheme, folder, reference, model, plain.logits_of(model))


def load_ours(quantized: Quantized) -> Outcome:
    """Load with `minifloat.load`, weight-only, in float32."""
    try:
        model = load(quantized.folder, LoadOptions(dtype=torch.float32, weight_only=True))
        return Outcome.of_error(plain.relative_error(plain.logits_of(model), quantized.logits))
    except Exception as error:
        return Outcome.refused(error)


def dequantize(case: Case, quantized: Quantized, work: Path) -> Outcome:
    """Write decoded weights, and load them with plain transformers."""
    folder = work / f"{quantized.scheme}-plain"
    try:
        convert_checkpoint(
            quantized.folder, folder, options=ConvertOptions(dequantize=True, dtype="float32", workers=1)
        )
    except Exception as error:
        return Outcome.refused(error)
    try:
        logits = plain.logits_of(plain.load_plain(case, folder))
    except Exception as error:
        return Outcome(Status.WRONG, f"transformers: {' '.join(str(error).split())}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome.of_error(plain.relative_error(logits, quantized.logits))


def transformers(case: Case, source: Path, quantized: Quantized) -> tuple[Outcome, Outcome]:
    """Load with plain transformers, and hold the verdict of `check` to its answer; return both outcomes."""
    report = check_checkpoint(quantized.folder, _TARGET)
    promised = not report.failures and report.verdict is not LoadVerdict.UNKNOWN
    reason = f"{report.failures[0].rule}: {report.failures[0].problem}" if report.failures else report.verdict.value
    try:
        logits = _transformers_logits(case, quantized)
        declared = _declared(case, source, quantized)
        error, note = min((plain.relative_error(logits, expected), note) for expected, note in declared)
        right, found = error <= EXACT, f"{error:.1e}{note}"
    except Exception as problem:
        right, found = False, f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    if right:
        verdict = Outcome(Status.EXACT) if promised else Outcome(Status.WITHIN, f"too strict: {reason}")
        return Outcome(Status.EXACT, found), verdict
    if promised:
        return Outcome(Status.WRONG, found), Outcome(Status.WRONG, f"check says {report.verdict.value}; {found}")
    return Outcome(Status.REFUSED, reason), Outcome(Status.EXACT)


def _transformers_logits(case: Case, quantized: Quantized) -> Tensor:
    """Return the answers of plain transformers, with inputs that are not rounded.

    compressed-tensors decodes weights at the first call, and FP4 and MX weights to bfloat16 whatever the model's dtype,
    so that the call fails in a float32 model. The decoded weights are then used in float32. Rounded inputs are left out
    because an input between two codes may round to either, which moves the logits by percents.
    """
    model = plain.load_plain(case, quantized.folder)
    try:
        logits = plain.logits_of(model)
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
    else:
        if get_scheme(quantized.scheme).activation is None:
            return logits
    model.apply(disable_quantization)
    return plain.logits_of(nn.Module.float(model))


def _declared(case: Case, source: Path, quantized: Quantized) -> Iterator[tuple[Tensor, str]]:
    """Yield the right answers, with notes: those of the decoded weights, then of these weights in bfloat16.

    Weights that are not quantized keep their values: some parameters are stored in float32, such as attention sinks.
    """
    yield quantized.logits, ""
    if quantized.scheme in _DECODED_TO_BFLOAT16:
        folder = quantized.reference.rounded().write(source, quantized.folder.parent / f"{quantized.scheme}-rounded")
        yield plain.logits_of(plain.load_plain(case, folder)), ", weights in bfloat16"


def _rounding(quantized: Quantized, rules: dict[str, Any]) -> InputRounder:
    table = {}
    for module, rule in rules.items():
        name, slice_name = quantized.reference.places[module]
        table[row_key(slice_of(quantized.reference.tensors[name], slice_name)[0])] = rule
    return InputRounder(table)


def calibration(case: Case, source: Path, quantized: Quantized | None) -> tuple[Outcome, ActivationStats | None]:
    """Calibrate, and compare the amax of every input with what torch multiplies."""
    try:
        data = CalibrationSet(_SEQUENCES, {"sources": []})
        stats = calibrate_set(
            source, data, CalibrateOptions(dtype=torch.float32, from_quantized=case.stored is not None)
        )
    except Exception as error:
        return Outcome.refused(error), None
    if quantized is None:
        return Outcome(Status.LEFT_OUT, "nothing was quantized, so that it cannot be compared"), stats
    expected = _expected_amax(case, source, quantized)
    fused = {module for module, (_, name) in quantized.reference.places.items() if name in ("whole", "transposed")}
    single = decoded_tensors(source)
    fused = {module for module in fused if f"{module}.weight" not in single}  # statistics are per expert
    missing = [module for module in quantized.reference.places if module not in stats.inputs and module not in fused]
    if missing:
        return Outcome(Status.WRONG, f"{len(missing)} quantized weights have no statistics: {missing[0]}"), stats
    compared = {module: (_observed(stats, module), amax) for module, amax in expected.items()}
    wrong = {m: pair for m, pair in compared.items() if not np.isclose(*pair, rtol=EXACT, atol=0)}
    if wrong:
        module, (found, amax) = next(iter(wrong.items()))
        return Outcome(Status.WRONG, f"{module}: amax {found:.6g}, torch multiplies {amax:.6g}"), stats
    left = len(quantized.reference.places) - len(compared)
    if left:
        module = next(name for name in quantized.reference.places if name not in compared)
        return Outcome(
            Status.WITHIN, f"{left} of {left + len(compared)} weights are not multiplied as such: {module}"
        ), stats
    return Outcome(Status.EXACT), stats


def _observed(stats: ActivationStats, module: str) -> float:
    """Return the amax of a module's input, of fused experts the largest of their single linears."""
    if module in stats.inputs:
        return stats.inputs[module].max
    parent, _, leaf = module.rpartition(".")
    inner = leaf != "down_proj"
    names = [name for name in stats.inputs if name.startswith(f"{parent}.") and name.endswith("down_proj") != inner]
    return max((stats.inputs[name].max for name in names), default=0.0)


def _expected_amax(case: Case, source: Path, quantized: Quantized) -> dict[str, float]:
    """Return the largest input of each quantized module, from the products of plain transformers."""
    tensors = decoded_tensors(source)
    if case.stored is not None:
        source = Reference(tensors).write(source, quantized.folder.parent / "decoded-source")
    model = plain.load_plain(case, source, experts_implementation="eager")
    with torch.no_grad(), InputRecorder() as recorder:
        for ids in _SEQUENCES:
            model(input_ids=torch.tensor([ids]))
    expected = {}
    for module, (name, slice_name) in quantized.reference.places.items():
        keys = {row_key(row) for row in slice_of(tensors[name], slice_name)}
        if keys <= recorder.amax.keys():
            expected[module] = max(recorder.amax[key] for key in keys)
    return expected


def static(case: Case, source: Path, work: Path, stats: ActivationStats | None) -> Outcome:
    """Quantize with static inputs, and compare with the reference whose inputs are rounded under the same scales."""
    if stats is None:
        return Outcome(Status.LEFT_OUT, "calibrate failed")
    made, quantized = quantize(case, source, work, STATIC, calibration=Calibration(stats, parse_rule("max")))
    if quantized is None:
        return made
    scales = decode_checkpoint(quantized.folder).input_scales
    lacking = [module for module in quantized.reference.places if module not in scales]
    if lacking:
        return Outcome(Status.WRONG, f"{len(lacking)} weights have no input_scale: {lacking[0]}")
    with _rounding(quantized, {module: round_static(scale) for module, scale in scales.items()}):
        expected = plain.logits_of(_eager(case, quantized))
    try:
        model = load(quantized.folder, LoadOptions(dtype=torch.float32))
        weight_only = plain.logits_of(load(quantized.folder, LoadOptions(dtype=torch.float32, weight_only=True)))
        with _products_of(model) as calls:
            found = plain.logits_of(model)
    except Exception as error:
        return Outcome.refused(error)
    error = plain.relative_error(weight_only, quantized.logits)
    if error > EXACT:
        return Outcome(Status.WRONG, f"weight-only {error:.1e}")
    return _judge_products(quantized, scales, calls, plain.relative_error(found, expected))


#: A product, as our modules computed it: the decoded weight, the input and the output without bias.
_Call = tuple[Tensor, Tensor, Tensor]


@contextmanager
def _products_of(model: Any) -> Iterator[list[_Call]]:
    """Record the products of quantized weights."""
    calls: list[_Call] = []
    multiply = QuantizedWeight.multiply

    def recording(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = multiply(self, x, bias)
        calls.append((self.weight, x.clone(), y.clone() if bias is None else y - bias))  # models add to both in place
        return y

    QuantizedWeight.multiply = recording  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        QuantizedWeight.multiply = multiply  # type: ignore[method-assign]


def _judge_products(quantized: Quantized, scales: dict[str, float], calls: list[_Call], logits: float) -> Outcome:
    """Compare each product with that of its own input, rounded under the scale of the checkpoint.

    An input that lies in the middle between two codes may round to either after another order of summation; that moves
    the logits by percents, and is no error. The same input of one product rounds to the same code.
    """
    weights = {}
    for module, (name, slice_name) in quantized.reference.places.items():
        weight = slice_of(quantized.reference.tensors[name], slice_name)
        weights[row_key(weight[0])] = (module, weight)
    seen, worst = set(), ("", 0.0)
    for weight, x, y in calls:
        module, expected_weight = weights[row_key(weight[0])]
        expected = round_static(scales[module])(x) @ expected_weight.T
        error = float((y - expected).norm() / expected.norm().clamp(min=1e-30))
        seen.add(module)
        worst = max(worst, (module, error), key=lambda pair: pair[1])
    if worst[1] > EXACT or logits > _FLIPPED:
        return Outcome(Status.WRONG, f"product of {worst[0]}: {worst[1]:.1e}; logits {logits:.1e}")
    left = [module for module in scales if module not in seen]
    note = f"products {worst[1]:.1e}, logits {logits:.1e}"
    if left:
        return Outcome(Status.WITHIN, f"{len(left)} of {len(scales)} weights keep their inputs: {left[0]}; {note}")
    return Outcome(Status.EXACT, note)


def _eager(case: Case, quantized: Quantized) -> Any:
    if hasattr(quantized.model, "set_experts_implementation"):
        quantized.model.set_experts_implementation("eager")
    return quantized.model


def engine(quantized: Quantized) -> Outcome:
    """Generate greedily with the engine; the reference must have its log-probabilities before each token."""
    try:
        engine = Engine(
            quantized.folder,
            EngineOptions(
                dtype="float32",
                lm_head="bf16",
                kv_cache_memory=2**24,
                max_num_seqs=2,
                max_num_batched_tokens=_STEP_TOKENS,
            ),
        )
        found = _generate(engine)
    except Exception as error:
        return Outcome.refused(error)
    texts, worst = [[choice.token for choice in choices] for choices in found], 0.0
    for prompt, (choices, expected) in enumerate(zip(found, plain.logits_before(quantized.model, texts), strict=True)):
        for index, (choice, logprobs) in enumerate(zip(choices, expected.log_softmax(-1), strict=True)):
            worst = max(worst, *(abs(float(logprobs[other.token]) - other.logprob) for other in choice.top))
            if worst > _LOGPROB:
                if texts == _cached(quantized.model):
                    return Outcome(
                        Status.WITHIN,
                        f"{engine.info.runner}, as transformers with its cache, which answers otherwise than without",
                    )
                return Outcome(Status.WRONG, f"prompt {prompt}, token {index}: a log-probability is {worst:.1e} off")
    return Outcome(Status.EXACT, f"{engine.info.runner}, log-probabilities {worst:.1e}")


@torch.no_grad()
def _cached(model: Any) -> list[list[int]]:
    """Return the tokens of transformers' own generation, which keeps states between tokens."""
    options = {"max_new_tokens": plain.NEW_TOKENS, "min_new_tokens": plain.NEW_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in plain.PROMPTS]


def _generate(engine: Engine) -> list[list[TokenLogprob]]:
    """Return the greedy tokens of both prompts, with the log-probabilities of the most probable ones."""
    params = SamplingParams(temperature=0.0, max_tokens=plain.NEW_TOKENS, ignore_eos=True, logprobs=MAX_LOGPROBS)
    tokens: dict[str, list[TokenLogprob]] = {}
    for index, prompt in enumerate(plain.PROMPTS):
        tokens[str(index)] = []
        engine.add(Request(str(index), prompt, params))
    while engine.has_work:
        for delivery in engine.step():
            if delivery.error:
                raise RuntimeError(delivery.error)
            tokens[delivery.request_id] += delivery.logprobs or ()
    return list(tokens.values())


def plan(source: Path, work: Path, made: list[Quantized]) -> tuple[Outcome, Outcome]:
    """Plan with weights and from the config alone; bytes must be those of the files. Return both outcomes."""
    expected = {item.scheme: _tensor_bytes(item.folder) for item in made} | {"bf16": _tensor_bytes(source)}
    bare = work / "config-only"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    return _planned(source, expected), _planned(bare, expected, config_only=True)


def _planned(folder: Path, expected: dict[str, int], *, config_only: bool = False) -> Outcome:
    try:
        schemes = plan_model(folder, "all", "h100").schemes
    except Exception as error:
        return Outcome.refused(error)
    differences = {
        planned.scheme: (planned.weights - expected[planned.scheme]) / expected[planned.scheme]
        for planned in schemes
        if planned.scheme in expected
    }
    scheme, worst = max(differences.items(), key=lambda item: abs(item[1]))
    if not worst:
        return Outcome(Status.EXACT)
    status = Status.WITHIN if config_only and abs(worst) <= _SMALL_PARAMETERS else Status.WRONG
    return Outcome(status, f"{scheme}: {worst:+.1e} of the {expected[scheme]:,} bytes of the files")


def _tensor_bytes(folder: Path) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in read_tensors(folder).values())


def check_ours(quantized: Quantized, outcome: Outcome) -> Outcome:
    """Hold the verdict of `check` on minifloat to what `load` did."""
    report = check_checkpoint(quantized.folder, _OURS)
    promised = not report.failures
    if promised == (outcome.status is Status.EXACT):
        return Outcome(Status.EXACT)
    return Outcome(Status.WRONG, f"check says {report.verdict.value}, load: {outcome.status.value} {outcome.detail}")
