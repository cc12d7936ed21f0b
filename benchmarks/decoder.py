"""Where a step of the decoder spends its time, and how near it comes to reading its weights and keys once.

    python benchmarks/decoder.py
    python benchmarks/decoder.py --formats fp8 --contexts 4000 --cache E4M3 --prefill 0

The model has the shape of TinyLlama 1.1B and random weights; all layers are distinct memory, so that they come from
memory in every step. A decoding step has one new token for each of some sequences; a prefill one prompt. "outside" is
the share of the step that is not linears; "bound" is the bytes of weights, and of keys and values of all contexts, over
the read bandwidth measured before and after. Prefill stands beside transformers in BF16 with torch's fused attention,
in the same rounds.
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
import linear_bars

from minifloat.errors import MinifloatError
from minifloat.kernels import native
from minifloat.kernels.bandwidth import read_bandwidth

# What imports torch is imported after force() has set its limits.
if TYPE_CHECKING:
    from torch import Tensor

    from minifloat.kernels.decoder import Decoder, KVCache, StepBatch
    from minifloat.kernels.pack import PackedWeight

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2048, 32, 4, 64, 5632, 32000
ROPE_BASE = 10000.0
READ_BYTES = 1 << 30


def weights_of(name: str) -> Callable[[int, int], PackedWeight]:
    """Makes packed weights ``[N, K]``, each in memory of its own, quantizing each shape once."""
    import torch

    from minifloat.kernels.pack import pack
    from minifloat.kernels.pack.memory import allocate
    from minifloat.numerics.scheme import SCHEMES
    from minifloat.numerics.tensor import quantize_tensor

    made: dict[tuple[int, int], PackedWeight] = {}

    def make(rows: int, cols: int) -> PackedWeight:
        if (rows, cols) not in made:
            weight = (torch.randn(rows, cols) / cols**0.5).bfloat16()
            made[rows, cols] = pack(weight if name == "bf16" else quantize_tensor(weight, SCHEMES[name].weight))
        first = made[rows, cols]
        return replace(first, data=allocate(first.nbytes).copy_(first.data))

    return make


def decoder_of(name: str, layers: int) -> Decoder:
    """The model in one format; `lm_head` stays BF16."""
    import torch

    from minifloat.kernels.decoder import Attention, Decoder, Layer, Mlp
    from minifloat.kernels.pack import FusedWeights

    make, head = weights_of(name), weights_of("bf16")
    kv, ones = KV_HEADS * HEAD_DIM, torch.ones(HIDDEN)
    return Decoder(
        dtype=torch.bfloat16,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        eps=1e-5,
        inv_freq=ROPE_BASE ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)),
        attention_scaling=1.0,
        scale=HEAD_DIM**-0.5,
        embedding=torch.randn(VOCAB, HIDDEN).bfloat16(),
        layers=tuple(
            Layer(
                ones,
                Attention(
                    FusedWeights([make(HEADS * HEAD_DIM, HIDDEN), make(kv, HIDDEN), make(kv, HIDDEN)]),
                    make(HIDDEN, HEADS * HEAD_DIM),
                ),
                ones,
                Mlp(FusedWeights([make(INTERMEDIATE, HIDDEN) for _ in range(2)]), make(HIDDEN, INTERMEDIATE)),
            )
            for _ in range(layers)
        ),
        norm=ones,
        lm_head=head(VOCAB, HIDDEN),
    )


def weight_bytes(decoder: Decoder) -> int:
    """What a step reads of weights, embedding apart."""
    from minifloat.kernels.decoder import Mlp

    total = decoder.lm_head.nbytes
    for layer in decoder.layers:
        assert isinstance(layer.mlp, Mlp)
        parts = [*layer.attention.qkv, layer.attention.out, *layer.mlp.gate_up, layer.mlp.down]
        total += sum(part.nbytes for part in parts)
    return total


def batch_of(sequences: int, new: int, context: int) -> StepBatch:
    """`new` tokens for each sequence, `context` keys after them; the last token's logits."""
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
    """One thing to measure.

    Attributes:
        label: Its name in the table.
        run: Does it once.
        nbytes: What it reads at least; 0: not said.
        seconds: Of every round.
        parts: Nanoseconds of each part of every round.
    """

    label: str
    run: Callable[[Tensor], object]
    nbytes: int
    seconds: list[float]
    parts: list[list[int]]

    def sample(self) -> None:
        """Run once."""
        import torch

        from minifloat.kernels.decoder.cpu import PARTS

        nanoseconds = torch.zeros(len(PARTS), dtype=torch.int64)
        start = time.perf_counter()
        self.run(nanoseconds)
        self.seconds.append(time.perf_counter() - start)
        self.parts.append(nanoseconds.tolist())

    def line(self, bandwidth: float) -> str:
        """A row of the table; medians."""
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
    """A step of ours, with the checks that every step has."""
    from minifloat.kernels.decoder import cpu
    from minifloat.kernels.decoder.check import check

    def run(nanoseconds: Tensor) -> object:
        check(decoder, cache, batch)
        return cpu.step(decoder, cache, batch, nanoseconds)

    return Case(label, run, nbytes, [], [])


def torch_prefill(layers: int, tokens: int) -> Case:
    """The same model of transformers in BF16."""
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
@click.option("--formats", default="fp8,mxfp4,bf16", show_default=True, help=", ".join(linear_bars.FORMATS))
@click.option("--batches", default="1,16,32", show_default=True, help="Sequences that decode together.")
@click.option("--contexts", default="256", show_default=True, help="Keys of each.")
@click.option("--prefill", default=256, show_default=True, help="Tokens of the prompt; 0: none.")
@click.option("--cache", "element", default="bfloat16", show_default=True, help="float32, bfloat16 or E4M3.")
@click.option("--layers", default=22, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--torch/--no-torch", "with_torch", default=True, help="Whether prefill stands beside torch.")
@click.option("--isa", help="Hold the kernels and torch to this instruction set.")
def main(isa: str | None, **options: Any) -> None:
    """Measure."""
    instruction_sets.force(isa)
    import torch

    from minifloat.kernels.decoder import KVCache

    batches = [int(text) for text in options["batches"].split(",") if text]
    contexts = [int(text) for text in options["contexts"].split(",")]
    layers, prefill, element = options["layers"], options["prefill"], options["element"]
    blocks = -(-max([prefill, *(count * context for count in batches for context in contexts)]) // 16) + max(batches)
    cases = []
    cache = KVCache(layers, KV_HEADS, HEAD_DIM, blocks, element)
    cache.data.zero_()
    for name in linear_bars.parse_formats(options["formats"]):
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
