"""How a checkpoint turns a text into a vector or a score, as its own files say; no torch.

Embedding models of sentence-transformers list their modules in modules.json; rerankers are models with a head for
sequence classification, or compare the logits of two tokens. A checkpoint that says nothing of this generates text.

Source of names: sentence-transformers, ``models/Pooling.py``, ``cross_encoder/modules/logit_score.py``; of
`classifier_from_token`, `is_matryoshka` and `matryoshka_dimensions`: vLLM, ``model_executor/models/config.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from minifloat.checkpoint import CONFIG_FILE
from minifloat.checkpoint.files import parse_object, read_small
from minifloat.checkpoint.reader import Checkpoint
from minifloat.checkpoint.schema import check_fields, flag, integer, text
from minifloat.errors import CheckpointError, ConfigError

MODULES_FILE = "modules.json"
_TRANSFORMER_FILE, _PROMPTS_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
_LIMIT = 1 << 20
_CLASSIFIER = "ForSequenceClassification"
#: How the vectors of a text become one -> the name of the mode in sentence-transformers, and its older flag.
_MODES = {"last": ("lasttoken", "pooling_mode_lasttoken"), "mean": ("mean", "pooling_mode_mean_tokens")}
_OTHER_FLAGS = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


@dataclass(frozen=True)
class Pooling:
    """What becomes of the hidden states of a text, those after the last norm.

    Attributes:
        task: "embed": they become a vector; "score": the head multiplies them, and the result is a score.
        kind: "last": that of the last token counts; "mean": their mean.
        normalize: Whether the vector gets length 1.
        dimensions: Lengths to which a vector may be cut; None: none.
        any_dimensions: Whether it may be cut to every length.
        tokens: Of a score: the token that speaks for it and the one that speaks against it, whose logits' difference is
            the score (without the second, the logit itself); None: the head is the tensor ``score.weight``.
        is_probability: Whether the score is the sigmoid of that.
        max_tokens: Of the longest text; None: as the model says.
    """

    task: Literal["embed", "score"]
    kind: Literal["last", "mean"] = "last"
    normalize: bool = False
    dimensions: tuple[int, ...] | None = None
    any_dimensions: bool = False
    tokens: tuple[int, int | None] | None = None
    is_probability: bool = True
    max_tokens: int | None = None


def read_pooling(checkpoint: Checkpoint, token_id: Callable[[str], int | None]) -> Pooling | None:
    """Return how a checkpoint pools; None if it generates text."""
    config, folder = checkpoint.config, checkpoint.path
    modules = _modules(folder)
    pooling = _classifier(config, folder, token_id) if modules is None else _of_modules(modules, config, folder)
    if pooling is None:
        return None
    _require_causal(config, folder)
    return replace(pooling, max_tokens=_longest(folder))


def _read(folder: Path, name: str, loads: Callable[[str], Any] = json.loads) -> dict[str, Any] | None:
    try:
        return parse_object(read_small(folder, name, _LIMIT, ConfigError), folder / name, ConfigError, loads)
    except FileNotFoundError:
        return None


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return the modules of sentence-transformers, each with the last part of its type and its folder."""
    path = folder / MODULES_FILE
    found = _read(folder, MODULES_FILE, lambda content: {"modules": json.loads(content)})
    if found is None:
        return None
    modules = found["modules"]
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(path, "expected a list of modules")
    for module in modules:
        check_fields(module, {"type": text, "path": text}, path, ConfigError)
    return [(str(module.get("type")).rpartition(".")[2], module.get("path") or "") for module in modules]


def _of_modules(modules: list[tuple[str, str]], config: Mapping[str, Any], folder: Path) -> Pooling:
    names = [name for name, _ in modules]
    paths = dict(modules)
    if names == ["Transformer", "LogitScore"]:
        return replace(_logit_score(folder, paths["LogitScore"]), is_probability=_is_probability(config, folder))
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            folder / MODULES_FILE,
            f"expected the modules Transformer and Pooling, and Normalize or not, or LogitScore; found {names}",
        )
    dimensions = config.get("matryoshka_dimensions")
    check_fields(config, {"is_matryoshka": flag}, folder / CONFIG_FILE, ConfigError)
    if dimensions is not None and not (
        isinstance(dimensions, list) and all(type(length) is int and length > 0 for length in dimensions)
    ):
        raise ConfigError(folder / CONFIG_FILE, "matryoshka_dimensions: expected a list of positive integers")
    return Pooling(
        "embed",
        _kind(folder, f"{paths['Pooling']}/{CONFIG_FILE}"),
        normalize="Normalize" in names,
        dimensions=tuple(dimensions) if dimensions else None,
        any_dimensions=bool(config.get("is_matryoshka")) and not dimensions,
    )


def _required(folder: Path, name: str) -> dict[str, Any]:
    values = _read(folder, name)
    if values is None:
        raise CheckpointError(folder / name, f"the file is missing, and {MODULES_FILE} names it")
    return values


def _kind(folder: Path, name: str) -> Literal["last", "mean"]:
    """Return the mode of the module Pooling."""
    values = _required(folder, name)
    flags = dict.fromkeys((*(old for _, old in _MODES.values()), *(f"pooling_mode_{n}" for n in _OTHER_FLAGS)), flag)
    check_fields(values, {**flags, "pooling_mode": text, "include_prompt": flag}, folder / name, ConfigError)
    if values.get("include_prompt") is False:
        raise ConfigError(folder / name, "include_prompt: false is not supported: no tokens are left out")
    mode = values.get("pooling_mode")
    asked = {name for name in flags if values.get(name)} | ({mode} if isinstance(mode, str) else set())
    for kind, known in _MODES.items():
        if asked and asked <= set(known):
            return kind  # type: ignore[return-value]
    raise ConfigError(
        folder / name, f"expected pooling by the last token or the mean, found {', '.join(sorted(asked)) or 'neither'}"
    )


def _logit_score(folder: Path, path: str) -> Pooling:
    name = f"{path}/{CONFIG_FILE}"
    values = _required(folder, name)
    token = integer(0)
    check_fields(values, {"true_token_id": token, "false_token_id": token}, folder / name, ConfigError)
    if values.get("true_token_id") is None:
        raise ConfigError(folder / name, "true_token_id is missing")
    return Pooling("score", tokens=(values["true_token_id"], values.get("false_token_id")))


def _classifier(config: Mapping[str, Any], folder: Path, token_id: Callable[[str], int | None]) -> Pooling | None:
    """Return the scores of a model with a head for sequence classification, or of a choice among two tokens."""
    names, path = config.get("classifier_from_token"), folder / CONFIG_FILE
    if names is not None:
        if not isinstance(names, list) or len(names) not in (1, 2) or not all(isinstance(name, str) for name in names):
            raise ConfigError(path, "classifier_from_token: expected one token, or one against and one for a score")
        ids = [token_id(name) for name in names]
        if None in ids:
            raise ConfigError(path, f"classifier_from_token: the tokenizer has no token {names[ids.index(None)]!r}")
        *against, true = ids
        tokens = (true, against[0] if against else None)
        return Pooling("score", tokens=tokens, is_probability=_is_probability(config, folder))  # type: ignore[arg-type]
    architectures = config.get("architectures") or [""]
    if not str(architectures[0]).endswith(_CLASSIFIER):
        return None
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ConfigError(path, f"{architectures[0]}: expected one label, a score; it has {count}")
    return Pooling("score", is_probability=_is_probability(config, folder))


def _is_probability(config: Mapping[str, Any], folder: Path) -> bool:
    """Return whether sentence-transformers applies a sigmoid, its default, or nothing."""
    own = config.get("sentence_transformers")
    stated = (own if isinstance(own, dict) else {}).get("activation_fn")
    stated = stated or config.get("sbert_ce_default_activation_function")
    stated = stated or (_read(folder, _PROMPTS_FILE) or {}).get("activation_fn") or "Sigmoid"
    name = str(stated).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ConfigError(folder / CONFIG_FILE, f"activation_fn: expected Sigmoid or Identity, found {name!r}")
    return name == "Sigmoid"


def _longest(folder: Path) -> int | None:
    values = _read(folder, _TRANSFORMER_FILE) or {}
    path = folder / _TRANSFORMER_FILE
    check_fields(values, {"max_seq_length": integer(1), "do_lower_case": flag}, path, ConfigError)
    if values.get("do_lower_case"):
        raise ConfigError(path, "do_lower_case: true is not supported; the tokenizer decides on case")
    length: int | None = values.get("max_seq_length")
    return length


def _require_causal(config: Mapping[str, Any], folder: Path) -> None:
    nested = config.get("text_config")
    for values in (config, nested if isinstance(nested, dict) else {}):
        if values.get("is_causal") is False or values.get("use_bidirectional_attention"):
            raise ConfigError(
                folder / CONFIG_FILE, "its tokens see those after them; only decoders with a causal mask embed here"
            )
