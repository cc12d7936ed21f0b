"""`FileTokenizer`: a tokenizer.json run by the library `tokenizers` alone, where that gives transformers' tokens.

Importing transformers takes seconds. Its rules about classes, added tokens and flags are followed here for the models
of the decoders; for any other tokenizer `read_file_tokenizer` returns the reason.

Source: transformers, ``tokenization_utils_tokenizers.py``, ``tokenization_auto.py``, `LlamaTokenizer` and Qwen2's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from minifloat.checkpoint import CONFIG_FILE
from minifloat.checkpoint.config_schema import check_depth
from minifloat.checkpoint.files import list_folder, parse_object, read_small
from minifloat.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text."""

    input_ids: list[int]


class FileTokenizer:
    """A tokenizer of one tokenizer.json, with the methods of transformers' tokenizers that serving calls."""

    def __init__(
        self, backend: Tokenizer, named: Mapping[str, str], extra: Sequence[str], chat_template: str | None
    ) -> None:
        self.backend, self.chat_template = backend, chat_template
        self._named = dict(named)
        self._special = list(dict.fromkeys([*named.values(), *extra]))

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Encoding:
        # `encode_batch` lets other threads run, which `encode` does not
        return Encoding(list(self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids))

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Return the text of tokens; spaces are never cleaned up, as transformers does not for these tokenizers."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Return the name of a token in the vocabulary, or those of several; None for an id that has none."""
        if isinstance(ids, int):
            return self._name(ids)
        return [self._name(token) for token in ids]

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added ones included, by its name."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token; that of the unknown token, which may be None, for a name that has none."""
        found = self.backend.token_to_id(token)
        return self._id("unk_token") if found is None else int(found)

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def all_special_ids(self) -> list[int]:
        return [token for text in self._special if (token := self.backend.token_to_id(text)) is not None]

    def encode_as_text(self, text: str) -> list[int]:
        """Return the tokens of a text in which no added token is recognized."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._named)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    def _id(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _name(self, token: int) -> str | None:
        name = self.backend.id_to_token(int(token))
        return None if name is None else str(name)


_TOKENIZER, _CONFIG, _SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_LIMIT = 1 << 30
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Fields of tokenizer_config.json that change neither tokens nor texts of one prompt.
_IGNORED = frozenset(
    {
        "backend",
        "errors",
        "is_local",
        "local_files_only",
        "max_length",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "sp_model_kwargs",
        "spaces_between_special_tokens",
        "tokenizer_file",
        "truncation_side",
        "use_default_system_prompt",
        "use_fast",
    }
)
_READ = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "legacy",
        "split_special_tokens",
        "tokenizer_class",
        *_NAMES,
    }
)
#: transformers' names of the class that uses tokenizer.json as it is.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
#: ``model_type`` -> transformers' tokenizer class; types that are missing have none.
_REGISTERED = dict.fromkeys(
    ["qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"],
    "Qwen2Tokenizer",
) | dict.fromkeys(("mistral", "mixtral"), "TokenizersBackend")
#: Types whose class transformers takes whatever tokenizer_config.json names.
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_REGISTERED |= dict.fromkeys(_QWEN3_5, "Qwen3_5Tokenizer")
#: Types whose class is `_GENERIC` in transformers; read here where tokenizer_config.json names no other.
_USUALLY_GENERIC = [
    "ernie4_5",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "minimax_m2",
    "ministral",
    "nemotron",
    "olmo2",
    "olmo3",
    "phi3",
    "stablelm",
]
#: Types for which transformers has no class.
_UNREGISTERED = [
    "arcee",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "exaone4",
    "gemma4",
    "gemma4_text",
    "gpt_oss",
    "helium",
    "llama",
    "seed_oss",
    "smollm3",
]
#: Special tokens that a class has where tokenizer_config.json names none.
_CLASS_TOKENS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    **dict.fromkeys(
        ("Qwen2Tokenizer", "Qwen3_5Tokenizer"),
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    ),
}
#: Source: Qwen2's tokenizer.json.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Source: transformers 5.23, models/qwen3_5/tokenization_qwen3_5.py: marks belong to words.
_QWEN3_5_WORDS = _QWEN2_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class _OtherTokenizer(Exception):
    """transformers has to read the tokenizer; the message says why."""


def read_file_tokenizer(folder: Path) -> FileTokenizer | str:
    try:
        return _read(folder.resolve())
    except _OtherTokenizer as error:
        return str(error)
    except (OSError, ValueError, CheckpointError, StorageError) as error:
        return f"its files cannot be read: {error}"


def _read(folder: Path) -> FileTokenizer:
    files = set(list_folder(folder))
    if not {_TOKENIZER, CONFIG_FILE} <= files:
        raise _OtherTokenizer(f"it has no {_TOKENIZER}, or no {CONFIG_FILE}")
    model_config = _object(folder, CONFIG_FILE)
    if _TEMPLATES in files or "tekken.json" in files:
        raise _OtherTokenizer("it has several chat templates, or a tekken.json")
    config = _object(folder, _CONFIG) if _CONFIG in files else {}
    others = set(config) - _IGNORED - _READ
    if others:
        raise _OtherTokenizer(f"{_CONFIG} has the field {min(others)!r}")
    if config.get("split_special_tokens"):
        raise _OtherTokenizer("it splits special tokens")
    data = read_small(folder, _TOKENIZER, _LIMIT, CheckpointError)
    try:
        backend = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise _OtherTokenizer(f"tokenizers cannot use its {_TOKENIZER}: {error}") from error
    if backend.truncation is not None or backend.padding is not None:
        raise _OtherTokenizer(f"its {_TOKENIZER} truncates or pads")
    hub_class = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    kind = _class_of(model_config.get("model_type"), hub_class, b'"ByteLevel"' in data)
    is_bpe = isinstance(backend.model, models.BPE)
    if not is_bpe and (kind not in _GENERIC or config.get("clean_up_tokenization_spaces")):
        raise _OtherTokenizer("it is no BPE")
    named, extra = _special_tokens(folder, files, config, kind)
    _check_added(backend, config, [*named.values(), *extra], rebuilt=kind not in _GENERIC)
    if kind == "LlamaTokenizer":
        _as_llama(backend, config)
    elif kind == "Qwen2Tokenizer":
        _as_qwen2(backend, config, _QWEN2_WORDS)
    elif kind == "Qwen3_5Tokenizer":
        _as_qwen2(backend, config, _QWEN3_5_WORDS)
    tokenizer = FileTokenizer(backend, named, extra, _chat_template(folder, files, config))
    _check_flags(tokenizer, config)
    return tokenizer


def _object(folder: Path, name: str) -> dict[str, Any]:
    value = parse_object(read_small(folder, name, _LIMIT, CheckpointError), folder / name, CheckpointError)
    check_depth(value, folder / name, CheckpointError)
    return value


def _class_of(model_type: Any, hub_class: Any, is_byte_level: bool) -> str:
    named = None if hub_class is None else str(hub_class).removesuffix("Fast")
    registered = _REGISTERED.get(str(model_type))
    if registered in _GENERIC and importlib.util.find_spec("mistral_common") is not None:
        raise _OtherTokenizer("mistral-common is installed, which transformers prefers")
    if model_type in _USUALLY_GENERIC and named in (None, *_GENERIC):
        return _GENERIC[1]
    if model_type not in (*_REGISTERED, *_UNREGISTERED):
        raise _OtherTokenizer(f"the model_type is {model_type!r}")
    if named is None:
        kind = registered or _GENERIC[1]
    elif registered in _GENERIC or (named == "LlamaTokenizer" and is_byte_level and model_type != "qwen2"):
        kind = _GENERIC[1]
    else:
        kind = registered if model_type in ("qwen2", *_QWEN3_5) and registered else named
    if kind not in (*_GENERIC, *_CLASS_TOKENS):
        raise _OtherTokenizer(f"its class is {kind}")
    return kind


def _special_tokens(
    folder: Path, files: set[str], config: Mapping[str, Any], kind: str
) -> tuple[dict[str, str], list[str]]:
    """Return the special tokens that have names, by these names in transformers' order, and the others."""
    stated = {name: config[name] for name in _NAMES if name in config}
    if "added_tokens_decoder" not in config:
        if "added_tokens.json" in files:
            raise _OtherTokenizer("it has an added_tokens.json")
        more = _object(folder, _SPECIAL) if _SPECIAL in files else {}
        if set(more) - set(_NAMES):
            raise _OtherTokenizer(f"{_SPECIAL} has more than named tokens")
        stated |= more
    texts = _CLASS_TOKENS.get(kind, {}) | {name: _content(value) for name, value in stated.items()}
    lists = [config.get(key) or [] for key in ("extra_special_tokens", "additional_special_tokens")]
    if any(not isinstance(value, list) for value in lists) or all(lists):
        raise _OtherTokenizer("its further special tokens are no list, or two")
    named = {name: text for name in _NAMES if (text := texts.get(name)) is not None}
    return named, [text for values in lists for value in values if (text := _content(value)) is not None]


def _content(token: Any) -> str | None:
    if token is None or isinstance(token, str):
        return token
    if isinstance(token, dict) and isinstance(token.get("content"), str):
        return str(token["content"])
    raise _OtherTokenizer(f"the special token {token!r} is unusual")


def _check_added(backend: Tokenizer, config: Mapping[str, Any], special: Sequence[str], *, rebuilt: bool) -> None:
    """Check that tokenizer.json has the added tokens that transformers would have."""
    added = backend.get_added_tokens_decoder()
    stated = config.get("added_tokens_decoder")
    if stated is not None:
        if not isinstance(stated, dict) or not all(isinstance(value, dict) for value in stated.values()):
            raise _OtherTokenizer("its added_tokens_decoder is unusual")
        fields = {int(token): _as_added(value) for token, value in stated.items()}
        if any(repr(added.get(token)) != repr(value) for token, value in fields.items()):
            raise _OtherTokenizer(f"{_CONFIG} and {_TOKENIZER} differ in an added token")
        if rebuilt and set(fields) != set(added):
            raise _OtherTokenizer(f"{_TOKENIZER} has added tokens that {_CONFIG} lacks")
    known = {token.content: token for token in added.values()}
    for text in special:
        token = known.get(text)
        if token is None or repr(token) != repr(AddedToken(text, special=True, normalized=False)):
            raise _OtherTokenizer(f"{_TOKENIZER} does not have {text!r} as a plain special token")
    if rebuilt:
        size = backend.get_vocab_size(with_added_tokens=False)
        in_model = {token: backend.model.token_to_id(value.content) for token, value in added.items()}
        appended = sorted(token for token, found in in_model.items() if found != token)
        if appended != list(range(size, size + len(appended))):
            raise _OtherTokenizer("the ids of its added tokens do not follow its vocabulary")


def _as_added(value: Mapping[str, Any]) -> AddedToken:
    try:
        return AddedToken(**{name: item for name, item in value.items() if name != "__type"})
    except TypeError as error:
        raise _OtherTokenizer(f"the added token {value!r} is unusual") from error


def _as_llama(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    """Give a tokenizer the parts that `LlamaTokenizer` has, whatever tokenizer.json says."""
    _set_model(backend, byte_fallback=True, fuse_unk=True, affix=None)
    stated = config.get("add_prefix_space")
    has_prefix = True if stated is None else bool(stated)
    scheme = ("always" if config.get("legacy", False) else "first") if has_prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


def _as_qwen2(backend: Tokenizer, config: Mapping[str, Any], words: str) -> None:
    """Give a tokenizer the parts that `Qwen2Tokenizer` or that of Qwen3.5 has, whatever tokenizer.json says."""
    _set_model(backend, byte_fallback=False, fuse_unk=False, affix="")
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()


def _set_model(backend: Tokenizer, *, byte_fallback: bool, fuse_unk: bool, affix: str | None) -> None:
    model = backend.model
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        raise _OtherTokenizer("its BPE marks the insides or ends of words")
    model.dropout, model.unk_token, model.ignore_merges = None, None, False
    model.byte_fallback, model.fuse_unk = byte_fallback, fuse_unk
    model.continuing_subword_prefix = model.end_of_word_suffix = affix


def _chat_template(folder: Path, files: set[str], config: Mapping[str, Any]) -> str | None:
    if _TEMPLATE in files:
        return read_small(folder, _TEMPLATE, _LIMIT, CheckpointError).decode()
    template = config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise _OtherTokenizer("it has several chat templates")
    return template


def _check_flags(tokenizer: FileTokenizer, config: Mapping[str, Any]) -> None:
    """Check that the flags for tokens around a text say what tokenizer.json does."""
    for flag, position in (("add_bos_token", 0), ("add_eos_token", -1)):
        if config.get(flag) is None:
            continue
        name = flag.removeprefix("add_")
        token = tokenizer.convert_tokens_to_ids(tokenizer._named.get(name, "")) if name in tokenizer._named else None
        ids = tokenizer("a").input_ids
        if (bool(ids) and token is not None and ids[position] == token) != bool(config[flag]):
            raise _OtherTokenizer(f"{flag} of {_CONFIG} contradicts {_TOKENIZER}")
