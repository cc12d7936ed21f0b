"""Measure what drafts by the model's own copy in MXFP4 gain at batch 1.

    python benchmarks/speculation.py MODEL --text FILE          # acceptance on real text, and the gain on it
    python benchmarks/speculation.py MODEL --acceptance 0.94    # cost: drafts are accepted by chance, whatever they are

The first needs a trained model. The second needs none: random weights show what steps cost, and the verification
accepts each draft with the given probability. Engines with and without drafts take turns in every round. The
arithmetic counts bytes alone: k drafts read k copies of the weights in MXFP4, and one step of the model reads its own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
from torch import Tensor

from minifloat.engine import Engine, EngineOptions, SamplingParams, steps
from minifloat.engine.options import Dtype
from minifloat.engine.sampling import Choices, SamplingState, TokenChoice, verify
from minifloat.engine.speculation import SpeculationStats

PROMPT_CHARACTERS = 120
PROMPT_TOKENS = 64


def per_token(engine: Engine, prompts: Sequence[Any], params: SamplingParams) -> float:
    """Return the seconds of a token, one prompt at a time, without the prompts' own computation."""
    seconds, tokens = 0.0, 0
    for prompt in prompts:
        (text,) = engine.generate([prompt], params)
        assert text.timings.finished is not None
        assert text.timings.first_token is not None
        seconds += text.timings.finished - text.timings.first_token
        tokens += len(text.tokens) - 1
    return seconds / tokens


def accepting(probability: float, seed: int) -> Any:
    """Return a `verify` that accepts drafts by chance; the work on the logits is the same."""
    generator = random.Random(seed)

    def verify_by_chance(
        logits: Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]]
    ) -> list[Choices]:
        verify(logits, states, drafts)
        chosen: list[Choices] = []
        for proposed in drafts:
            taken: Choices = []
            for draft in proposed:
                taken.append(TokenChoice(draft))
                if generator.random() >= probability:
                    break
            else:
                taken.append(TokenChoice(0))
            chosen.append(taken)
        return chosen

    return patch.object(steps, "verify", verify_by_chance)


def counts(engine: Engine) -> SpeculationStats:
    """Return the counts of drafts since the start."""
    assert engine.speculator is not None
    return engine.speculator.stats + engine.speculator.last


@click.command()
@click.argument("model")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Prompts: beginnings of its paragraphs.")
@click.option("--acceptance", type=click.FloatRange(0, 1), help="Accept drafts by chance, with this probability.")
@click.option("--draft", help="Another checkpoint that drafts.")
@click.option(
    "--drafts", default="2,4,6", show_default=True, help="Numbers of drafts per step; 0: chosen by the engine."
)
@click.option("--prompts", "count", default=4, show_default=True)
@click.option("--output-len", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
def main(
    model: str,
    text: Path | None,
    acceptance: float | None,
    draft: str | None,
    drafts: str,
    count: int,
    output_len: int,
    rounds: int,
    temperature: float,
    dtype: Dtype,
) -> None:
    """Print milliseconds per token with and without drafts, and the gain by arithmetic."""
    if (text is None) == (acceptance is None):
        raise click.UsageError("give --text or --acceptance")
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=output_len, ignore_eos=True)
    options = EngineOptions(dtype=dtype, max_model_len=512, max_num_seqs=2, prefix_cache=False)
    drafting = replace(options, speculate="self" if draft is None else None, draft=draft)
    plain = Engine(model, options)
    vocab = plain.info.vocab_size
    prompts: list[Any] = [[(7 * i + 13 * n) % vocab for i in range(PROMPT_TOKENS)] for n in range(count)]
    if text is not None:
        paragraphs = [part.strip() for part in text.read_text(encoding="utf-8").split("\n\n")]
        prompts = [part[:PROMPT_CHARACTERS] for part in paragraphs if len(part) > 2 * PROMPT_CHARACTERS][:count]
    print(f"{'drafts':>6} {'ms/token':>9} {'without':>8} {'gain':>6} {'spread':>7} {'accepted':>9} "
          f"{'tokens/step':>11} {'draft ms':>9} {'by bytes':>9}")  # fmt: skip
    for number in map(int, drafts.split(",")):
        engine = Engine(model, replace(drafting, draft_tokens=number or 7))
        assert engine.speculator is not None
        engine.speculator._fixed = number > 0
        chance = accepting(acceptance, 0) if acceptance is not None else patch.object(steps, "verify", verify)
        ours, theirs = [], []
        with chance:
            per_token(engine, prompts[:1], params)  # touches all memory
            before = counts(engine)
            for _ in range(rounds):
                ours.append(per_token(engine, prompts, params))
                theirs.append(per_token(plain, prompts, params))
            after = counts(engine)
        gains = [b / a for a, b in zip(ours, theirs, strict=True)]
        proposed = after.draft_tokens - before.draft_tokens
        count = after.drafts - before.drafts
        taken = after.accepted_tokens - before.accepted_tokens
        rate = (engine.speculator.drafter.weight_bytes / plain.info.step_bytes) * proposed / count
        print(f"{number or 'auto':>6} {1e3 * statistics.median(ours):9.2f} {1e3 * statistics.median(theirs):8.2f} "
              f"{statistics.median(gains):5.2f}x {(max(gains) - min(gains)) / statistics.median(gains):7.1%} "
              f"{taken / proposed:9.1%} {1 + taken / count:11.2f} "
              f"{1e3 * (after.seconds - before.seconds) / proposed:9.2f} {(1 + taken / count) / (1 + rate):8.2f}x",
              flush=True)  # fmt: skip
        del engine


if __name__ == "__main__":
    main()
