"""The exponents of folded scales beside the results of a layer, so that a later step can fold the original weights.

They are entries of the layer's file that no output has: one per site, int8 ``[K]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.folding import FoldSite, fold_sites
from minifloat.quantize.rounding.fold import apply_exponents
from minifloat.quantize.rounding.rounded_model import RoundedModel

_LAYER = re.compile(r"(.*?\.\d+)\.")


def exponents_name(site: FoldSite) -> str:
    """Return the name of the entry with the exponents of a site."""
    first = site.producers[0]
    return f"fold exponents of {first.tensor}{'' if first.expert is None else f' {first.expert}'}"


def folded_weights(
    config: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    rounded: RoundedModel,
    originals: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors that folds changed, by name, on the CPU, with the folds of the rounded model."""
    folded: dict[str, Tensor] = {}
    prefixes = dict.fromkeys(match[1] for name in infos if (match := _LAYER.match(name)))
    for prefix in prefixes:
        for site in fold_sites(prefix, infos, config):
            if (name := exponents_name(site)) in rounded:
                exponents = torch.from_numpy(rounded.read(name)).view(torch.int8).to(torch.int32)
                tensors = {tensor: folded.get(tensor, originals[tensor]).cpu() for tensor in site.tensors}
                folded |= apply_exponents(site, tensors, exponents)
    return folded
