"""`FileTokenizer` gives the tokens, texts and chats of transformers' tokenizer of the same folder."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minifloat.errors import ChatTemplateError, CheckpointError
from minifloat.model.runtime.templates import apply_chat_template, chat_prompt
from minifloat.model.runtime.tokenizer import load_tokenizer, serving_tokenizer
from minifloat.model.runtime.tokenizer_files import (
    _REGISTERED,
    _UNREGISTERED,
    _USUALLY_GENERIC,
    FileTokenizer,
    read_file_tokenizer,
)

EXAMPLE = Path(__file__).parents[3] / "examples" / "storybook-4m"
WORDS = "Once upon a time there was a little girl. It's 12345 o'clock, isn't it? Größe über 日本語 café!\n\n  def f(x):"
CONTROL = ["<s>", "</s>", "<unk>"]
TEXTS = [
    "",
    "Hello world",
    "  two leading spaces, and trailing  ",
    "line\nline\r\n\n\n tabs\t\tend",
    "It's 12345.678 o'clock, ISN'T it ?  . , !",
    "Größe über 日本語 🦙 e\u0301 naïve",
    "<s>control</s> tokens<unk> inside<tool> text <tool>",
    "[INST] <|im_start|>user\n",
]
CHAT = [
    {"role": "system", "content": "Be  brief.<tool>"},
    {"role": "user", "content": "  What is </s><s> here?\n"},
    {"role": "assistant", "content": "日本 <unk>"},
    {"role": "user", "content": ""},
]
TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "{%- for m in messages %}\n    {%- if m['role'] == 'system' %}[{{ m['content'] | trim }}]\n    {%- else %}"
    "{{- '<tool>' + m['content'] + eos_token }}\n{% endif %}\n{%- endfor %}{{ flag }}{{ tools is none }}",
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}"
    "{% generation %}{{ m.content[:4] }}{% endgeneration %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    "{{ ns.last }}{{ messages | tojson }}{{ dict(a=1) }}{{ 'x'.join(messages[1].content.split('s')) }}",
]


def trained(model: Any, pre_tokenizer: Any, special: list[str], alphabet: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS, *TEXTS[1:5]], trainer)
    return tokenizer


def byte_level(special: list[str] = CONTROL) -> Tokenizer:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = trained(models.BPE(), pre, special, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def template(tokenizer: Tokenizer, single: str) -> Tokenizer:
    tokens = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


def llama2(single: str = "<s> $A") -> Tokenizer:
    """As the tokenizer.json of Llama 2: bytes as tokens, spaces by the normalizer."""
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *alphabet], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS], trainer)
    state = json.loads(tokenizer.to_str())  # bytes are no added tokens in Llama's file
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in CONTROL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return template(tokenizer, single)


def qwen() -> Tokenizer:
    """As the tokenizer.json of Qwen 2: words by a pattern, added tokens after the vocabulary."""
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|."), behavior="isolated")
    pre = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = trained(models.BPE(), pre, [], pre_tokenizers.ByteLevel.alphabet())
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def with_tool(tokenizer: Tokenizer, **flags: bool) -> Tokenizer:
    """Add a token that is not special."""
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, **flags)])
    return tokenizer


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QWEN = {
    "tokenizer_class": "Qwen2Tokenizer",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": "<|endoftext|>",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "errors": "replace",
    "model_max_length": 131072,
}

#: Name -> model type, tokenizer and tokenizer_config.json (None: no file).
CASES: dict[str, tuple[str, Callable[[], Tokenizer], dict[str, Any] | None]] = {
    "generic": ("llama", byte_level, GENERIC),
    "no tokenizer_config.json": ("llama", byte_level, None),
    "no class": ("mistral", lambda: with_tool(byte_level()), {"bos_token": "<s>", "add_prefix_space": True}),
    "begins and ends": ("llama", lambda: template(byte_level(), "<s> $A </s>"), GENERIC | {"add_bos_token": True}),
    "added tokens": ("llama", lambda: with_tool(byte_level(), lstrip=True, rstrip=True), GENERIC),
    "spaces cleaned up": ("llama", byte_level, GENERIC | {"clean_up_tokenization_spaces": True}),
    "extra special": ("llama", byte_level, GENERIC | {"extra_special_tokens": ["<unk>"]}),
    "added token objects": (
        "llama",
        byte_level,
        GENERIC | {"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True, "normalized": False}},
    ),
    "Llama 3": ("llama", lambda: template(byte_level(), "<s> $A"), LLAMA | {"tokenizer_class": "LlamaTokenizer"}),
    "Llama 2": ("llama", llama2, LLAMA | {"legacy": False, "clean_up_tokenization_spaces": False}),
    "Llama 2, legacy": ("llama", llama2, LLAMA | {"legacy": True, "sp_model_kwargs": {}}),
    "Llama 2, no prefix": ("llama", llama2, LLAMA | {"add_prefix_space": False, "add_bos_token": True}),
    "Llama 2, no BOS": ("llama", lambda: llama2("$A"), LLAMA | {"legacy": None, "add_bos_token": False}),
    "Llama 2 of Mistral": ("mistral", lambda: with_tool(llama2()), LLAMA | {"legacy": True}),
    "Qwen": ("qwen3", lambda: with_tool(qwen()), QWEN | {"add_bos_token": False}),
    "Qwen 2 of another class": ("qwen2", qwen, QWEN | {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "Qwen 3 of another class": ("qwen3_moe", qwen, QWEN | {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "Qwen without a class": ("qwen3", qwen, {"eos_token": "<|im_end|>", "add_prefix_space": True}),
}


def save(folder: Path, name: str, **changes: Any) -> Path:
    """Write the files of a case; `changes` are made to tokenizer_config.json."""
    model_type, make, config = CASES[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    make().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


def both(folder: Path) -> tuple[FileTokenizer, Any]:
    """The tokenizer of a folder without and with transformers."""
    ours = read_file_tokenizer(folder)
    assert isinstance(ours, FileTokenizer), ours
    return ours, load_tokenizer(folder)


def assert_equal_tokens(ours: FileTokenizer, theirs: Any) -> None:
    for text in TEXTS:
        for add in (True, False):
            expected = theirs(text, add_special_tokens=add).input_ids
            assert ours(text, add_special_tokens=add, verbose=False).input_ids == expected, text
    vocabulary = len(theirs)
    rng = random.Random(0)
    drawn = [[rng.randrange(vocabulary) for _ in range(12)] for _ in range(40)]
    for ids in [*drawn, *(theirs(text).input_ids for text in TEXTS), []]:
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    tokens = list(range(vocabulary + 3))
    assert ours.convert_ids_to_tokens(tokens) == theirs.convert_ids_to_tokens(tokens)
    assert ours.convert_ids_to_tokens(vocabulary + 3) is theirs.convert_ids_to_tokens(vocabulary + 3) is None
    assert ours.all_special_ids == theirs.all_special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert_equal_tokens(*both(save(tmp_path / "m", name)))


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("model_type", [*_USUALLY_GENERIC, *_UNREGISTERED])
def test_other_types_use_the_file_as_it_is(model_type: str, tokenizer_class: str | None, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "generic")
    config = GENERIC | {"tokenizer_class": tokenizer_class}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = both(folder)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        ids = theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.all_special_ids == theirs.all_special_ids


@pytest.mark.parametrize("model_type", [name for name, kind in _REGISTERED.items() if kind.startswith("Qwen")])
def test_types_with_the_tokenizer_of_qwen(model_type: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "Qwen")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = both(folder)
    for text in [*TEXTS, "\u0915\u093f\u0924\u093e\u092c \u0e01\u0e33 x\u0327\u0301y"]:
        assert ours(text).input_ids == theirs(text).input_ids
    if model_type.startswith("qwen3_5"):
        assert r"\p{M}" in json.loads(ours.backend.to_str())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]


def test_the_tokenizer_of_the_example_is_that_of_transformers() -> None:
    ours, theirs = both(EXAMPLE)
    assert_equal_tokens(ours, theirs)


@pytest.mark.parametrize("name", ["generic", "Llama 2, legacy", "Llama 2", "Qwen", "added tokens"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_chats_are_those_of_transformers(name: str, template: str, tmp_path: Path) -> None:
    ours, theirs = both(save(tmp_path / "m", name, chat_template=template))
    options: dict[str, Any] = {"add_generation_prompt": True, "flag": "yes </s>"}
    text = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    tokens = theirs.apply_chat_template(CHAT, return_dict=False, sanitize_control_tokens=True, **options)
    for tokenizer in (ours, theirs):
        assert apply_chat_template(tokenizer, CHAT, **options) == text
        assert chat_prompt(tokenizer, CHAT, **options).tokens == tokens


def test_a_chat_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "generic", chat_template=TEMPLATES[1])
    (folder / "chat_template.jinja").write_text(TEMPLATES[0])
    ours, theirs = both(folder)
    assert ours.chat_template == theirs.chat_template == TEMPLATES[0]


@pytest.mark.parametrize("code", ["().__class__", "messages.append(1)", "raise_exception('no')", "namespace(_x=1)"])
def test_templates_that_leave_the_sandbox_or_refuse_are_errors(code: str, tmp_path: Path) -> None:
    ours, theirs = both(save(tmp_path / "m", "generic", chat_template="{{ " + code + ".__subclasses__() }}"))
    for tokenizer in (ours, theirs):
        with pytest.raises(ChatTemplateError, match=r"unsafe|undefined|no$|underscore|not set"):
            apply_chat_template(tokenizer, CHAT)
    with pytest.raises(Exception, match=r"unsafe|undefined|no$|underscore|not set"):
        theirs.apply_chat_template(CHAT, tokenize=False)


def test_special_tokens_map_counts_where_the_config_lists_no_added_tokens(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "generic")
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<unk>", "eos_token": {"content": "<s>"}}))
    ours, theirs = both(folder)
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.eos_token_id == theirs.eos_token_id == theirs.convert_tokens_to_ids("<s>")


def test_added_tokens_of_the_config_that_are_those_of_the_file_change_nothing(tmp_path: Path) -> None:
    theirs = load_tokenizer(save(tmp_path / "m", "Llama 2, legacy"))
    theirs.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "llama"}')
    assert_equal_tokens(*both(tmp_path / "saved"))


def padded(state: dict[str, Any]) -> None:
    state["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_token": "<s>"}, "has the field 'image_token'"),
        ({"auto_map": {}}, "has the field 'auto_map'"),
        ({"split_special_tokens": True}, "splits special tokens"),
        ({"tokenizer_class": "GPT2Tokenizer"}, "its class is GPT2Tokenizer"),
        ({"eos_token": "<end>"}, "does not have '<end>' as a plain special token"),
        ({"add_bos_token": True}, "add_bos_token of tokenizer_config.json contradicts tokenizer.json"),
        ({"chat_template": [{"name": "default", "template": ""}]}, "several chat templates"),
        ({"added_tokens_decoder": {"0": {"content": "<x>"}}}, "differ in an added token"),
        ({"extra_special_tokens": {"a": "<s>"}}, "further special tokens are no list"),
    ],
)
def test_what_only_transformers_knows_is_left_to_it(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    found = read_file_tokenizer(save(tmp_path / "m", "generic", **changes))
    assert isinstance(found, str)
    assert reason in found


def test_other_models_and_files_are_left_to_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", "generic")
    state = json.loads((folder / "tokenizer.json").read_text())
    padded(state)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert "truncates or pads" in str(read_file_tokenizer(folder))
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizers cannot use" in str(read_file_tokenizer(folder))
    (folder / "config.json").write_text('{"model_type": "gemma2"}')
    save(tmp_path / "n", "generic")
    (tmp_path / "n" / "config.json").write_text('{"model_type": "gemma2"}')
    assert "'gemma2'" in str(read_file_tokenizer(tmp_path / "n"))
    (tmp_path / "n" / "additional_chat_templates").mkdir()
    assert "several chat templates" in str(read_file_tokenizer(tmp_path / "n"))


def test_the_log_says_why_transformers_reads_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tmp_path / "m", "generic", image_token="<s>")
    with caplog.at_level(logging.INFO, "minifloat"):
        tokenizer = serving_tokenizer(folder)
    assert not isinstance(tokenizer, FileTokenizer)
    assert "transformers reads the tokenizer, which takes seconds, because" in caplog.text
    assert "'image_token'" in caplog.text
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json; give the folder that holds it"):
        serving_tokenizer(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such folder"):
        serving_tokenizer(tmp_path / "none")
