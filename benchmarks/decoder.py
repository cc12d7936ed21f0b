"""Measure where a decoder step spends its time, and how close it comes to the read bandwidth of the memory.

    python benchmarks/decoder.py
    python benchmarks/decoder.py --formats fp8 --contexts 4000 --cache E4M3 --prefill 0

The model has the shape of TinyLlama 1.1B and random weights; all layers lie in distinct memory, so that every step
reads them from memory rather than from the caches. A decode step has one new token for each sequence; a prefill has one
prompt. "outside" is the share of the step spent outside the linears. "bound" is the time in which the weights and the
keys and values of all contexts can be read at the bandwidth measured before and after. Prefill is compared with
transformers in BF16 with torch's fused attention, in the same rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
import instruction_sets
import linear_shapes

from minifloat.errors import MinifloatError
from minifloat.kernels import native
from minifloat.kernels.speed import read_bandwidth

# Modules that import torch come after force(), because torch reads its instruction set limits when it is imported.
if TYPE_CHECKING:
    from torch import Tensor

    from minifloat.kernels.decoder import Decoder, KVCache, StepBatch
    from minifloat.kernels.pack import PackedWeight

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2048, 32, 4, 64, 5632, 32000
ROPE_BASE = 10000.0
READ_BYTES = 1 << 30


def weights_of(name: str) -> Callable[[int, int], PackedWeight]:
    """Return a maker of packed weights ``[N, K]``, each in memory of its own; each shape is quantized once."""
    import torch

    from minifloat.kernels.pack import allocate, pack
    from minifloat.numerics.scheme import SCHEMES
    from minifloat.numerics.tensor import quantize_tensor

    packed: dict[tuple[int, int], PackedWeight] = {}

    def make(rows: int, cols: int) -> PackedWeight:
        if (rows, cols) not in packed:
            weight = (torch.randn(rows, cols) / cols**0.5).bfloat16()
            packed[rows, cols] = pack(weight if name == "bf16" else quantize_tensor(weight, SCHEMES[name].weight))
        first = packed[rows, cols]
        return replace(first, data=allocate(first.nbytes).copy_(first.data))

    return make


def decoder_of(name: str, layers: int) -> Decoder:
    """Return the model in one format; `lm_head` stays BF16."""
    import torch

    from minifloat.kernels.decoder import Attention, Decoder, Layer, Mlp, Norm, Rotary
    from minifloat.kernels.pack import FusedWeights

    make, head = weights_of(name), weights_of("bf16")
    kv, norm = KV_HEADS * HEAD_DIM, Norm(torch.ones(HIDDEN), 1e-5)
    rotary = Rotary(ROPE_BASE ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    return Decoder(
        dtype=torch.bfloat16,
        embedding=torch.randn(VOCAB, HIDDEN).bfloat16(),
        layers=tuple(
            Layer(
                norm,
                Attention(
                    heads=HEADS,
                    kv_heads=KV_HEADS,
                    head_dim=HEAD_DIM,
                    scale=HEAD_DIM**-0.5,
                    qkv=FusedWeights([make(HEADS * HEAD_DIM, HIDDEN), make(kv, HIDDEN), make(kv, HIDDEN)]),
                    out=make(HIDDEN, HEADS * HEAD_DIM),
                    rotary=rotary,
                ),
                norm,
                Mlp(FusedWeights([make(INTERMEDIATE, HIDDEN) for _ in range(2)]), make(HIDDEN, INTERMEDIATE)),
            )
            for _ in range(layers)
        ),
        norm=norm,
        lm_head=head(VOCAB, HIDDEN),
    )


def weight_bytes(decoder: Decoder) -> int:
    """Return the bytes of all weights that a step reads; the embedding is not counted."""
    from minifloat.kernels.decoder import Attention, Mlp

    total = decoder.lm_head.nbytes
    for layer in decoder.layers:
        assert isinstance(layer.attention, Attention)
        assert isinstance(layer.mlp, Mlp)
        parts = [*layer.attention.qkv, layer.attention.out, *layer.mlp.gate_up, layer.mlp.down]
        total += sum(part.nbytes for part in parts)
    return total


def batch_of(sequences: int, new: int, context: int) -> StepBatch:
    """Return a batch with `new` tokens per sequence that ends at `context` keys, and the logits of the last token."""
    import torch

    from minifloat.kernels.decoder import BLOCK_TOKENS, StepBatch

    def int32(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).contiguous()

    columns = -(-context // BLOCK_TOKENS)
    return StepBatch(
        tokens=int32(torch.randint(VOCAB, (sequences * new,))),
        positions=int32(torch.arange(context - new, context).repeat(sequences)),
        starts=int32(torch.arange(sequences + 1) * new),
        contexts=int32([context] * sequences),
        blocks=int32(torch.randperm(sequences * columns).view(sequences, columns)),
        logits=int32(torch.arange(1, sequences + 1) * new - 1),
    )


@dataclass
class Case:
    """A step to measure, and its samples.

    Attributes:
        label: The name in the table.
        run: Runs the step once; fills the nanoseconds of its parts.
        nbytes: The bytes that the step has to read; 0 if unknown.
        seconds: The time of every round.
        parts: Nanoseconds of each part, of every round.
    """

    label: str
    run: Callable[[Tensor], object]
    nbytes: int
    seconds: list[float]
    parts: list[list[int]]

    def sample(self) -> None:
        """Run the step once and record its time."""
        import torch

        from minifloat.kernels.decoder.cpu import PARTS

        nanoseconds = torch.zeros(len(PARTS), dtype=torch.int64)
        start = time.perf_counter()
        self.run(nanoseconds)
        self.seconds.append(time.perf_counter() - start)
        self.parts.append(nanoseconds.tolist())

    def line(self, bandwidth: float) -> str:
        """Return the row of the table, with medians over the rounds."""
        import torch

        median = statistics.median(self.seconds)
        text = f"{self.label:34}{median * 1e3:10.2f}"
        linears, attention, rows = torch.tensor(self.parts).double().median(dim=0).values.div(1e6).tolist()
        if linears:
            text += f"{linears:10.2f}{attention:10.2f}{rows:10.2f}{1 - linears / median / 1e3:10.1%}"
        if self.nbytes:
            bound = self.nbytes / bandwidth
            text += f"{bound * 1e3:10.2f}{bound / median:10.0%}"
        return text


def case_of(label: str, decoder: Decoder, cache: KVCache, batch: StepBatch, nbytes: int) -> Case:
    """Return a step of our decoder, including the checks that every step makes."""
    from minifloat.kernels.decoder import check, cpu

    def run(nanoseconds: Tensor) -> object:
        check(decoder, cache, batch)
        return cpu.step(decoder, cache, batch, nanoseconds)

    return Case(label, run, nbytes, [], [])


def torch_prefill(layers: int, tokens: int) -> Case:
    """Return the prefill of the same model by transformers, in BF16."""
    import torch
    import transformers

    llama: Any = transformers.LlamaForCausalLM
    config: Any = llama.config_class(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = llama(config).bfloat16()
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    prompt = torch.randint(VOCAB, (1, tokens))

    def run(_: Tensor) -> object:
        with torch.inference_mode():
            return model(prompt, use_cache=True, logits_to_keep=1)

    return Case(f"torch BF16, prefill {tokens}", run, 0, [], [])


@click.command(help=__doc__.split("\n")[0])
@click.option("--formats", default="fp8,mxfp4,bf16", show_default=True, help=", ".join(linear_shapes.FORMATS))
@click.option("--batches", default="1,16,32", show_default=True, help="Batch sizes of decode steps.")
@click.option("--contexts", default="256", show_default=True, help="Number of keys of each sequence.")
@click.option("--prefill", default=256, show_default=True, help="Number of tokens of the prompt; 0 skips prefill.")
@click.option("--cache", "element", default="bfloat16", show_default=True, help="KV cache: float32, bfloat16 or E4M3.")
@click.option("--layers", default=22, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--torch/--no-torch", "with_torch", default=True, help="Compare prefill with transformers.")
@click.option("--isa", help="Limit the kernels and torch to this instruction set.")
def main(isa: str | None, **options: Any) -> None:
    """Measure prefill and decode steps of the decoder."""
    instruction_sets.force(isa)
    import torch

    from minifloat.kernels.decoder import KVCache

    batches = [int(text) for text in options["batches"].split(",") if text]
    contexts = [int(text) for text in options["contexts"].split(",")]
    layers, prefill, element = options["layers"], options["prefill"], options["element"]
    blocks = -(-max([prefill, *(count * context for count in batches for context in contexts)]) // 16) + max(batches)
    cases = []
    cache = KVCache([(KV_HEADS, HEAD_DIM)] * layers, blocks, element)
    cache.data.zero_()
    for name in linear_shapes.parse_names(options["formats"], linear_shapes.FORMATS, "formats"):
        decoder = decoder_of(name, layers)
        nbytes = weight_bytes(decoder)
        for context in contexts:
            for count in batches:
                keys = cache.nbytes // blocks * count * -(-context // 16)
                batch = batch_of(count, 1, context)
                cases.append(case_of(f"{name}, {count} x {context}", decoder, cache, batch, nbytes + keys))
        if prefill:
            cases.append(case_of(f"{name}, prefill {prefill}", decoder, cache, batch_of(1, prefill, prefill), 0))
    if prefill and options["with_torch"]:
        cases.append(torch_prefill(layers, prefill))
    threads = torch.get_num_threads()
    bandwidths = [read_bandwidth(READ_BYTES, threads, 5).median]
    for number in range(options["rounds"] + 1):
        for case in cases:
            case.sample()
            if number == 0:
                case.seconds.clear()
                case.parts.clear()
    bandwidths.append(read_bandwidth(READ_BYTES, threads, 5).median)
    bandwidth = statistics.mean(bandwidths)
    click.echo(f"{native.isa()}, {threads} threads, {layers} layers, {element} cache, read {bandwidth / 1e9:.1f} GB/s")
    heads = ("ms", "linears", "attention", "rows", "outside", "bound", "of bound")
    click.echo(f"{'':34}" + "".join(f"{head:>10}" for head in heads))
    for case in cases:
        click.echo(case.line(bandwidth))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
