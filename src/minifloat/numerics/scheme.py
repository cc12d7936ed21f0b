"""Schemes: the formats of a quantized model's weights, activations and KV cache, as rows of `SCHEMES`."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from minifloat.errors import lookup
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, GROUP_128, TENSOR, TOKEN, Granularity

#: Key of the rule of scales in the header of each file of weights.
SCALE_RULE = "scale_rule"


class ScaleRule(enum.Enum):
    """Rule by which the scale of a block is computed from its amax."""

    AMAX = "amax"  #: amax / element.max, rounded to the scale's format
    FLOOR = "floor"  #: 2**(floor(log2 amax) - emax); OCP MX specification 1.0, section 6.3
    EVEN = "even"  #: FLOOR, plus one if the mantissa of amax rounds up to the next power of two
    RCEIL = "rceil"  #: 2**ceil(log2(amax / max)): nothing is clipped
    SEARCH = "search"  #: the code near FLOOR (E8M0) or AMAX (E4M3) with the smallest squared error in its block


@dataclass(frozen=True)
class WeightSpec:
    """Storage format of a weight matrix."""

    element: ElementFormat
    granularity: Granularity
    scale: ElementFormat = FLOAT32
    rule: ScaleRule = ScaleRule.AMAX
    #: Whether the global scale is chosen for the tensor; False: it is 1, for a layout without global scales.
    scaled_globally: bool = True

    @property
    def has_global_scale(self) -> bool:
        """Whether one float32 scale per tensor multiplies the block scales (NVFP4)."""
        return self.scale is E4M3

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether the amax of the whole tensor is needed before its first block can be cast."""
        return (self.has_global_scale and self.scaled_globally) or self.granularity == TENSOR

    def divides(self, shape: tuple[int, int]) -> bool:
        """Return whether the groups of a scale fill the rows of a matrix of `shape` ``(N, K)``; 2-D blocks may not."""
        return self.granularity.rows != 1 or shape[1] % self.granularity.block(shape)[1] == 0

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Return the bits per element of a matrix of `shape` ``(N, K)``, including scales."""
        grid = self.granularity.scale_shape(shape)
        scale_bits = grid[0] * grid[1] * self.scale.bits + (FLOAT32.bits if self.has_global_scale else 0)
        return self.element.bits + scale_bits / max(shape[0] * shape[1], 1)


@dataclass(frozen=True)
class ActivationSpec:
    """Format in which a server quantizes the input of a linear."""

    element: ElementFormat
    granularity: Granularity
    dynamic: bool
    scale: ElementFormat = FLOAT32

    @property
    def has_global_scale(self) -> bool:
        """Whether one static float32 scale per input lies above the block scales (NVFP4)."""
        return self.scale is E4M3

    @property
    def needs_calibration(self) -> bool:
        """Whether a server needs a static scale from calibration: that of the input, or the one above block scales."""
        return not self.dynamic or self.has_global_scale

    def __str__(self) -> str:
        """Return the spec in words, for example ``"E4M3 per token (dynamic)"``."""
        scales = "" if self.scale is FLOAT32 else f", {self.scale.name} scales"
        kind = "dynamic" if self.dynamic else "static"
        if self.has_global_scale:
            kind += " under a static global scale"
        return f"{self.element.name} per {self.granularity}{scales} ({kind})"


@dataclass(frozen=True)
class KVSpec:
    """Format of a quantized KV cache."""

    element: ElementFormat
    granularity: Granularity


@dataclass(frozen=True)
class Scheme:
    """Formats of weights, activations and KV cache.

    Attributes:
        name: Name on the command line and in `SCHEMES`.
        summary: One line for `--help` and the model card.
        weight: Storage format of weights.
        activation: Format of activations; None for weight-only, with activations in 16 bits.
        kv: Format of the KV cache; None if it stays in 16 bits.
    """

    name: str
    summary: str
    weight: WeightSpec
    activation: ActivationSpec | None = None
    kv: KVSpec | None = None


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "fp8-block",
            "E4M3, a power of two per 128x128 block as scale; loads in vLLM, SGLang and transformers",
            # DeepGEMM takes only powers of two: others would be rounded up while a server loads, and the codes again.
            WeightSpec(E4M3, BLOCK_128, rule=ScaleRule.RCEIL),
            ActivationSpec(E4M3, GROUP_128, dynamic=True),
        ),
        Scheme("fp8", "E4M3 per output channel, activations in BF16 (W8A16)", WeightSpec(E4M3, CHANNEL)),
        Scheme(
            "fp8-static",
            "E4M3 per tensor, activations E4M3 with calibrated scales (W8A8)",
            WeightSpec(E4M3, TENSOR),
            ActivationSpec(E4M3, TENSOR, dynamic=False),
        ),
        Scheme(
            "fp8-dynamic",
            "E4M3 per output channel, activations E4M3 per token at run time (W8A8)",
            WeightSpec(E4M3, CHANNEL),
            ActivationSpec(E4M3, TOKEN, dynamic=True),
        ),
        Scheme(
            "mxfp8",
            "E4M3 with an E8M0 scale per 32 elements (OCP MX)",
            WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.RCEIL),
        ),
        Scheme(
            "mxfp4",
            "E2M1 with an E8M0 scale per 32 elements (OCP MX)",
            WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.SEARCH),
        ),
        Scheme(
            "nvfp4",
            "E2M1 with an E4M3 scale per 16 elements and a float32 scale per tensor",
            WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.SEARCH),
        ),
    )
}
SCHEMES |= {
    scheme.name: scheme
    for scheme in (
        Scheme(
            "mxfp8-w8a8",
            "mxfp8, activations MXFP8 at run time (W8A8)",
            SCHEMES["mxfp8"].weight,
            ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0),
        ),
        Scheme(
            "mxfp4-w4a8",
            "mxfp4, activations MXFP8 at run time (W4A8)",
            SCHEMES["mxfp4"].weight,
            ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0),
        ),
        Scheme(
            "mxfp4-w4a4",
            "mxfp4, activations MXFP4 at run time (W4A4)",
            SCHEMES["mxfp4"].weight,
            ActivationSpec(E2M1, GROUP_32, dynamic=True, scale=E8M0),
        ),
        Scheme(
            "nvfp4-w4a4",
            "nvfp4, activations NVFP4 under calibrated scales (W4A4)",
            SCHEMES["nvfp4"].weight,
            ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E4M3),
        ),
    )
}

DEFAULT_SCHEME = "fp8-block"


def get_scheme(name: str) -> Scheme:
    return lookup("scheme", name, SCHEMES)


def weight_only(scheme: Scheme) -> Scheme:
    """Return `scheme` with activations left in 16 bits."""
    return replace(scheme, activation=None)


def without_static_scales(scheme: Scheme) -> Scheme:
    """Return the scheme for weights whose inputs no calibration text reaches."""
    if scheme.activation is None or not scheme.activation.needs_calibration:
        return scheme
    if scheme.weight.element is E4M3:
        return SCHEMES["fp8-dynamic"]
    plain = (other for other in SCHEMES.values() if other.activation is None and other.weight == scheme.weight)
    return next(plain, weight_only(scheme))
