"""Accuracy of every method of rounding: KL from the original model on text that no method has seen, as a table.

    python benchmarks/rounding_accuracy.py MODEL --data alice.txt --data wikitext.txt
    python benchmarks/rounding_accuracy.py MODEL --scheme mxfp4 --outliers 32 --data alice.txt

Codes are chosen with text that the model writes itself (``--calibrate-with self``), so the texts that judge are of
another kind. KL is the mean over tokens in nats with its 95% interval, as `minifloat compare` measures it, with inputs
rounded where the scheme rounds them.

``--outliers F`` first multiplies 2% of the channels behind every norm by F and divides the weights that read them by
F, which leaves the function of the model alone: large models have such channels, small ones do not.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file

from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.run import compare_models
from minifloat.numerics.scheme import Scheme, get_scheme
from minifloat.numerics.scheme import weight_only as without_inputs
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.rounding.methods import RoundingOptions, get_method

_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def with_outliers(source: Path, out: Path, factor: float) -> Path:
    """Write a copy of a dense Llama-like model in which 2% of the channels behind each norm are larger by `factor`."""
    shutil.copytree(source, out)
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    hidden = config["hidden_size"]
    channels = torch.randperm(hidden, generator=torch.Generator().manual_seed(5))[: max(2, hidden // 50)]
    scale = torch.ones(hidden)
    scale[channels] = factor
    for layer in range(config["num_hidden_layers"]):
        for norm, readers in _READERS.items():
            name = f"model.layers.{layer}.{norm}.weight"
            weights[name] = (weights[name].float() * scale).to(weights[name].dtype)
            for reader in readers:
                name = f"model.layers.{layer}.{reader}.weight"
                weights[name] = (weights[name].float() / scale).to(weights[name].dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def data_of(scheme: Scheme, method: str, source: str) -> DataOptions | None:
    """Return the text of a method; of nearest, which folds nothing, only where inputs need static scales."""
    activation = scheme.activation
    if method == "nearest" and (activation is None or not activation.needs_calibration):
        return None
    return DataOptions([source], rounding=RoundingOptions(get_method(method), fold=method != "nearest"))


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--scheme", "schemes", multiple=True, default=("mxfp4", "nvfp4", "fp8", "fp8-block"))
@click.option("--method", "methods", multiple=True, default=("nearest", "gptq", "match"))
@click.option("--calibrate-with", default="self", show_default=True)
@click.option("--data", "texts", multiple=True, required=True, help="Text to judge on.")
@click.option("--max-tokens", default=12000, show_default=True, help="Tokens of each text.")
@click.option("--outliers", type=float, help="Inject outliers of this factor.")
@click.option("--weight-only", is_flag=True, help="Leave the inputs of schemes that round them in 16 bits.")
def main(
    model: Path,
    schemes: tuple[str, ...],
    methods: tuple[str, ...],
    calibrate_with: str,
    texts: tuple[str, ...],
    max_tokens: int,
    outliers: float | None,
    weight_only: bool,
) -> None:
    """Measure MODEL."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = model if outliers is None else with_outliers(model, folder / model.name, outliers)
        print(f"| {model.name} | method | s | {' | '.join(Path(text).stem for text in texts)} | over nearest |")
        for scheme in schemes:
            first: list[float] = []
            for method in methods:
                out = folder / f"{scheme}-{method}"
                started = time.perf_counter()
                chosen = without_inputs(get_scheme(scheme)) if weight_only else get_scheme(scheme)
                quantize_checkpoint(source, out, chosen, data=data_of(chosen, method, calibrate_with))
                seconds = time.perf_counter() - started
                options = CompareOptions(max_tokens=max_tokens, prompts=0, lm_head="bf16")
                result = compare_models(source, out, list(texts), options)
                kls = [text.kl_mean for text in result.candidates[0].texts]
                means = [kl.value for kl in kls]
                first = first or means
                cells = " | ".join(f"{kl.value:.4f} [{kl.low:.4f}, {kl.high:.4f}]" for kl in kls)
                ratio = sum(mean / base for mean, base in zip(means, first, strict=True)) / len(means)
                print(f"| {scheme} | {method} | {seconds:.0f} | {cells} | {ratio:.2f} |", flush=True)
                shutil.rmtree(out)


if __name__ == "__main__":
    main()
