"""The tokenizer of a model folder, as llama.cpp stores it.

Tokenizers of GPT-2's kind keep their merges, and a name says how they split words. Those of SentencePiece's BPE have
scores instead, which here are the ranks of the merges: both merge the best pair first. Unigram has its own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from minifloat.errors import CheckpointError, UsageError, lookup
from minifloat.model.layouts.gguf.architectures import Architecture
from minifloat.model.layouts.gguf.pre_tokenizers import GPT2_WORDS, NAMES, PROBE, WORDS, name_of
from minifloat.model.runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNIGRAM = "Unigram"
_KINDS = ("bos", "eos", "unk", "sep", "pad", "mask")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
#: Texts of tokens that control a model although some tokenizers do not say so.
_CONTROL = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
_UNREACHABLE = -1e6  #: score of a token that no merge makes
_WORD_START = "\u2581"
Config = Mapping[str, Any]


def write_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, row: Architecture, config: Config, pre_tokenizer: str | None
) -> None:
    """Write tokens, merges or scores, special tokens and chat templates.

    Args:
        writer: Of the file.
        folder: The model folder.
        row: The architecture.
        config: The text model's config with all defaults of transformers.
        pre_tokenizer: llama.cpp's name for the way a tokenizer of GPT-2's kind splits words; None: found.
    """
    tokenizer = load_tokenizer(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"{folder}: its tokenizer has no tokenizer.json, and cannot be made into one")
    stored: dict[str, Any] = json.loads(backend.to_str())
    kind = stored["model"].get("type")
    if kind not in ("BPE", _UNIGRAM):
        raise UsageError(f"{folder}: a tokenizer of the kind {kind}; GGUF files are written with BPE and Unigram only")
    pieces = kind == _UNIGRAM or bool(stored["model"].get("byte_fallback"))
    writer.add_tokenizer_model("t5" if kind == _UNIGRAM else "llama" if pieces else "gpt2")
    if pre_tokenizer is not None:
        lookup("pre-tokenizer", pre_tokenizer, dict.fromkeys(NAMES.values()))
    writer.add_tokenizer_pre("default" if pieces else pre_tokenizer or _pre_tokenizer(folder, tokenizer, stored))
    scores = dict(stored["model"]["vocab"]) if kind == _UNIGRAM else {}
    tokens, types = _tokens(folder, stored, config["vocab_size"], pieces)
    writer.add_token_list(tokens)
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in stored["model"].get("merges", ())]
    if pieces:
        rank = {left + right: -float(at) for at, (left, right) in reversed(list(enumerate(merges)))}
        writer.add_token_scores([(scores or rank).get(token, _UNREACHABLE) for token in tokens])
        writer.add_add_space_prefix(_prepends_space(stored))
        if kind == _UNIGRAM:
            _write_unigram_rules(writer, folder, stored)
    else:
        writer.add_token_merges([" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges])
    writer.add_token_types(types)
    _write_special(writer, tokenizer, row, config)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        writer.add_chat_template([{"name": name, "template": text} for name, text in template.items()])
    elif template:
        writer.add_chat_template(template)


def _write_unigram_rules(writer: gguf.GGUFWriter, folder: Path, stored: Config) -> None:
    """Write how a tokenizer of the kind Unigram changes a text; spaces at its ends are SentencePiece's in llama.cpp."""
    charsmap, merges, unknown = None, False, []
    if stored["model"].get("byte_fallback"):
        unknown.append("byte_fallback")
    for step in _steps(stored, "normalizer"):
        match step:
            case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
                charsmap = base64.b64decode(text)
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " " | "\u2581"}:
                merges = True
            case {"type": "Strip" | "Precompiled"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"} | {"type": "Prepend"}:
                pass
            case _:
                unknown.append(str(step["type"]))
    steps = [step["type"] for step in _steps(stored, "pre_tokenizer")]
    if charsmap is not None and steps[:1] == ["WhitespaceSplit"]:  # of older T5, whose map turns all into spaces
        merges, steps = True, steps[1:]
    unknown += [step for step in steps if step != "Metaspace"]
    if unknown:
        raise UsageError(f"{folder}: llama.cpp's tokenizers of the kind Unigram have no {' and no '.join(unknown)}")
    writer.add_remove_extra_whitespaces(merges)
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)


def _pre_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase, stored: Config) -> str:
    found = name_of(tokenizer.encode(PROBE))
    if found is None:
        steps = _steps(stored, "pre_tokenizer")
        match [step["type"] for step in steps]:
            case ["ByteLevel"] if steps[0]["use_regex"]:
                found = WORDS[GPT2_WORDS]
            case ["Split", "ByteLevel"]:
                found = WORDS.get(steps[0]["pattern"].get("Regex"))
    if found is None:
        raise UsageError(
            f"{folder}: llama.cpp has no name for the way its tokenizer splits words; if it splits them as a known one "
            "does, name that with --gguf-pre-tokenizer (llama-bpe, qwen2, gpt-2, ...)"
        )
    return found


def _steps(stored: Config, key: str) -> list[Config]:
    whole = stored[key] or {}
    return [*whole.get("normalizers", whole.get("pretokenizers", [whole] if whole else []))]


def _tokens(folder: Path, stored: Config, size: int, pieces: bool) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token; ids without a token are unused."""
    texts, types = [f"[PAD{token}]" for token in range(size)], [int(gguf.TokenType.UNUSED)] * size
    added = {entry["content"]: entry for entry in stored["added_tokens"]}
    vocabulary, unk = stored["model"]["vocab"], stored["model"].get("unk_token")
    if stored["model"]["type"] == _UNIGRAM:
        unk = vocabulary[stored["model"]["unk_id"]][0]
        vocabulary = {text: at for at, (text, _) in enumerate(vocabulary)}
    ids = {**vocabulary, **{text: entry["id"] for text, entry in added.items()}}
    if max(ids.values()) >= size:
        raise CheckpointError(folder, f"its tokenizer has {max(ids.values()) + 1} tokens, and the model only {size}")
    for text, token in ids.items():
        kind = gguf.TokenType.NORMAL
        if text in added:
            is_control = added[text]["special"] or _CONTROL.fullmatch(text) is not None
            kind = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
        if pieces and text == unk:
            kind = gguf.TokenType.UNKNOWN
        elif pieces and _BYTE.fullmatch(text):
            kind = gguf.TokenType.BYTE
        texts[token] = text.replace(_WORD_START, " ") if kind is gguf.TokenType.USER_DEFINED else text
        types[token] = int(kind)
    return texts, types


def _prepends_space(stored: Config) -> bool:
    return any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for key in ("normalizer", "pre_tokenizer")
        for step in _steps(stored, key)
    )


def _write_special(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, row: Architecture, config: Config
) -> None:
    ids: dict[str, Any] = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in _KINDS}
    ids = {kind: config.get(f"{kind}_token_id") if token is None else token for kind, token in ids.items()}
    ids |= {kind: tokenizer.convert_tokens_to_ids(text) for kind, text in row.tokens}
    for kind, token in ids.items():
        if isinstance(token, int):
            getattr(writer, f"add_{kind}_token_id")(token)
    around = tokenizer.encode("a")
    writer.add_add_bos_token(around[0] == ids["bos"])
    writer.add_add_eos_token(around[-1] == ids["eos"])
