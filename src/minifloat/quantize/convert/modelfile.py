"""The Modelfile with which Ollama runs a GGUF file: chat template, ends of answers and sampling.

Ollama knows a chat template only where it is nearly one of two dozen; others give the model the bare prompt. Here the
text between two messages is taken from the model's own template, by the roles of both, and it is written only if
conversations come out as that template writes them.

Source: ollama, docs/modelfile.md, template/template.go (`Named`, `Execute`), server/model.go (`detectChatTemplate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.layout import OLLAMA_FILE
from minifloat.model.runtime.config import generation_values, plain_config, read_generation
from minifloat.model.runtime.tokenizer import end_tokens, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: First line of a Modelfile that may be replaced.
MARK = "# Written by minifloat. To run it: ollama create NAME -f Modelfile"
#: Field of generation_config.json -> Ollama's parameter.
_PARAMETERS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p")},
    "repetition_penalty": "repeat_penalty",
}
_ROLES = {"s": "system", "u": "user", "a": "assistant"}
#: Conversations, a letter for each message, whose prompts show what is between two roles: ``(conversation, position)``.
_BETWEEN = {
    ("", "s"): ("su", 0),
    ("s", "u"): ("su", 1),
    ("", "u"): ("uau", 0),
    ("u", "a"): ("uau", 1),
    ("a", "u"): ("uau", 2),
    ("u", ""): ("uau", 3),
}
_CHECKED = ("u", "su", "uau", "suauau")
_TEMPLATE = (
    '{{ $before := "" }}{{ range .Messages }}'
    '{{ if eq .Role "system" }}%s{{ .Content }}'
    '{{ else if eq .Role "user" }}{{ if eq $before "system" }}%s{{ else if eq $before "assistant" }}%s{{ else }}%s'
    '{{ end }}{{ .Content }}{{ else if eq .Role "assistant" }}%s{{ .Content }}{{ end }}'
    "{{ $before = .Role }}{{ end }}%s"
)
_ORDER = (("", "s"), ("s", "u"), ("a", "u"), ("", "u"), ("u", "a"), ("u", ""))


def modelfile(checkpoint: Checkpoint, files: Sequence[Path]) -> tuple[str, str | None]:
    """Return the text of a Modelfile beside GGUF files, and a note where the chat template could not be written."""
    tokenizer = load_tokenizer(checkpoint.path)
    lines = [MARK, *(f"FROM ./{file.name}" for file in files)]
    template = _template(tokenizer)
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    values = dict(generation_values(checkpoint) or {})
    if values.get("do_sample") is False:
        values["temperature"] = 0
    for field, name in _PARAMETERS.items():
        if isinstance(values.get(field), int | float):
            lines.append(f"PARAMETER {name} {values[field]}")
    for token in sorted(end_tokens(read_generation(checkpoint), plain_config(checkpoint), tokenizer)):
        text = tokenizer.convert_ids_to_tokens(token)
        if isinstance(text, str) and '"' not in text and text.isprintable():
            lines.append(f'PARAMETER stop "{text}"')
    note = None
    if template is None and tokenizer.chat_template:
        note = f"{OLLAMA_FILE} has no TEMPLATE: this chat template writes more than a text between two messages."
    return "\n".join([*lines, ""]), note


def _template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template in Ollama's language; None for one that is not made of texts between messages."""
    if not tokenizer.chat_template:
        return None
    prompts = {roles: _prompt(tokenizer, roles) for roles in _CHECKED}
    between = {}
    for pair, (roles, position) in _BETWEEN.items():
        prompt, parts = prompts[roles], []
        if prompt is None and "s" not in roles:
            return None
        rest = prompt or ""
        for text in _texts(roles):
            part, _, rest = rest.partition(text)
            parts.append(part)
        between[pair] = None if prompt is None else [*parts, rest][position]
    if between["", "s"] is None:  # a model without system messages: the text begins the first message of the user
        between |= {("", "s"): between["", "u"], ("s", "u"): "\n\n"}
    for roles, prompt in prompts.items():
        pairs = zip(f" {roles}", f"{roles} ", strict=True)
        texts = (between[before.strip(), role.strip()] or "" for before, role in pairs)
        written = "".join(chain.from_iterable(zip(texts, [*_texts(roles), ""], strict=True)))
        if prompt is not None and written != prompt:
            return None
    found = [between[pair] or "" for pair in _ORDER]
    if any("{{" in text or '"""' in text for text in found) or found[-1].endswith('"'):
        return None
    return _TEMPLATE % tuple(found)


def _texts(roles: str) -> list[str]:
    return [f"{_ROLES[role].upper()}-{at}." for at, role in enumerate(roles)]


def _prompt(tokenizer: PreTrainedTokenizerBase, roles: str) -> str | None:
    """Return the prompt for a conversation without the token that llama.cpp itself puts first; None: refused."""
    messages = [{"role": _ROLES[role], "content": text} for role, text in zip(roles, _texts(roles), strict=True)]
    try:
        prompt: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:  # templates raise whatever they like for roles that they do not know
        return None
    first = tokenizer.bos_token
    adds = first is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    return str(prompt).removeprefix(str(first)) if adds else str(prompt)
