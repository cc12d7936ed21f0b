"""Small checkpoints, made once per process in a folder that the caller owns."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from small_llama import to_bf16, write_safetensors

from fuzzing.mutation import encoded

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"

#: The config of the small Llama: all that the native decoder reads.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}


@functools.cache
def scratch() -> Path:
    """A folder of this process; whoever starts the process sets TMPDIR, and deletes that."""
    return Path(tempfile.mkdtemp(prefix="minifloat-fuzz-"))


def weights() -> dict[str, np.ndarray]:
    """Return the weights of the small Llama, as the bits of bfloat16."""
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (96, 128) for name in ("model.embed_tokens", "lm_head")}
    linears = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (128, 128), "self_attn.v_proj": (128, 128)}
    linears |= {"self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128)}
    for layer in range(2):
        named = linears | {"mlp.down_proj": (128, 256)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in named.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (128,)
    shapes["model.norm.weight"] = (128,)
    return {name: to_bf16(random.standard_t(5, shape) * 0.02) for name, shape in shapes.items()}


def checkpoint(form: str = "bf16") -> Path:
    """Return the folder of the small Llama: `bf16`, or quantized as `SCHEME` or `SCHEME/LAYOUT`."""
    folder = scratch() / form.replace("/", "-")
    if folder.is_dir():
        return folder
    if form == "bf16":
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", weights(), "BF16")
        (folder / "config.json").write_bytes(encoded(LLAMA))
        return folder
    from minifloat import QuantizeOptions, convert_checkpoint, quantize_checkpoint

    scheme, _, layout = form.partition("/")
    if layout == "modelopt":
        convert_checkpoint(checkpoint(scheme), folder, layout)
    else:
        quantize_checkpoint(checkpoint(), folder, scheme, QuantizeOptions(layout=layout or None, allow_partial=True))
    return folder


def fresh(name: str) -> Path:
    """Return a path below `scratch` at which nothing is."""
    path = scratch() / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    return path
