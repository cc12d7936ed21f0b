"""Calibrated scales of an FP8 KV cache cost what three mantissa bits cost and no more; a scale of 1.0 may cost all.

The format's error is that of rounding to the same number of mantissa bits with an unbounded exponent: what a scale adds
to it is saturation at the top and subnormals at the bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minifloat.calibration.calibrate import calibrate_set
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.scales import kv_scales
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.numerics.formats import E4M3

MakeModel = Callable[..., Path]
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "storybook-4m"
TEXTS = (
    EXAMPLE.parent / "texts" / "stories_calibration.txt",
    ROOT / "src/minifloat/evaluate/compare/texts/stories.txt",
)

Scales = Mapping[str, tuple[float, float]]

#: Stands for scales: rounding alone, without the limits of the exponent.
UNBOUNDED: Scales = {}


def fake_quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Through E4M3 and back, as a cache with that scale does; written with torch's own cast."""
    clamped = (x.float() / scale).clamp(-E4M3.max, E4M3.max)
    return (clamped.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def round_mantissa(x: torch.Tensor) -> torch.Tensor:
    """To as many mantissa bits as E4M3 has, whatever the exponent."""
    mantissa, exponent = torch.frexp(x.float())
    steps = 2.0 ** (E4M3.mantissa_bits + 1)
    return torch.ldexp((mantissa * steps).round() / steps, exponent).to(x.dtype)


def attention_outputs(model: PreTrainedModel, ids: torch.Tensor, scales: Scales | None) -> list[torch.Tensor]:
    """The output of every attention, the inputs of the layers being those of the unquantized model."""
    outputs: list[torch.Tensor] = []
    names = {id(module): name for name, module in model.named_modules()}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)
        if scales is None:
            outputs.append(plain[0])
        else:
            cached = (round_mantissa(key), round_mantissa(value))
            if scales is not UNBOUNDED:
                k_scale, v_scale = scales[names[id(module)]]
                cached = (fake_quantize(key, k_scale), fake_quantize(value, v_scale))
            outputs.append(ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *cached, *args, **kwargs)[0])
        return plain

    AttentionInterface.register("kv_accuracy_test", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("kv_accuracy_test")
    try:
        with torch.inference_mode():
            model(input_ids=ids)
    finally:
        model.set_attn_implementation(before)
    return outputs


def worst_error(model: PreTrainedModel, ids: torch.Tensor, scales: Scales) -> float:
    """The largest relative L2 error over the attentions."""
    pairs = zip(attention_outputs(model, ids, None), attention_outputs(model, ids, scales), strict=True)
    return max(((noisy - plain).norm() / plain.norm()).item() for plain, noisy in pairs)


def calibrated(folder: Path, ids: torch.Tensor) -> Scales:
    data = CalibrationSet(tuple(tuple(row) for row in ids.tolist()), {"sources": []})
    stats = calibrate_set(folder, data, CalibrateOptions(dtype=torch.float32))
    return {name: (float(pair.k), float(pair.v)) for name, pair in kv_scales(stats).items()}


def test_on_a_real_model_calibrated_scales_add_nothing_to_the_error_of_the_format() -> None:
    model = load(EXAMPLE, LoadOptions(dtype=torch.float32))
    seen, new = (
        load_tokenizer(EXAMPLE)(path.read_text(), return_tensors="pt").input_ids[0, : 8 * 128].reshape(8, 128)
        for path in TEXTS
    )
    scales = calibrated(EXAMPLE, seen)
    errors = [(worst_error(model, row[None], scales), worst_error(model, row[None], UNBOUNDED)) for row in new]
    assert sum(with_scales for with_scales, _ in errors) < 1.1 * sum(of_the_format for _, of_the_format in errors)


@pytest.mark.parametrize("factor", [1e3, 1e-4])
def test_where_keys_and_values_are_far_from_one_calibration_beats_a_scale_of_one(
    make_llama: MakeModel, tmp_path: Path, factor: float
) -> None:
    folder = make_llama(tmp_path / "llama", dtype="float32")
    scale_projections(folder, factor)
    model = load(folder, LoadOptions(dtype=torch.float32))
    generator = torch.Generator().manual_seed(1)
    seen, new = torch.randint(0, 256, (2, 4, 64), generator=generator)
    scales = calibrated(folder, seen)
    good = worst_error(model, new[:1], scales)
    bad = worst_error(model, new[:1], dict.fromkeys(scales, (1.0, 1.0)))
    assert good < 1.1 * worst_error(model, new[:1], UNBOUNDED)
    assert bad > 4 * good


def scale_projections(folder: Path, factor: float) -> None:
    """Give K outliers (or tiny values) that Q undoes, and V that o_proj undoes: the model computes the same."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensor * factor
        elif name.endswith(("q_proj.weight", "o_proj.weight")):
            tensors[name] = tensor / factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
