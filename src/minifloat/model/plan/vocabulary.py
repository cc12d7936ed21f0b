"""The embedding and the output layer in a plan: the overrides that quantize them, and what that would save."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from minifloat.errors import UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import role_of
from minifloat.model.plan.overrides import KEEP, Override
from minifloat.model.plan.quantization import EMBEDDING_SCHEME, ModelHeaders
from minifloat.model.plan.tensor_plan import QuantizationPlan, module_name
from minifloat.numerics.scheme import get_scheme
from minifloat.report.text import size_text

#: What options call a format -> its scheme. With inputs in 16 bits, kernels of vLLM fail at an output layer in FP8 (its
#: pull request 48856). minifloat rounds no inputs when it serves.
_HEAD_SCHEMES = {"fp8": "fp8-dynamic", "mxfp8": "mxfp8"}
#: Share of the output from which on a saving is offered.
_WORTH_A_NOTE = 0.1


def vocabulary_overrides(checkpoint: ModelHeaders, lm_head: str, embedding: str) -> Iterator[Override]:
    """Yield the overrides that the options `lm_head` and `embedding` stand for."""
    family = family_of(checkpoint.config)
    modules: dict[Role, list[str]] = {Role.LM_HEAD: [], Role.EMBEDDING: []}
    for info in checkpoint.tensors.values():
        modules.get(role_of(info, family), []).append(module_name(info))
    schemes = {Role.LM_HEAD: _HEAD_SCHEMES.get(lm_head), Role.EMBEDDING: EMBEDDING_SCHEME}
    for role, option, choice in ((Role.LM_HEAD, "lm-head", lm_head), (Role.EMBEDDING, "embedding", embedding)):
        scheme = schemes[role]
        if choice == KEEP or scheme is None:
            continue
        if not modules[role]:
            raise UsageError(
                f"--{option} {choice}: {checkpoint.path} has no {role.value} of its own; an output layer that is tied "
                "to the embedding is quantized with it, by --embedding fp8"
            )
        yield from (Override(f"^{re.escape(module)}$", get_scheme(scheme)) for module in modules[role])


def vocabulary_notes(plan: QuantizationPlan) -> Iterator[str]:
    """Yield a sentence for each embedding and output layer that is kept and takes much of the output."""
    is_tied = all(tensor.role is not Role.LM_HEAD for tensor in plan.tensors)
    total = sum(output.nbytes for tensor in plan.tensors for output in tensor.outputs)
    for tensor in plan.tensors:
        if tensor.role not in (Role.LM_HEAD, Role.EMBEDDING) or tensor.parts or len(tensor.source.shape) < 2:
            continue
        saved = tensor.source.nbytes - math.prod(tensor.source.shape) - 4 * tensor.source.shape[0]
        if saved <= _WORTH_A_NOTE * total:
            continue
        is_head = tensor.role is Role.LM_HEAD
        what = "output layer" if is_head else "embedding, which is the output layer too," if is_tied else "embedding"
        where = "" if is_head else ", and only minifloat serves that"
        yield (
            f"The {what} stays in 16 bits: --{'lm-head' if is_head else 'embedding'} fp8 would save "
            f"{size_text(saved)}, {100 * saved / total:.0f}% of the output{where}; compare says what it costs."
        )
