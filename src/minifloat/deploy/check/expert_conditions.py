"""The conditions of rules about routed experts.

Like `conditions`, each yields the evidence that its rule applies, as lines, and its docstring says what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from minifloat.deploy.check.conditions import named
from minifloat.deploy.check.loading_rule import Case
from minifloat.deploy.check.subject import Weight
from minifloat.model.architecture.transformers_tables import merges_single_experts
from minifloat.model.layouts import compressed_tensors, fp8
from minifloat.numerics.formats import E4M3

#: Value of ``expert_dtype`` for E4M3 in blocks.
_FP8_EXPERTS = "fp8"


def _experts_fused_by_transformers(case: Case) -> Iterator[Weight]:
    """Yield the experts whose weights transformers stacks while it loads them; it keeps those of Llama 4 as linears."""
    experts = case.weights(experts=True) if case.subject.layout == compressed_tensors.NAME else ()
    if experts and not case.subject.family.transformers_splits and transformers_reads_single(case):
        yield from experts


def experts_in_blocks(case: Case) -> Iterator[str]:
    """E4M3 experts whose scales are neither one per tensor nor one per channel."""
    for weight in _experts_fused_by_transformers(case):
        assert weight.spec is not None
        grid = weight.spec.granularity.scale_shape(weight.shape)
        if weight.spec.element is E4M3 and any(n not in (1, size) for n, size in zip(grid, weight.shape, strict=True)):
            yield from named([weight])


def experts_with_global_scale(case: Case) -> Iterator[str]:
    """NVFP4 experts."""
    yield from named(w for w in _experts_fused_by_transformers(case) if w.spec and w.spec.has_global_scale)


def experts_of_several_elements(case: Case) -> Iterator[str]:
    """Experts in several element formats, such as 4 and 8 bits."""
    experts = list(_experts_fused_by_transformers(case))
    if len({weight.spec.element for weight in experts if weight.spec is not None}) > 1:
        yield from named(experts)


def single_experts(case: Case, *, reader: Callable[[Case], bool]) -> Iterator[str]:
    """Single experts of a model that stores experts fused when it is not quantized."""
    experts = [weight for weight in case.weights(experts=True) if case.subject.family.single_expert(weight.module)]
    if experts and not reader(case):
        yield from named(experts)


def unlisted_experts(case: Case) -> Iterator[str]:
    """Fused experts in 16 bits that a config group targets by class, and that the list of exceptions does not have."""
    yield from named(case.subject.unlisted_experts)


def transformers_reads_single(case: Case) -> bool:
    """Return whether transformers makes the experts of a model from single ones."""
    family = case.subject.family
    if family.stored_fused is None:
        return merges_single_experts((case.subject.model_type, case.subject.outer_type))
    splits = family.transformers_splits and case.subject.layout == compressed_tensors.NAME
    return not family.stored_fused or splits


def servers_read_single(case: Case) -> bool:
    """Return whether vLLM makes the experts of a model from single ones."""
    return case.subject.family.servers_read_single


def experts_taken_for_mxfp4(case: Case) -> Iterator[str]:
    """Experts in E4M3, in a model whose config must say so with ``expert_dtype`` and does not."""
    subject = case.subject
    if (
        subject.layout == fp8.NAME
        and subject.family.states_expert_dtype
        and subject.config.get("expert_dtype") != "fp8"
    ):
        experts = (weight for weight in case.weights(experts=True) if weight.spec and weight.spec.element is E4M3)
        yield from named(experts)
