"""mlx-lm's folders for Apple silicon: MXFP4, NVFP4 and MXFP8 in the modes of `mx.quantize`, written and read.

A weight ``[N, K]`` is ``weight``, uint32 ``[N, K * bits / 32]``, whose bytes are those of packed codes elsewhere, and
``scales``, uint8 ``[N, K / group]``: E8M0, or E4M3 in nvfp4. The experts of a layer are one stack ``[E, N, ...]`` under
``switch_mlp``. NVFP4 has no tensor scale here. Affine integers, the other mode, are refused by name.

Source: mlx 0.32.4, `mx.quantize`; mlx-lm 0.32.2, `utils.load_model`, `models/switch_layers.py`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from minifloat.checkpoint import CONFIG_FILE, Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.tensors import DTYPES
from minifloat.errors import ConfigError, ShapeError, UnsupportedTensorError, UsageError
from minifloat.model.architecture.families import NATIVE
from minifloat.model.architecture.roles import text_config
from minifloat.model.layouts.stored import Description, StoredWeight
from minifloat.model.layouts.writing import NO_NAMES, WeightTensors, WriteLayout
from minifloat.numerics.scheme import SCHEMES, KVSpec, Scheme, WeightSpec

NAME = "mlx"
#: mlx-lm's name of a stack of experts, and of each linear in it where the checkpoint calls them w1, w2 and w3.
STACK = "switch_mlp"
_NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_STACKED = {own: name for name, own in _NUMBERED.items()}
_SINGLE = re.compile(r"(?P<parent>.+\.)experts\.(?P<expert>\d+)\.(?P<linear>\w+)")
_WORD_BITS = DTYPES["U32"]
#: Model types whose folders mlx-lm loads as the same model (tests/interop/test_mlx_lm.py); others have other names or
#: other fields of the config there.
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "granite", "glm4", "gemma2", "seed_oss"),
    *("ernie4_5", "helium", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe"),
)
#: Modes of `mx.quantize` without biases, whose names are those of our schemes.
_MODES = {name: SCHEMES[name].weight for name in ("mxfp4", "nvfp4", "mxfp8")}


def _words_per_scale(spec: WeightSpec) -> int:
    """Return how many uint32 share a scale, by which the modes differ: 4, 2 and 8."""
    return spec.granularity.block((1, 1))[1] * spec.element.bits // _WORD_BITS


_BY_WORDS = {_words_per_scale(spec): mode for mode, spec in _MODES.items()}


def _mode_of(spec: WeightSpec) -> str | None:
    wanted = (spec.element, spec.granularity, spec.scale)
    return next((n for n, mode in _MODES.items() if (mode.element, mode.granularity, mode.scale) == wanted), None)


def _mode_config(mode: str) -> dict[str, Any]:
    spec = _MODES[mode]
    return {"group_size": spec.granularity.cols, "bits": spec.element.bits, "mode": mode}


def stack_of(module: str) -> tuple[str, int] | None:
    """Return the stack that an expert's linear belongs to, and its index there; None for any other module."""
    match = _SINGLE.fullmatch(module)
    if match is None:
        return None
    linear = match["linear"]
    return f"{match['parent']}{STACK}.{_STACKED.get(linear, linear)}", int(match["expert"])


@dataclass(frozen=True)
class MlxWriter(WriteLayout):
    """Writer of the three modes and of mixtures of them."""

    cure: ClassVar[str] = "leave --kv-cache and calibrated inputs out: mlx-lm keeps both in 16 bits"

    name: str = NAME

    def check(self, scheme: Scheme) -> None:
        """Check that mlx has a mode for the weights, and that inputs stay in 16 bits."""
        if _mode_of(scheme.weight) is None:
            raise UsageError(
                f"mlx has no mode for {scheme.name!r}, only for {', '.join(_MODES)}: quantize the original with one of "
                "these, or write plain weights with --dequantize, which mlx-lm loads too"
            )
        if scheme.activation is not None:
            raise UsageError(
                f"layout {NAME!r} has inputs in 16 bits, and {scheme.name!r} has them in {scheme.activation}: quantize "
                f"the original with --scheme {_mode_of(scheme.weight)}"
            )

    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        """Return ``weight`` in words of 32 bits and ``scales``; of a stack both begin with the number of experts."""
        rows, cols = shape
        bits, group = spec.element.bits, spec.granularity.block(shape)[1]
        stack = () if experts is None else (experts,)
        return WeightTensors(
            OutputTensor(f"{module}.weight", "U32", (*stack, rows, cols * bits // _WORD_BITS)),
            OutputTensor(f"{module}.scales", "U8", (*stack, rows, cols // group)),
        )

    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        """Return the most frequent mode, every module in another mode, and false for linears in 16 bits."""
        self.refuse_kv(kv)
        modes = {module: str(_mode_of(scheme.weight)) for module, scheme in modules.items()}
        ((usual, _),) = Counter(modes.values()).most_common(1)
        others = {module: _mode_config(mode) for module, mode in modes.items() if mode != usual}
        return {**_mode_config(usual), **others, **dict.fromkeys(kept, False)}


WRITER = MlxWriter()


def is_config(quantization: Mapping[str, Any]) -> bool:
    """Return whether a quantization config is mlx-lm's, which names no `quant_method`."""
    return "quant_method" not in quantization and {"group_size", "bits"} <= quantization.keys()


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a folder of mlx-lm."""
    weights = {}
    for name, scale in checkpoint.tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf == "global_scale":
            raise UnsupportedTensorError(
                name, "tensor scales of experts in nvfp4 are not read; use a model without them"
            )
        if leaf != "scales":
            continue
        codes = _codes(checkpoint, base, scale)
        mode = _BY_WORDS[codes.shape[-1] // scale.shape[-1]]
        _check_declared(checkpoint.path / CONFIG_FILE, config, base, mode)
        spec = _MODES[mode]
        shape = (codes.shape[-2], codes.shape[-1] * _WORD_BITS // spec.element.bits)
        for module, expert in _modules(checkpoint, codes, base):
            weights[module] = StoredWeight(module, spec, shape, codes.name, name, expert=expert)
    if not weights:
        raise ConfigError(
            checkpoint.path / CONFIG_FILE, "mlx's quantization is declared, and no tensor is named *.scales"
        )
    return Description(NAME, weights)


def _codes(checkpoint: Checkpoint, base: str, scale: TensorInfo) -> TensorInfo:
    """Return the packed codes of a tensor of scales, of which both fit together."""
    if scale.dtype != "U8" or f"{base}.biases" in checkpoint.tensors:
        raise UnsupportedTensorError(
            scale.name,
            f"affine integers of mlx, with {scale.dtype} scales and biases, are not read; of mlx's modes use one of "
            f"{', '.join(_MODES)}",
        )
    codes = checkpoint.tensors.get(f"{base}.weight")
    if codes is None or codes.dtype != "U32" or len(codes.shape) not in (2, 3):
        found = "none" if codes is None else f"{codes.dtype} {list(codes.shape)}"
        raise ShapeError(scale.name, f"expected uint32 codes [N, K] or [E, N, K] in {base}.weight, found {found}")
    words, rest = divmod(codes.shape[-1], scale.shape[-1]) if scale.shape and scale.shape[-1] else (0, 0)
    if rest or words not in _BY_WORDS or codes.shape[:-1] != scale.shape[:-1] or not math.prod(codes.shape):
        raise ShapeError(
            scale.name,
            f"scales {list(scale.shape)} do not fit codes {list(codes.shape)} in any of {', '.join(_MODES)}: the "
            "folder is damaged, download it again",
        )
    return codes


def _check_declared(path: Path, config: Mapping[str, Any], base: str, mode: str) -> None:
    """Raise if the config declares a module otherwise than it is stored; some modules have no entry."""
    own = config.get(base)
    if own is None:
        return
    found = _mode_config(mode)
    if not isinstance(own, dict) or any(own.get(key) != value for key, value in found.items()):
        raise ConfigError(path, f"quantization: {base} is declared {own!r}, and its tensors are {found}")


def _modules(checkpoint: Checkpoint, codes: TensorInfo, base: str) -> Iterator[tuple[str, int | None]]:
    """Yield the module of a weight, or those of all experts of a stack with their index."""
    if len(codes.shape) == 2:
        yield base, None
        return
    parent, _, linear = base.rpartition(".")
    if not parent.endswith(f".{STACK}"):
        raise UnsupportedTensorError(codes.name, f"a stack of experts is read under {STACK} only")
    model_type = str(text_config(checkpoint.config).get("model_type"))
    numbered = model_type in NATIVE and NATIVE[model_type].w1_w2_w3
    own = _NUMBERED.get(linear, linear) if numbered else linear
    for expert in range(codes.shape[0]):
        yield f"{parent.removesuffix(STACK)}experts.{expert}.{own}", expert
