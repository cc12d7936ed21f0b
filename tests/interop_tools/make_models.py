"""Make the tiny BF16 models that the other tools quantize.

Run by hand; the test-suite reads the results under tests/data/interop and never imports this file. The weights are
random with a fixed seed, heavy-tailed (Student's t, four degrees of freedom) with a few large output channels, so
that amax is set by outliers as in a trained model; `PLANTED_ZEROS` adds rows and groups that are all zero, because
tools disagree about the scale of an all-zero block. The models cannot generate meaningful text.

Leaves out: tokenizers (the fixtures are read by token id) and anything trained.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

INTEROP = Path(__file__).resolve().parent.parent / "data" / "interop"

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

#: Suffix of a tensor -> its rows and columns that are set to zero.
PLANTED_ZEROS: dict[str, tuple[slice, slice]] = {
    "layers.0.mlp.up_proj.weight": (slice(3, 4), slice(None)),
    "layers.0.mlp.gate_proj.weight": (slice(7, 8), slice(0, 32)),
    "layers.0.mlp.experts.1.up_proj.weight": (slice(3, 4), slice(None)),
}


def configs() -> dict[str, PreTrainedConfig]:
    """Return the configs of the base models by folder name."""
    return {
        # 160 rows are one whole block of 128 and a partial block; 64 columns are less than a block.
        "base-llama": LlamaConfig(
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=1,
            head_dim=16,
            tie_word_embeddings=False,
            **HEADS,
            **COMMON,
        ),
        "base-qwen3-moe": Qwen3MoeConfig(
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            mlp_only_layers=[1],
            head_dim=16,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            **HEADS,
            **COMMON,
        ),
        "base-gpt-oss": GptOssConfig(
            hidden_size=64,
            intermediate_size=64,
            num_local_experts=3,
            num_experts_per_tok=2,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            head_dim=16,
            tie_word_embeddings=False,
            **HEADS,
            **COMMON,
        ),
    }


def random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return a random BF16 tensor of `shape`: about 1 for norms, small for biases, heavy-tailed for matrices."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        return (1 + 0.1 * normal).to(torch.bfloat16)
    if len(shape) == 1 or name.endswith(("_bias", "sinks")):
        return (0.1 * normal).to(torch.bfloat16)
    if "embed_tokens" in name:
        return normal.to(torch.bfloat16)
    chi_squared = torch.randn((4, *shape), generator=generator, dtype=torch.float64).square().sum(0)
    tensor = normal / (chi_squared / 4).sqrt() / math.sqrt(2 * shape[-1])
    tensor[..., 5::29, :] *= 6  # a few output channels much larger than the others
    for suffix, (rows, columns) in PLANTED_ZEROS.items():
        if name.endswith(suffix):
            tensor[rows, columns] = 0
    return tensor.to(torch.bfloat16)


def make(name: str, config: PreTrainedConfig, seed: int = 20261121) -> None:
    """Write the model `config` to ``tests/data/interop/<name>``, replacing what is there."""
    target = INTEROP / name
    shutil.rmtree(target, ignore_errors=True)
    config.dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        # transformers sets the tensors' names and the layout of experts on disk; `random_tensor` sets the values.
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        shapes = load_file(Path(folder) / "model.safetensors")
        target.mkdir(parents=True)
        shutil.copy(Path(folder) / "config.json", target)
    tensors = {key: random_tensor(key, shapes[key].shape, generator) for key in sorted(shapes)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Make the models that are named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*configs(), []], help="folders to make; default: all")
    chosen = parser.parse_args().names or list(configs())
    for name in chosen:
        make(name, configs()[name])
        print(name)


if __name__ == "__main__":
    main()
