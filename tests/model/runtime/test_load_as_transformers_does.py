"""Our own output in transformers: `from_pretrained` with its quantizers gives the logits that `load` gives.

transformers dequantizes with code of its own (compressed-tensors, its FP8 integration), so this is where a layout that
only this package could read would show. Activations stay unquantized on both sides here; where they do not is the
subject of test_quantized_inputs.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, PreTrainedModel

from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.formats import BFLOAT16
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

#: Every projection is made of whole 128x128 blocks: transformers misreads partial ones.
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
IDS = torch.arange(40)[None]


def as_transformers_loads(folder: Path, layout: str) -> PreTrainedModel:
    compressed = layout == "compressed-tensors"
    config = CompressedTensorsConfig(run_compressed=False) if compressed else FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):  # older transformers quantize the inputs of decompressed modules
            module.quantization_enabled = False
    return torch.nn.Module.float(model).eval()  # the FP8 integration loads the rest as it is stored, in BF16


@pytest.fixture(scope="module")
def plain(make_qwen3: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("plain") / "m", head_dim=32, **WHOLE_BLOCKS)


CASES = [(scheme, "compressed-tensors") for scheme in SCHEMES if "nvfp4" not in scheme] + [("fp8-block", "fp8")]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("scheme", "layout"), CASES)
def test_transformers_computes_the_same_logits(plain: Path, tmp_path: Path, scheme: str, layout: str) -> None:
    quantize_checkpoint(plain, tmp_path / "q", scheme, QuantizeOptions(layout=layout))
    theirs = as_transformers_loads(tmp_path / "q", layout)
    with torch.no_grad():
        mine = load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True))(IDS).logits
        expected = theirs(IDS).logits
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_transformers_decodes_the_same_nvfp4_weights_up_to_its_rounding_to_bf16(plain: Path, tmp_path: Path) -> None:
    quantize_checkpoint(plain, tmp_path / "q", "nvfp4")
    theirs, mine = (
        as_transformers_loads(tmp_path / "q", "compressed-tensors"),
        load(tmp_path / "q", LoadOptions(dtype=torch.float32)),
    )
    # compressed-tensors multiplies packed FP4 in BF16 whatever the model's dtype: the scale and the product round.
    two_roundings = 2.0 * 2.0 ** -(BFLOAT16.mantissa_bits + 1)
    for layer, expected in zip(mine.model.layers, theirs.model.layers, strict=True):
        for name in ("self_attn.q_proj", "mlp.down_proj"):
            weight, decoded = layer.get_submodule(name).weight, expected.get_submodule(name).weight
            torch.testing.assert_close(weight, decoded, rtol=two_roundings, atol=0)
