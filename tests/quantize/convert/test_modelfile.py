"""The Modelfile beside a GGUF file gives Ollama the prompts of the model's chat template, its ends and its sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from minifloat.quantize.convert import ConvertOptions, convert_checkpoint

MakeModel = Callable[..., Path]
LOOP = "{% for m in messages %}"
CHATML = (
    LOOP
    + "{% if loop.first and m.role != 'system' %}[system]Be good.[end]{% endif %}[{{ m.role }}]{{ m.content }}[end]"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}" + LOOP + "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
COUNTED = LOOP + "{{ loop.index }}: {{ m.content }}\n{% endfor %}"
#: Chat template -> the texts in the Modelfile: before a system message, before one of the user behind it, behind an
#: answer and at the start, before an answer, and at the end of the prompt.
EXPECTED = {
    CHATML: ("[system]", "[end][user]", "[end][user]", "[system]Be good.[end][user]", "[end][assistant]"),
    NO_SYSTEM: ("<s>[INST] ", "\n\n", "</s>[INST] ", "<s>[INST] ", " [/INST]"),
    COUNTED: None,
}


@pytest.fixture
def source(make_llama: MakeModel, tmp_path: Path) -> Path:
    return make_llama(tmp_path / "m")


def _written(source: Path, template: str | None) -> tuple[str, tuple[str, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(source)
    report = convert_checkpoint(source, source.parent / "out", "gguf", ConvertOptions(overwrite=True))
    return (source.parent / "out" / "Modelfile").read_text(), report.notes


@pytest.mark.parametrize("template", EXPECTED)
def test_a_template_is_written_by_the_texts_between_messages_or_not_at_all(source: Path, template: str) -> None:
    text, notes = _written(source, template)
    expected = EXPECTED[template]
    if expected is None:
        assert "TEMPLATE" not in text
        assert "Modelfile has no TEMPLATE" in notes[-1]
        return
    system, behind_system, behind_answer, first, answer = expected
    assert notes == ()
    assert text.splitlines()[:2] == [
        "# Written by minifloat. To run it: ollama create NAME -f Modelfile",
        "FROM ./m-BF16.gguf",
    ]
    user = (
        f'{{{{ if eq $before "system" }}}}{behind_system}{{{{ else if eq $before "assistant" }}}}{behind_answer}'
        f"{{{{ else }}}}{first}{{{{ end }}}}{{{{ .Content }}}}"
    )
    assert (
        'TEMPLATE """{{ $before := "" }}{{ range .Messages }}{{ if eq .Role "system" }}' + system + "{{ .Content }}"
        '{{ else if eq .Role "user" }}' + user + '{{ else if eq .Role "assistant" }}' + answer + "{{ .Content }}"
        "{{ end }}{{ $before = .Role }}{{ end }}" + answer + '"""\n' in text
    )


def test_sampling_and_ends_are_those_of_the_generation_config(source: Path) -> None:
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [257, 65], "repetition_penalty": 1.1}
    (source / "generation_config.json").write_text(json.dumps(values))
    parameters = [line for line in _written(source, None)[0].splitlines() if line.startswith("PARAMETER")]
    token = AutoTokenizer.from_pretrained(source).convert_ids_to_tokens(65)
    assert parameters == [
        *("PARAMETER temperature 0.6", "PARAMETER top_k 20", "PARAMETER repeat_penalty 1.1"),
        *(f'PARAMETER stop "{token}"', 'PARAMETER stop "</s>"'),
    ]
    (source / "generation_config.json").write_text(json.dumps({**values, "do_sample": False}))
    assert "PARAMETER temperature 0\n" in _written(source, None)[0]


def test_files_of_others_stay(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("Modelfile", "README.md"):
        (tmp_path / "out" / name).write_text("mine")
    notes = _written(source, None)[1]
    assert [note.endswith("is not of minifloat and stays as it is.") for note in notes] == [True, True]
    assert {(tmp_path / "out" / name).read_text() for name in ("Modelfile", "README.md")} == {"mine"}
