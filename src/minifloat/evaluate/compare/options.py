"""The options of `compare_models` and `compare_served`. Imports nothing heavy, so that commands can list them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from minifloat.engine.options import Dtype
from minifloat.numerics.ranges import AtLeastTwo, Count, Fraction, Natural, NonNegative, check_fields
from minifloat.quantize.limits import MAX_KL, MAX_PPL_INCREASE, MIN_SAME_TOP1


@dataclass(frozen=True)
class Tolerance:
    """The bounds that a candidate has to keep.

    Attributes:
        max_ppl_increase: Largest relative increase of perplexity, per text.
        max_kl: Largest mean KL divergence in nats per token.
        min_same_top1: Smallest same top-1, the share of tokens at which both have the same most probable token.
        margin: How far beyond its bound an interval that contains the bound may end, as a share of the loss that the
            bound allows: with 10% a perplexity increase of 1% may end at 1.1%, and a same top-1 of 92%, which allows a
            loss of 8%, at 91.2%.
        max_behavior_loss: Largest share of the prompts of `--behavior` that only the baseline answers well, less those
            that only the candidate does.

    Raises:
        UsageError: If a bound is below 0 or NaN, or if the fraction or the margin is above 1.
    """

    max_ppl_increase: NonNegative = MAX_PPL_INCREASE
    max_kl: NonNegative = MAX_KL
    min_same_top1: Fraction = MIN_SAME_TOP1
    margin: Fraction = 0.1
    max_behavior_loss: Fraction = 0.1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """The options of every comparison.

    Attributes:
        window: Tokens per window, up to the context of the models; above 512, KL is shown by position; None: 256.
        max_tokens: Tokens to use from the start of each text; None: all.
        tolerance: The bounds of the verdict.
        dtype: Dtype of the activations of all models; None: that of each config.json.
        device: Where to compute: cpu, cuda or cuda:N.
        impl: Implementation of the kernels, as in `minifloat.load`.
        behavior: Prompts with tools or JSON schemas that the models answer: a file of JSON Lines, or `builtin`.
        behavior_tokens: Tokens of an answer to such a prompt at most.
        revision: Branch, tag or commit of a baseline of the hub.
        command: The command line, for the report.
    """

    window: AtLeastTwo | None = None
    max_tokens: AtLeastTwo | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    dtype: Dtype | None = None
    device: str = "cpu"
    impl: str = "auto"
    behavior: str | None = None
    behavior_tokens: Count = 512
    revision: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ServedOptions(ScoringOptions):
    """The options of `compare_served`, besides those of `ScoringOptions`.

    Attributes:
        model: Name of the model on the server; None: the server's first.
        api_key: The server's key.
        baseline_url: Address of a server that answers the prompts of `behavior` as the baseline; None: the loaded model
            does.
    """

    model: str | None = None
    api_key: str | None = None
    baseline_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ScoringOptions):
    """The options of `compare_models`, besides those of `ScoringOptions`.

    Attributes:
        prompts: Prompts to continue greedily; 0: none.
        new_tokens: Tokens per continuation.
        attribute: Seconds of the search for the modules that do the damage; 0: no search.
        tasks: Names of tasks of lm-evaluation-harness to run.
        task_path: A folder of task files.
        task_limit: Items of each task; None: all.
        variants: Whether to run a candidate that declares quantized inputs or an FP8 KV cache without these too.
        weight_only: Whether to leave inputs unquantized, whatever a checkpoint declares.
        kv_cache: KV cache of the candidates. auto: FP8 where the checkpoint declares it; none: keys and values are not
            rounded; fp8: they are.
        lm_head: Output layer of the candidates, as `serve` has it.
        activations: Inputs of the candidates' quantized weights. int8: the CPU's kernels may round them.
        resume: Folder that keeps the scores, so that the same call continues after an interruption.
    """

    prompts: Natural = 32
    new_tokens: Count = 64
    attribute: NonNegative = 0.0
    tasks: tuple[str, ...] = ()
    task_path: Path | None = None
    task_limit: Count | None = None
    variants: bool = False
    weight_only: bool = False
    kv_cache: Literal["auto", "none", "fp8"] = "auto"
    lm_head: Literal["auto", "bf16", "fp8"] = "auto"
    activations: Literal["bf16", "int8"] = "bf16"
    resume: Path | None = None
