"""The options of `compare_models` and `compare_served`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from minifloat.engine.options import DTYPES
from minifloat.errors import UnknownNameError, UsageError
from minifloat.evaluate.compare.verdict import Tolerance
from minifloat.model.runtime.inputs import ACTIVATIONS
from minifloat.model.runtime.lm_head import LM_HEADS

KV_CACHES = ("auto", "none", "fp8")


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """The options of every comparison.

    Attributes:
        window: Tokens per window, up to the context of the models; None: 256. Above 512, KL is shown by position.
        max_tokens: Number of tokens to use from the start of each text; None: all.
        tolerance: The bounds of the verdict.
        dtype: Dtype of the activations of all models, a name in `DTYPES`; None: that of each config.json.
        device: Device of the models, as in `Engine`.
        impl: Implementation of the kernels, as in `load`.
        revision: Branch, tag or commit of a baseline of the hub.
        command: The command line, for the report.
    """

    window: int | None = None
    max_tokens: int | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    dtype: str | None = None
    device: str = "cpu"
    impl: str = "auto"
    revision: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class ServedOptions(ScoringOptions):
    """The options of `compare_served`, besides those of `ScoringOptions`.

    Attributes:
        model: Name of the model on the server; None: the first that it lists.
        api_key: The server's key.
    """

    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ScoringOptions):
    """The options of `compare_models`, besides those of `ScoringOptions`.

    Attributes:
        weight_only: Do not quantize inputs, whatever a checkpoint declares.
        kv_cache: KV cache of the candidates: "auto" is FP8 where the checkpoint declares it, "none" rounds no keys and
            values, "fp8" rounds them.
        variants: Run a candidate that declares quantized inputs or an FP8 KV cache without these too.
        lm_head: Output layer of the candidates, as in `Engine`.
        activations: Inputs of the candidates' quantized weights: "int8" allows the CPU's kernels to round them.
        prompts: Number of prompts to continue greedily; 0: none.
        new_tokens: Tokens per continuation.
        tasks: Names of tasks of lm-evaluation-harness to run.
        task_path: A folder of task files.
        task_limit: Number of items of each task to use; None: all.
        attribute: Seconds of the search for the modules that do the damage; 0: no search.
        resume: Folder that keeps the scores, so that the same call continues after an interruption.
    """

    weight_only: bool = False
    kv_cache: str = "auto"
    variants: bool = False
    lm_head: str = "auto"
    activations: str = "bf16"
    prompts: int = 32
    new_tokens: int = 64
    tasks: Sequence[str] = ()
    task_path: str | os.PathLike[str] | None = None
    task_limit: int | None = None
    attribute: float = 0.0
    resume: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, table in (("kv_cache", KV_CACHES), ("lm_head", LM_HEADS), ("activations", ACTIVATIONS)):
            if getattr(self, name) not in table:
                raise UnknownNameError(name, getattr(self, name), table)
        if self.prompts < 0 or self.new_tokens < 1:
            raise UsageError(f"expected prompts >= 0 and new_tokens >= 1, got {self.prompts} and {self.new_tokens}")
