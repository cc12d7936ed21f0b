"""`quant_method: mxfp4`, the layout of gpt-oss alone: fused experts in MXFP4, everything else in BF16.

``<experts>.gate_up_proj_blocks`` is uint8 ``[E, out, in / 32, 16]``, ``..._scales`` uint8 ``[E, out, in / 32]``. Rows
of gate and up stay interleaved as in the plain model. vLLM runs any other model in this layout unquantized.

Source: openai/gpt-oss checkpoints; transformers' mxfp4 integration; vLLM, `GptOssModel.load_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.errors import ConfigError, ShapeError, UsageError
from minifloat.model.layouts.stored import Description, StoredWeight, stored_spec, tensors_with_suffix
from minifloat.model.layouts.writing import NO_NAMES, WeightTensors, WriteLayout
from minifloat.numerics.formats import E2M1, E8M0
from minifloat.numerics.granularity import GROUP_32
from minifloat.numerics.scheme import KVSpec, Scheme, WeightSpec

NAME = "gpt-oss"
MODEL_TYPE = "gpt_oss"
#: What the official checkpoints list as unquantized; transformers matches these patterns.
_NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class GptOssWriter(WriteLayout):
    """Writer of the fused experts of gpt-oss in MXFP4."""

    cure: ClassVar[str] = "leave --calibration and --kv-cache out: inputs and KV cache stay in 16 bits"

    name: str = NAME
    only_experts_of: ClassVar[str | None] = MODEL_TYPE

    def holds(self, scheme: Scheme) -> bool:
        """Return whether the scheme is MXFP4 with inputs in 16 bits."""
        weight = scheme.weight
        is_mxfp4 = (weight.element, weight.granularity, weight.scale) == (E2M1, GROUP_32, E8M0)
        return is_mxfp4 and scheme.activation is None

    def check(self, scheme: Scheme) -> None:
        if not self.holds(scheme):
            raise UsageError(f"layout {self.name!r} holds mxfp4 only, not {scheme.name!r}: use --scheme mxfp4")

    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        if experts is None:
            raise UsageError(
                f"{module}: layout {self.name!r} holds fused experts only; leave it in 16 bits: remove the override"
            )
        rows, groups = spec.granularity.scale_shape(shape)
        _, group = spec.granularity.block(shape)
        return WeightTensors(
            OutputTensor(f"{module}_blocks", "U8", (experts, rows, groups, group * spec.element.bits // 8)),
            OutputTensor(f"{module}_scales", "U8", (experts, rows, groups)),
        )

    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        self.refuse_kv(kv)
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_CONVERTED)}


WRITER = GptOssWriter()


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a gpt-oss checkpoint: one weight per expert, named ``<experts>.gate_up_proj.<index>``."""
    del config
    _, group = GROUP_32.block((1, 1))
    weights = {}
    for base, blocks in tensors_with_suffix(checkpoint, "_blocks"):
        scales = checkpoint.tensors.get(f"{base}_scales")
        if scales is None:
            raise ConfigError(checkpoint.path / "config.json", f"{blocks.name} has no {base}_scales beside it")
        block_bytes = group * E2M1.bits // 8
        if len(blocks.shape) != 4 or blocks.shape[3] != block_bytes:
            raise ShapeError(
                blocks.name, f"expected [experts, out, in / 32, {block_bytes}], found {list(blocks.shape)}"
            )
        experts, rows, groups, _ = blocks.shape
        shape = (rows, groups * group)
        spec = stored_spec(shape, scales, E2M1, GROUP_32, experts)
        for expert in range(experts):
            module = f"{base}.{expert}"
            weights[module] = StoredWeight(module, spec, shape, blocks.name, scales.name, expert=expert)
    if not weights:
        raise ConfigError(
            checkpoint.path / "config.json",
            "quant_method mxfp4 covers fused experts only, and no *_blocks tensor is stored; "
            "a dense MXFP4 model is saved as compressed-tensors",
        )
    return Description(NAME, weights)
