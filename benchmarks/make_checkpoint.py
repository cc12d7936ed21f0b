"""Make a random BF16 Llama checkpoint of a given shape, in shards, without building the model.

    python benchmarks/make_checkpoint.py OUT                      # 1.1B parameters in 5 shards (TinyLlama's shape)
    python benchmarks/make_checkpoint.py OUT --layers 44          # about 2.0B

Weights are Gaussian with a few outliers, from a fixed seed: equal arguments make equal files.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
from safetensors.numpy import save_file

#: numpy has no bfloat16, so shards are written as uint16 and the dtype in their headers is replaced.
_LABELS = (b'"dtype":"U16"', b'"dtype":"BF16"')


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to nearest even and return the bits of bfloat16 as uint16."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def shapes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama's tensors."""
    kv = hidden // heads * kv_heads
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return tensors | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write_shard(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write uint16 tensors into a shard whose header declares them as BF16."""
    save_file(tensors, path, metadata={"format": "pt"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(*_LABELS).rstrip()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(memoryview(data)[8 + length :])


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--hidden", default=2048, show_default=True)
@click.option("--inner", default=5632, show_default=True)
@click.option("--layers", default=22, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=4, show_default=True)
@click.option("--vocab", default=32000, show_default=True)
@click.option("--shards", default=5, show_default=True)
def main(out: Path, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, shards: int) -> None:
    """Write the checkpoint OUT."""
    out.mkdir(parents=True)
    rng = np.random.default_rng(0)
    noise = bfloat16(rng.standard_normal(1 << 22) * 0.02)
    noise[rng.integers(0, noise.size, 4096)] = bfloat16(np.array([0.5]))[0]
    all_shapes = shapes(hidden, inner, layers, heads, kv_heads, vocab)
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in all_shapes.items()}
    per_shard = sum(sizes.values()) / shards
    weight_map: dict[str, str] = {}
    current: dict[str, np.ndarray] = {}
    written = number = 0
    for position, (name, shape) in enumerate(all_shapes.items()):
        count = int(np.prod(shape))
        start = int(rng.integers(0, noise.size))
        current[name] = np.resize(np.roll(noise, -start), count).reshape(shape)
        written += sizes[name]
        last = position == len(all_shapes) - 1
        if last or written >= per_shard * (number + 1):
            number += 1
            file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
            write_shard(out / file_name, current)
            weight_map |= dict.fromkeys(current, file_name)
            current = {}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    click.echo(f"{sum(sizes.values()) / 2e9:.2f}B parameters, {sum(sizes.values()):,} bytes in {number} shards: {out}")


if __name__ == "__main__":
    main()
