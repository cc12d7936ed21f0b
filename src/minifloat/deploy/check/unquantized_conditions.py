"""The conditions of rules about linears that an engine builds without quantization, so that codes have no place.

Like `conditions`, each yields the evidence that its rule applies, as lines, and its docstring says what it finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from minifloat.checkpoint import TensorInfo
from minifloat.deploy.check.conditions import named
from minifloat.deploy.check.loading_rule import Case
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.mtp import is_mtp
from minifloat.model.architecture.roles import role_of
from minifloat.numerics.formats import E4M3

_INDEXER, _KEYS = ".indexer.", "wk"
_SCORES = "weights_proj"
_SELECTIVE_INPUT = "x_proj"
_SELECTIVE = ("in_proj", _SELECTIVE_INPUT, "dt_proj", "out_proj")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def indexer(case: Case) -> Iterator[str]:
    """The indexer of sparse attention: its scores in any format, its keys in other codes than E4M3."""
    for weight in case.subject.quantized:
        if _INDEXER not in weight.module or weight.spec is None:
            continue
        if weight.leaf == _SCORES or (weight.leaf == _KEYS and weight.spec.element is not E4M3):
            yield from named([weight])


def indexer_scores(case: Case) -> Iterator[str]:
    """The scores of the indexer of sparse attention."""
    yield from named(w for w in case.subject.quantized if _INDEXER in w.module and w.leaf == _SCORES)


def draft_projection(case: Case, *, leaves: Collection[str], except_types: Collection[str] = ()) -> Iterator[str]:
    """The projection of embedding and hidden state in layers of multi-token prediction."""
    if case.subject.model_type not in except_types:
        yield from named(
            weight
            for weight in case.subject.quantized
            if weight.leaf in leaves and is_mtp(weight.module, case.subject.config)
        )


def selective_state_space(case: Case) -> Iterator[str]:
    """Projections of Mamba layers of the first kind, which have an `x_proj`."""
    mixers = {w.module.rpartition(".")[0] for w in case.subject.weights if w.leaf == _SELECTIVE_INPUT}
    yield from named(
        weight
        for weight in case.subject.quantized
        if weight.leaf in _SELECTIVE and weight.module.rpartition(".")[0] in mixers
    )


def routers(case: Case, *, except_types: Collection[str]) -> Iterator[str]:
    """Routers of mixtures and gates of shared experts."""
    for weight in case.subject.quantized:
        info = TensorInfo(f"{weight.module}.weight", "BF16", weight.shape, "", 0, 0)
        if role_of(info, case.subject.family) is not Role.ROUTER:
            continue
        if weight.leaf != "gate" or case.subject.model_type not in except_types:
            yield from named([weight])


def attention_of(case: Case, *, model_types: Collection[str]) -> Iterator[str]:
    """Projections of attention in models of these types."""
    if case.subject.model_type in model_types:
        yield from named(weight for weight in case.subject.quantized if weight.leaf in _ATTENTION)
