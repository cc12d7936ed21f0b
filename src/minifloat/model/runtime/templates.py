"""Chat templates without transformers: rendered in Jinja's sandbox, with control tokens of messages kept apart.

A template sees strings, numbers and containers only and is stopped once its text is too long; nothing bounds its time
and memory. Control tokens in messages, tools and documents become plain text, so that none can pretend to be another
role.

Source: transformers, ``utils/chat_template_utils.py``. Left out: masks of the assistant's tokens, and messages whose
content is a list.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from minifloat.errors import ChatTemplateError

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Characters that a template may write, unless the caller says otherwise.
MAX_CHARACTERS = 1 << 24
#: Length of the longest error of a template that is passed on.
_MAX_ERROR = 500
#: Names for a message's reasoning, of which transformers fills the first and second from the others.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Characters for private use, around the control tokens in the text of messages.
_START, _END = "\U000f0000", "\U000f0001"
_ESCAPED_MARKS = {json.dumps(mark)[1:-1]: mark for mark in (_START, _END)}
#: Behind the text of a message that an answer continues, as transformers writes it; the template may drop the blank.
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
#: Characters of the end of a prompt, where no end of the last message is found.
_PROMPT_END = 200


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks the assistant's text for training; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dictionary:
    """What templates may do with the name `dict`: call it, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, by which templates could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2, so that `namespace(self=...)` works
        self, others = args[0], args[1:]
        values = dict(*others, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"templates cannot set {name!r}: it begins with an underscore")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter; marks around control tokens stay marks."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for escaped, mark in _ESCAPED_MARKS.items() if ensure_ascii else ():
        text = text.replace(escaped, mark)
    return text


def _refuse(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _now(template: str) -> str:
    return datetime.now().strftime(template)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _render(template: str, values: Mapping[str, Any], max_characters: int) -> str:
    """Return the text that a chat template makes of plain values, of which others become their names."""
    plain = json.loads(json.dumps(values, default=str))
    pieces, length = [], 0
    try:
        for piece in _compiled(template).generate(plain):
            pieces.append(piece)
            length += len(piece) - piece.count(_START) - piece.count(_END)
            if length > max_characters:
                raise jinja2.exceptions.TemplateError(f"it writes more than {max_characters} characters")
        text = "".join(pieces)
        text.encode()
    except UnicodeEncodeError:
        raise ChatTemplateError("the chat template writes half of a surrogate pair, which is no character") from None
    except Exception as error:  # a template may raise anything
        message = str(error)[:_MAX_ERROR].encode(errors="replace").decode() or type(error).__name__
        raise ChatTemplateError(f"the chat template refuses the messages: {message}") from error
    return text


class ControlTokens:
    """The control tokens of one chat template."""

    def __init__(self, template: str, added: Mapping[str, bool]) -> None:
        literals = _literals(template)
        control = [text for text, special in added.items() if special or (text in literals and not text.isspace())]
        self._control = _any_of(control)
        self._marked = re.compile(f"{_START}({_any_of(added).pattern}){_END}|[{_START}{_END}]")

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, template: str, added: tuple[tuple[str, bool], ...]) -> ControlTokens:
        return cls(template, dict(added))

    def mark(self, value: Any) -> Any:
        """Return a value with marks around the control tokens in all its texts; marks that it has are dropped."""
        if isinstance(value, str):
            return self._control.sub(f"{_START}\\g<0>{_END}", without_marks(value))
        if isinstance(value, dict):
            # a name that an identifier could be is what templates look up
            return {k if str(k).isidentifier() else self.mark(k): self.mark(v) for k, v in value.items()}
        return list(map(self.mark, value)) if isinstance(value, list | tuple) else value

    def encode(
        self,
        rendered: str,
        encode: Callable[[str], list[int]],
        encode_as_text: Callable[[str], list[int]],
        token_id: Callable[[str], int | None],
    ) -> list[int]:
        """Return the tokens of a rendered chat; marked control tokens are tokenized as text."""
        first, *pieces = self._marked.split(rendered)
        newline, ids = encode("\n"), encode(first)
        for index, piece in enumerate(pieces):
            if not piece:
                continue
            is_marked = index % 2 == 0
            found = _encode_inside(piece, encode_as_text if is_marked else encode, newline)
            if is_marked and token_id(piece) in found:
                raise ValueError(f"the tokenizer makes the control token {piece!r} of plain text")
            ids = ids + found
        return ids


def _encode_inside(piece: str, encode: Callable[[str], list[int]], newline: list[int]) -> list[int]:
    """Tokenize a text that does not begin the chat, so that no space is put before it."""
    ids = encode("\n" + piece)  # SentencePiece puts a space before a text, but not after a newline
    return ids[len(newline) :] if ids[: len(newline)] == newline else encode(piece)


def without_marks(text: str) -> str:
    return text.replace(_START, "").replace(_END, "")


def _any_of(texts: Sequence[str] | Mapping[str, bool]) -> re.Pattern[str]:
    """Return the pattern of any of the texts, longer ones first; of nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


@functools.lru_cache(maxsize=16)
def _literals(template: str) -> str:
    """Return the text that a template contains, its string constants included, joined by NUL."""
    tree = _environment().parse(template)
    return "\0".join({node.data for node in tree.find_all(jinja2.nodes.TemplateData)} | constants(template))


@functools.lru_cache(maxsize=16)
def constants(template: str) -> frozenset[str]:
    """Return the string constants of a template, such as the names of keys that it reads."""
    found = _environment().parse(template).find_all(jinja2.nodes.Const)
    return frozenset(node.value for node in found if isinstance(node.value, str))


@functools.lru_cache(maxsize=16)
def names(template: str) -> frozenset[str]:
    return frozenset(node.name for node in _environment().parse(template).find_all(jinja2.nodes.Name))


def apply_chat_template(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    max_characters: int = MAX_CHARACTERS,
    **variables: Any,
) -> str:
    """Return the text of a conversation, as transformers' method of this name does.

    Args:
        tokenizer: Whose special tokens the template gets, and whose template is taken if none is stated.
        messages: The conversation.
        chat_template: Jinja template instead of the tokenizer's.
        add_generation_prompt: Whether the text ends where an assistant's message begins.
        continue_final_message: Whether it ends with the content of the last message.
        max_characters: Of the text.
        variables: Of the template: `tools`, `documents` and others.
    """
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
    template = template_of(tokenizer, chat_template, variables.get("tools"))
    prepared = [_prepared(message) for message in messages]
    content: Any = ""
    if continue_final_message:
        content = prepared[-1].get("content") if prepared else None
        if not isinstance(content, str):
            raise ChatTemplateError("continue_final_message: the last message has no text to continue")
        prepared[-1]["content"] = content + _CONTINUED
    values: dict[str, Any] = {
        "tools": None,
        "documents": None,
        **tokenizer.special_tokens_map,
        **variables,
        "messages": prepared,
    }
    text = _render(template, values | {"add_generation_prompt": add_generation_prompt}, max_characters)
    if not continue_final_message:
        return text
    end = text.rfind(_CONTINUED.strip())
    if end < 0 or content.strip() not in text:
        raise ChatTemplateError("continue_final_message: the chat template does not write the last message as it is")
    return text[:end] if text.startswith(_CONTINUED, end) else text[:end].rstrip()


class ChatPrompt(NamedTuple):
    """The prompt of a conversation.

    Attributes:
        tokens: Of its text.
        end: Of its text, from the end of the last message's content, or from its beginning if it is continued.
    """

    tokens: list[int]
    end: str


def chat_prompt(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    **arguments: Any,
) -> ChatPrompt:
    """Return the prompt of a conversation; control tokens in messages and variables become tokens of plain text."""
    to_id: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    template = template_of(tokenizer, chat_template, arguments.get("tools"))
    added = sorted(tokenizer.added_tokens_decoder.items())
    extra = getattr(tokenizer, "chat_control_tokens", None) or ()
    try:
        control = ControlTokens.of(
            template, tuple((token.content, token.special or token.content in extra) for _, token in added)
        )
    except Exception as error:  # the template cannot be parsed
        raise ChatTemplateError(f"the chat template is not valid: {error}") from error
    marked = [control.mark(dict(message)) for message in messages]
    text = apply_chat_template(tokenizer, marked, chat_template=template, **control.mark(arguments))
    try:
        tokens = control.encode(
            text,
            lambda piece: list(tokenizer(piece, add_special_tokens=False, verbose=False).input_ids),
            lambda piece: _encode_as_text(tokenizer, piece),
            to_id,
        )
    except Exception as error:  # tokenizers raise bare exceptions
        raise ChatTemplateError(f"the text of the chat template cannot be tokenized: {error}") from error
    content = marked[-1].get("content") if marked else None
    content = content.strip() if isinstance(content, str) else ""
    if arguments.get("continue_final_message"):
        return ChatPrompt(tokens, without_marks(text[-len(content) - _PROMPT_END :]))
    _, found, end = text.rpartition(content) if content else ("", "", "")
    return ChatPrompt(tokens, without_marks(end if found else text[-_PROMPT_END:]))


def template_of(tokenizer: TextTokenizer, stated: str | None = None, tools: Any = None) -> str:
    """Return the Jinja source, of several the one for tools, or the default one."""
    template = stated or tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
    if not isinstance(template, str):
        raise ChatTemplateError("the tokenizer has no chat template")
    return template


def _encode_as_text(tokenizer: Any, text: str) -> list[int]:
    for name in ("encode_as_text", "_encode_without_added_tokens"):  # ours, and newer transformers'
        if hasattr(tokenizer, name):
            return list(getattr(tokenizer, name)(text))
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without empty fields, and with its reasoning under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}
