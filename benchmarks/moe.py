"""Measure the linears of a mixture-of-experts layer: one call of ours for all experts against torch BF16 per expert.

    python benchmarks/moe.py --json moe.json
    python benchmarks/moe.py --isa avx2 --formats fp8

The layer is that of Qwen3-30B-A3B: 128 experts, 8 for each token, hidden size 2048, expert size 768; gate and up are
one weight. A call computes both projections for tokens that are routed at random and already sorted by expert: router,
sorting, activation function and weighted sum are left out on both sides. Each contender has as many layers as make up
the requested bytes, so that experts are read from memory; "read%" counts the experts that a call reads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import instruction_sets
import linear_shapes

from minifloat.errors import MinifloatError

# Modules that import torch come after force(), because torch reads its instruction set limits when it is imported.
if TYPE_CHECKING:
    from timing import Contender
    from torch import Tensor

EXPERTS, CHOSEN, HIDDEN, INSIDE = 128, 8, 2048, 768
#: ``(N, K)`` of gate and up together, then of down.
PROJECTIONS = ((2 * INSIDE, HIDDEN), (HIDDEN, INSIDE))
ROUTINGS = 32


@dataclass(frozen=True)
class Routing:
    """The assignment of rows to experts.

    Attributes:
        offsets: int64 ``[EXPERTS + 1]``: expert e owns the rows ``offsets[e] .. offsets[e + 1] - 1``.
        x_rows: int64 ``[rows]``: the token of each row.
        groups: Expert and its tokens, for every expert with at least one token.
    """

    offsets: Tensor
    x_rows: Tensor
    groups: list[tuple[int, Tensor]]


def routings(tokens: int) -> list[Routing]:
    """Return random routings in which every expert is equally likely."""
    import torch

    from minifloat.kernels.moe import sort_by_expert

    result = []
    for _ in range(ROUTINGS):
        offsets, x_rows, _ = sort_by_expert(torch.rand(tokens, EXPERTS).topk(CHOSEN).indices, EXPERTS)
        bounds = offsets.tolist()
        groups = [(e, x_rows[bounds[e] : bounds[e + 1]]) for e in range(EXPERTS) if bounds[e] < bounds[e + 1]]
        result.append(Routing(offsets, x_rows, groups))
    return result


def torch_layers(nbytes: int) -> list[list[Tensor]]:
    """Return layers of two stacks of BF16 experts each, ``[EXPERTS, N, K]``."""
    import torch

    size = sum(EXPERTS * rows * cols * torch.bfloat16.itemsize for rows, cols in PROJECTIONS)
    first = [torch.randn(EXPERTS, *shape).to(torch.bfloat16) for shape in PROJECTIONS]
    return [first, *([stack.clone() for stack in first] for _ in range(-(-nbytes // size) - 1))]


def our_layers(name: str, nbytes: int) -> list[list[Any]]:
    """Return layers of two stacks of packed experts each, in the format `name`."""
    from linear_contenders import source

    from minifloat.kernels.moe import PackedExperts
    from minifloat.kernels.pack import pack

    layers: list[list[Any]] = []
    sources = [source(name, shape) for shape in PROJECTIONS]
    size = 0
    while size < nbytes:
        stacks = [[pack(weight) for _ in range(EXPERTS)] for weight in sources]
        size += sum(expert.nbytes for stack in stacks for expert in stack)
        layers.append([PackedExperts(stack) for stack in stacks])
    return layers


def torch_multiply(x: Tensor, call: tuple[list[Tensor], Routing]) -> None:
    """Multiply expert by expert, as models without a grouped product do."""
    from torch.nn import functional

    (gate_up, down), routing = call
    for expert, tokens in routing.groups:
        inside = functional.linear(x[tokens], gate_up[expert])
        functional.linear(inside[:, :INSIDE], down[expert])


def our_multiply(x: Tensor, call: tuple[list[Any], Routing]) -> None:
    """Multiply all experts of a projection in one call."""
    from minifloat.kernels.moe import moe_linear

    (gate_up, down), routing = call
    inside = moe_linear(x, gate_up, routing.offsets, routing.x_rows)
    moe_linear(inside[:, :INSIDE], down, routing.offsets)


def contenders(layers: dict[str, list[list[Any]]], tokens: int) -> list[Contender]:
    """Return a contender per format with the same routings; a contender's weight is a layer and a routing."""
    from timing import Contender

    routed = routings(tokens)
    touched = sum(len(routing.groups) for routing in routed) / ROUTINGS
    result = []
    for name, kept in layers.items():
        calls = [(kept[i % len(kept)], routing) for i, routing in enumerate(routed)]
        each = sum(stack[0].nbytes for stack in kept[0])
        multiply = torch_multiply if name == linear_shapes.BASELINE else our_multiply
        result.append(Contender(name, multiply, calls, int(touched * each)))
    return result


def run(formats: tuple[str, ...], tokens: tuple[int, ...], nbytes: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure and print every case; return the record for JSON."""
    import torch
    from linear_contenders import memory_read
    from linear_report import HEADER, Case, line, record, rows_of
    from timing import measure

    threads = torch.get_num_threads()
    facts = instruction_sets.machine(threads)
    click.echo(f"{instruction_sets.describe(facts)}\n{EXPERTS} experts, {CHOSEN} per token, {PROJECTIONS}\n{HEADER}")
    cases = []
    with torch.inference_mode():
        layers: dict[str, list[list[Any]]] = {linear_shapes.BASELINE: torch_layers(nbytes)}
        layers |= {name: our_layers(name, nbytes) for name in formats}
        reading = memory_read(nbytes, threads)
        flops = sum(rows * cols for rows, cols in PROJECTIONS) // HIDDEN
        for count in tokens:
            compared = [reading, *contenders(layers, count)]
            samples = measure(compared, count, HIDDEN, rounds, seconds)
            # A product of CHOSEN rows per token with a weight [flops, HIDDEN] has the same number of operations.
            case = Case("experts", (flops * CHOSEN, HIDDEN), count, {c.name: c.nbytes for c in compared}, samples)
            rows = rows_of(case)
            for row in rows:
                click.echo(line(count, row, max(row.gflops for row in rows)))
            click.echo()
            cases.append(record(case, rows))
    return {"machine": facts, "rounds": rounds, "gigabytes": nbytes / 1e9, "cases": cases}


@click.command(help=__doc__.split("\n")[0])
@click.option("--formats", default="fp8,mxfp4,bf16", show_default=True, help=", ".join(linear_shapes.FORMATS))
@click.option("--tokens", default="1,8,64", show_default=True)
@click.option("--gigabytes", default=1.0, show_default=True, help="Size of each contender's weights.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--seconds", default=0.1, show_default=True, help="Approximate time of a sample.")
@click.option("--threads", default=0, help="Threads of torch and the kernels.  [default: torch's]")
@click.option("--isa", help="Limit the kernels and torch to this instruction set.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results and samples.")
def main(isa: str | None, threads: int, json_path: Path | None, **options: Any) -> None:
    """Measure the linears of a mixture-of-experts layer."""
    instruction_sets.force(isa)
    import torch

    if threads:
        torch.set_num_threads(threads)
    formats = linear_shapes.parse_names(options["formats"], linear_shapes.FORMATS, "formats")
    tokens = tuple(int(count) for count in options["tokens"].split(","))
    out = run(formats, tokens, int(options["gigabytes"] * 1e9), options["rounds"], options["seconds"])
    if json_path:
        json_path.write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
