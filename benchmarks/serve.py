"""Measure `minifloat serve` under load through HTTP, beside llama.cpp's server: throughput, latencies, memory, start.

    python benchmarks/serve.py tinyllama-mxfp4 --llama-server PATH --gguf tinyllama-mxfp4.gguf --json serve.json

In the load "chats" each of some clients sends its next request when its last one is answered, with the lengths of real
chats; in "shared" all prompts also begin with the same tokens. The servers take turns: each row has one of its own. In
"mixed" eight clients decode while long prompts arrive. The clients measure the times; they stream over HTTP and share
the machine's cores with the server. RSS is that of the server process; the limit is its weights, its KV cache and 700
MiB. "own us" is the processor time of the server's Python threads outside of the model's steps, per token, and "own %"
is that time of a step over the step. llama.cpp's server has a slot per client; `llama_command` states its options.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import instruction_sets
from serve_process import CHATS, Server, ServerProcess, chats, figures, llama_command, prompt_of

from minifloat import Checkpoint
from minifloat.checkpoint import CONFIG_FILE
from minifloat.evaluate.bench.figures import CpuTime, MachineUse

MEBI = 1 << 20
ALLOWED_BYTES = 700 * MEBI
ALLOWED_ITL = 3.0
READ_BLOCK = 16 << 20
MIXED_CLIENTS, ARRIVALS = 8, 8
LOADS = ("chats", "shared", "mixed")
#: Clients of the row that has bars, the smallest speed over llama.cpp's server there, and the largest "own %".
BAR_CLIENTS, SMALLEST_SPEED, LARGEST_OWN = 32, 1.5, 0.05
#: Share of the machine's time beyond which a row beside other work is not to be quoted.
MOST_OTHERS = 0.05
#: llama.cpp rounds the tokens of a slot up to a multiple of this.
SLOT_STEP = 256


async def mixed(server: ServerProcess, output_len: int, prompt_len: int, pause: float) -> dict[str, float]:
    """Let clients decode while a long prompt arrives every `pause` seconds; return the figures of those clients."""
    start = time.perf_counter()
    decoding = [
        asyncio.create_task(server.ask(prompt_of(16, server.vocab, f"d{i}"), output_len)) for i in range(MIXED_CLIENTS)
    ]
    arriving = []
    for number in range(ARRIVALS):
        await asyncio.sleep(pause)
        arriving.append(asyncio.create_task(server.ask(prompt_of(prompt_len, server.vocab, f"a{number}"), 4)))
    answers = await asyncio.gather(*decoding)
    decode_figures = figures(answers, start, time.perf_counter())
    late = await asyncio.gather(*arriving)
    return decode_figures | {"arrivals_median_ttft_ms": statistics.median(1e3 * answer.ttft for answer in late)}


def read_seconds(model: Path) -> float:
    """Return the seconds to read all weights into a buffer, with the files in the page cache."""
    buffer = bytearray(READ_BLOCK)
    with Checkpoint.open(model) as checkpoint:
        shards = {checkpoint.shard_path(info.shard) for info in checkpoint.tensors.values()}
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for shard in shards:
            with open(shard, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds


def measure_mixed(model: Path, options: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Measure start, memory and the mixed load of one checkpoint, print the results, and return the record for JSON."""
    read = read_seconds(model)
    bare = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import minifloat.engine, minifloat.serve.server.app"], check=True)
    bare = time.perf_counter() - bare
    with Server(model, settings["threads"], options.split()) as server:
        at_start, info = server.rss(), server.model
        click.echo(
            f"\n{info['name']}: {info['runner']}, {info['scheme']}; ready after {server.ready:.2f} s, of which imports "
            f"{bare:.2f} and loading {info['load_seconds']:.2f}; reading the files {read:.2f} s "
            f"({info['load_seconds'] / read:.2f}x)"
        )
        asyncio.run(server.ask(prompt_of(settings["mixed_prompt"], server.vocab, "warm"), 4))
        run = asyncio.run(mixed(server, settings["mixed_output_len"], settings["mixed_prompt"], settings["pause"]))
        print_header()
        print_run("mixed", MIXED_CLIENTS, f"{model.name} {options}", run)
        after = server.rss()
    ratio = run["p99_itl_ms"] / run["median_itl_ms"]
    weights, cache = info["weight_bytes"], info["kv_bytes"]
    allowed = weights + cache + ALLOWED_BYTES
    click.echo(
        f"mixed: ITL p99 is {ratio:.2f}x its median ({verdict(ratio <= ALLOWED_ITL)}, at most {ALLOWED_ITL:.0f}x)\n"
        f"RSS {at_start / MEBI:,.0f} MiB when ready, {after / MEBI:,.0f} after the load, {allowed / MEBI:,.0f} allowed "
        f"(weights {weights / MEBI:,.0f} + KV cache {cache / MEBI:,.0f} + 700): "
        f"{verdict(max(at_start, after) <= allowed)}"
    )
    facts = {"ready_seconds": server.ready, "read_seconds": read, "import_seconds": bare}
    return {
        "model": info,
        "options": options,
        "rss_ready": at_start,
        "rss_after": after,
        "allowed": allowed,
        "mixed": run,
    } | facts


def verdict(good: bool) -> str:
    """Return the word for a bar that is reached or missed."""
    return "pass" if good else "SHORT"


def print_header() -> None:
    """Print the header of the table of runs."""
    click.echo(
        f"\n{'load':<7} {'clients':>7} {'server':<40} {'answers':>7} {'out tok/s':>9} {'TTFT p50 ms':>11} {'p99':>8} "
        f"{'ITL p50 ms':>10} {'p99':>8} {'errors':>6} {'own us':>7} {'own %':>6}"
    )


def print_run(load: str, clients: int, name: str, run: dict[str, Any]) -> None:
    """Print one row of the table of runs."""
    own = ""
    if "own_cpu" in run:
        own = f"{1e6 * run['own_cpu'] / run['output_throughput']:>7.0f} {run['own_cpu']:>6.1%}"
    others = run.get("others")
    doubt = f" not to be quoted: other processes used {others:.0%}" if others and others > MOST_OTHERS else ""
    click.echo(
        f"{load:<7} {clients:>7} {name:<40} {run['completed']:>7.0f} {run['output_throughput']:>9.1f} "
        f"{run['median_ttft_ms']:>11.1f} {run['p99_ttft_ms']:>8.1f} {run['median_itl_ms']:>10.2f} "
        f"{run['p99_itl_ms']:>8.2f} {run.get('failed', 0):>6.0f} {own:>14}{doubt}"
    )


def print_bars(clients: int, ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    """Print how many times as fast our servers are as the others in one row, and what our Python costs."""
    is_judged = clients == BAR_CLIENTS
    for name, run in ours.items():
        for other, peer in theirs.items():
            speed = run["output_throughput"] / peer["output_throughput"]
            bar = f" ({verdict(speed >= SMALLEST_SPEED)}, at least {SMALLEST_SPEED}x)" if is_judged else ""
            click.echo(f"  {name} over {other}: {speed:.2f}x{bar}")
        if is_judged and "own_cpu" in run:
            own, outside = run["own_cpu"], run["outside_steps"]
            click.echo(
                f"  {name}: its Python takes {own:.1%} of a step ({verdict(own <= LARGEST_OWN)}, at most "
                f"{LARGEST_OWN:.0%}), and {outside:.1%} of the time has no native step"
            )


#: Starts a server for some clients whose prompts have so many first tokens in common.
Start = Callable[[int, int], ServerProcess]


def our_servers(models: Sequence[Path], several: Sequence[str], threads: int) -> dict[str, Start]:
    """Return what starts `minifloat serve` for each checkpoint with each of several options, by name."""

    def start(model: Path, options: str, clients: int, prefix: int) -> ServerProcess:
        return Server(model, threads, ["--max-num-seqs", str(clients), *options.split()])

    return {
        f"{model.name} {options}".strip(): partial(start, model, options) for model in models for options in several
    }


def llama_servers(binary: Path | None, ggufs: Sequence[Path], vocab: int, threads: int) -> dict[str, Start]:
    """Return what starts llama.cpp's server for each file, by name; none without the server's path."""
    if binary is None:
        if ggufs:
            raise click.UsageError("--gguf needs --llama-server, the path of llama.cpp's server")
        return {}

    def start(gguf: Path, clients: int, prefix: int) -> ServerProcess:
        longest = prefix + max(map(sum, CHATS))
        context = -(-longest // SLOT_STEP) * SLOT_STEP
        command = llama_command(binary, gguf, threads=threads, slots=clients, context=context)
        return ServerProcess(command, "/health", {}, vocab)

    return {f"llama.cpp {gguf.name}": partial(start, gguf) for gguf in ggufs}


def measure_chats(
    load: str, ours: dict[str, Start], theirs: dict[str, Start], settings: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure one load of chats of all servers in turn, print each row, and yield it for JSON."""
    prefix = settings["shared_prefix"] if load == "shared" else 0
    print_header()
    for clients in settings["concurrency"]:
        runs = {}
        for name, start in (ours | theirs).items():
            with start(clients, prefix) as server:
                before = CpuTime.now([server.process.pid])
                run: dict[str, Any] = asyncio.run(chats(server, clients, settings["seconds"], prefix))
                use = MachineUse.between(before, CpuTime.now([server.process.pid]))
            runs[name] = run | {"others": use and use.others}
            print_run(load, clients, name, runs[name])
            yield {"load": load, "clients": clients, "server": name} | runs[name]
        print_bars(clients, *({name: runs[name] for name in kind} for kind in (ours, theirs)))


@click.command(help=__doc__.split("\n")[0])
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--llama-server", type=click.Path(exists=True, path_type=Path), help="Path of llama.cpp's server.")
@click.option("--gguf", "ggufs", multiple=True, type=click.Path(exists=True, path_type=Path), help="File for it.")
@click.option("--load", "loads", multiple=True, type=click.Choice(LOADS), default=LOADS, show_default=True)
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads of a server.")
@click.option("--concurrency", default="1,8,32,128", show_default=True, help="Numbers of clients that chat.")
@click.option("--seconds", default=30.0, show_default=True, help="Time of a row of chats.")
@click.option("--shared-prefix", default=256, show_default=True, help="Tokens that all prompts of `shared` begin with.")
@click.option("--mixed-output-len", default=128, show_default=True)
@click.option("--mixed-prompt", default=256, show_default=True, help="Tokens of the long prompts.")
@click.option("--pause", default=0.5, show_default=True, help="Seconds between arrivals in the mixed load.")
@click.option(
    "--options",
    "several",
    multiple=True,
    default=("",),
    help="Options of `minifloat serve`; repeated: a server of each.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    models: tuple[Path, ...],
    llama_server: Path | None,
    ggufs: tuple[Path, ...],
    loads: tuple[str, ...],
    concurrency: str,
    several: tuple[str, ...],
    json_path: Path | None,
    **settings: Any,
) -> None:
    """Measure a server for each of the checkpoints MODELS, and llama.cpp's server for each file."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    facts = instruction_sets.machine(settings["threads"])
    click.echo(instruction_sets.describe(facts))
    settings["concurrency"] = [int(clients) for clients in concurrency.split(",")]
    vocab = json.loads((models[0] / CONFIG_FILE).read_text())["vocab_size"]
    ours = our_servers(models, several, settings["threads"])
    theirs = llama_servers(llama_server, ggufs, vocab, settings["threads"])
    record: dict[str, Any] = {"machine": facts, "settings": settings | {"options": several}, "chats": [], "mixed": []}
    for load in loads:
        found: Iterator[dict[str, Any]]
        if load == "mixed":
            found = (measure_mixed(model, options, settings) for model in models for options in several)
        else:
            found = measure_chats(load, ours, theirs, settings)
        for row in found:
            record["mixed" if load == "mixed" else "chats"].append(row)
            if json_path:
                json_path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
