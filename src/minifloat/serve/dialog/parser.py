"""Reads an answer while the model writes it: pieces of text in, events out, the same ones for every split of a text.

One state machine reads all formats of formats.py. It is written as generators, which pause where the text ends; every
character is taken once, and only what may still become a marker or a call is held back, so the time is linear in the
text. What only looks like a call (an unknown tool, broken JSON, a frame that is cut off) is text. A call whose
arguments have begun cannot be taken back: if they break off, it never ends, and the rest is text.

White space around calls and thinking belongs to the text only if more text follows.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifloat.serve.dialog.conversation import Conversation, Tool
from minifloat.serve.dialog.events import AnswerText, CallArguments, CallBegins, CallEnds, Event, ThinkingText
from minifloat.serve.dialog.formats import DialogFormat, Elements, opens_thinking
from minifloat.serve.dialog.schemas import property_types, value_of

#: Nesting of arguments, and characters of a name, a key or a number: more is no call.
MAX_DEPTH = 64
MAX_NAME = 256
#: White space between markers that belong together.
MAX_GAP = 64

_SPACE = re.compile(r"\s*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CONTROL = re.compile(r"[\x00-\x1f]")
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
_QUALIFIED = re.compile(r"(?:functions\.)?(.*?)(?::[0-9]+|\.call)?", re.DOTALL)
_PARTS = re.compile(r"<[^<]*>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_BARE_KEY = re.compile(r"[^:]{0,256}(?=:)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_PYTHON_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_HALF_ESCAPE = re.compile(r"(?:\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?)?")
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}

#: Steps that pause where the text ends, and return a value.
_Steps = Generator[None, None, Any]
_Write = Callable[[str], object]


class _NoCall(Exception):
    """This is no call."""


class _CutOff(_NoCall):
    """The text ends in what may be a call."""


class _Stops:
    """Texts to stop at."""

    def __init__(self, *texts: str) -> None:
        ordered = sorted(filter(None, texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self.longest = max(map(len, ordered), default=0)
        self._beginnings = {text[:length] for text in ordered for length in range(1, len(text))}

    def held(self, text: str, at: int) -> int:
        """Return the length of the longest end of ``text[at:]`` that may become a text to stop at."""
        lengths = range(min(len(text) - at, self.longest - 1), 0, -1)
        return next((length for length in lengths if text[len(text) - length :] in self._beginnings), 0)


_stops = functools.lru_cache(maxsize=256)(_Stops)


@functools.lru_cache(maxsize=256)
def _initials(texts: tuple[str, ...]) -> str:
    return "".join(text[:1] for text in texts)


@dataclass(frozen=True)
class _Style:
    """How values are written.

    Attributes:
        strings: What opens and closes a string -> what stands between; None: anything.
        written: Returns the text between the quotes as it stands in a JSON string.
        words: Values that are words -> JSON.
        word: What a number or a word is made of.
        bare: Whether keys, and strings too, may stand without quotes.
    """

    strings: Mapping[str, re.Pattern[str] | None]
    written: Callable[[str], str]
    words: Mapping[str, str]
    word: re.Pattern[str] = re.compile(r"[\w.+-]*+")
    bare: bool = False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_controls(text: str) -> str:
    return text.translate(_CONTROLS) if _CONTROL.search(text) else text


def _of_python(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        escape = match[1]
        if len(escape) == 1:
            return _PYTHON_ESCAPES.get(escape, escape if escape in "\\'\"" else "\\" + escape)
        code = int(escape[1:], 16)
        return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else "\ufffd"

    return _escaped(_PYTHON_ESCAPE.sub(plain, text) if "\\" in text else text)


_WORDS = {"true": "true", "false": "false", "null": "null"}
_JSON = _Style({'"': re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++')}, _without_controls, _WORDS)
_PYTHON = _Style(
    {
        quote: re.compile(rf"(?:[^{quote}\\]|\\(?:[^xuU]|x[0-9a-fA-F]{{2}}|u[0-9a-fA-F]{{4}}|U[0-9a-fA-F]{{8}}))++")
        for quote in ('"', "'")
    },
    _of_python,
    _WORDS | {"True": "true", "False": "false", "None": "null"},
)


class AnswerParser:
    """Reads one answer.

    Args:
        format: How the model writes calls and thinking.
        conversation: What is answered.
        prompt_end: The end of the rendered prompt, which may open the thinking.
    """

    def __init__(self, format: DialogFormat, conversation: Conversation, prompt_end: str) -> None:
        self._format = format
        self._tools = {tool.name: tool for tool in conversation.callable_tools}
        self._separate = conversation.thinking.separate
        self._text, self._at, self._ended = "", 0, False
        self._growing: list[tuple[type[Event], int, list[str]]] = []
        #: What was taken since a call may have begun; None: nothing is to be put back.
        self._taken: list[str] | None = None
        self._write: _Write = self._argue
        self._calls, self._in_call = 0, False  # how many have begun, and whether the last of them has not ended
        self._spaces: dict[type[Event], list[str]] = {AnswerText: [], ThinkingText: []}
        self._before_gap: int | None = None  # pieces of white space before the last call, if only such followed it
        self._said, self._thought = False, False
        self._marked = False  # whether there were calls or thinking
        unquoted = re.compile(r"[^,}\]\n]*+")
        gemma = _Style({format.quote: None}, _escaped, _WORDS, unquoted, bare=True)
        self._style = {"python": _PYTHON, "gemma": gemma}.get(format.arguments, _JSON)
        self._begin = _stops(*format.begin)
        self._work: _Steps | None = None
        if format.channels:
            self._work = self._messages(prompt_end)
        elif self._tools or (format.thinking and self._separate):
            self._work = self._answer(opens_thinking(format, prompt_end, conversation.continues))

    def add(self, piece: str) -> list[Event]:
        """Return what is certain with one more piece of the text."""
        if self._work is None:
            return [AnswerText(piece)] if piece else []
        self._text, self._at = self._text[self._at :] + piece, 0
        return self._go_on(self._work)

    def finish(self) -> list[Event]:
        """Return what was held back; the text has ended."""
        self._ended = True
        events = [] if self._work is None else self._go_on(self._work)
        rest = "".join(self._spaces[AnswerText])
        return [*events, AnswerText(rest)] if rest and not self._calls and (self._said or not self._marked) else events

    def _go_on(self, work: _Steps) -> list[Event]:
        try:
            next(work)
        except StopIteration:
            self._work, rest = None, self._text[self._at :]
            if rest:
                self._emit(AnswerText, rest)
        events = [_event(*each) for each in self._growing]
        self._growing = []
        return events

    # ------------------------------------------------------------------------------- events

    def _emit(self, kind: type[Event], *parts: str) -> None:
        last = self._growing[-1] if self._growing else None
        if last is not None and last[0] is kind and kind not in (CallBegins, CallEnds):
            last[2].extend(parts)
        else:
            self._growing.append((kind, self._calls - 1, list(parts)))

    def _tell(self, kind: type[Event], text: str, keeps_first: bool) -> bool:
        """Emit a text but for the white space at its end, which waits; return whether there was more than that."""
        kept = text.rstrip()
        if kept:
            self._emit(kind, *(self._spaces[kind] if keeps_first else ()), kept if keeps_first else kept.lstrip())
            self._spaces[kind], self._before_gap = [], None
        self._spaces[kind].append(text[len(kept) :])
        return bool(kept)

    def _say(self, text: str) -> None:
        self._said |= self._tell(AnswerText, text, self._said or not self._marked)

    def _think(self, text: str) -> None:
        self._thought |= self._tell(ThinkingText, text, self._thought)

    def _argue(self, text: str) -> None:
        self._emit(CallArguments, text)

    def _begin_call(self, tool: Tool, id: str = "") -> None:
        if self._before_gap is not None:  # white space between two calls
            del self._spaces[AnswerText][self._before_gap :]
        self._calls, self._marked, self._in_call, self._taken = self._calls + 1, True, True, None
        self._emit(CallBegins, id, tool.name)

    def _end_call(self) -> None:
        self._in_call, self._before_gap = False, len(self._spaces[AnswerText])
        self._emit(CallEnds)

    # ---------------------------------------------------------------------------- the text

    def _take(self, length: int) -> str:
        text = self._text[self._at : self._at + length]
        self._at += length
        if self._taken is not None:
            self._taken.append(text)
        return text

    def _back(self, text: str) -> None:
        """Put back what was taken last."""
        self._at -= len(text)
        if self._taken is not None:
            self._taken.append(self._taken.pop()[: -len(text) or None])

    def _more(self) -> _Steps:
        if self._ended:
            raise _CutOff
        yield

    def _next(self) -> _Steps:
        """Take white space; return the character after it."""
        while True:
            self._take(self._space_end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            yield from self._more()

    def _space_end(self) -> int:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        return match.end()

    def _accept(self, *texts: str, after_space: bool = False) -> _Steps:
        """Take the longest of the texts that stands here and return it, or None."""
        while True:
            start = self._space_end() if after_space else self._at
            if start - self._at > MAX_GAP:
                return None
            left = len(self._text) - start
            if left and self._text[start] not in _initials(texts):
                return None
            found = max((text for text in texts if self._text.startswith(text, start)), key=len, default=None)
            longer = (len(text) > left and text.startswith(self._text[start:]) for text in texts)
            if self._ended or not any(longer):
                if found:
                    self._take(start + len(found) - self._at)
                return found
            yield

    def _mark(self, *texts: str) -> _Steps:
        """Take one of the texts, and the white space before it, and return it; or None."""
        return (yield from self._accept(*filter(None, texts), after_space=True))

    def _close(self, *texts: str) -> _Steps:
        """Take what ends a call or stands between calls, as `_mark` does; half of it where the text ends is dropped."""
        found = yield from self._mark(*texts)
        if found is None and self._is_half(*texts):
            self._at = len(self._text)
        return found

    def _need(self, *texts: str) -> _Steps:
        """Take one of the texts and the white space before it, and return it."""
        found = yield from self._mark(*texts)
        if found is None:
            raise _CutOff if self._is_half(*texts) else _NoCall
        return found

    def _is_half(self, *texts: str) -> bool:
        """Return whether the text ends in the beginning of one of the texts, or in white space."""
        rest = self._text[self._at : self._at + MAX_NAME].lstrip()
        return self._ended and any(text.startswith(rest) for text in texts)

    def _until(self, *stops: str) -> _Steps:
        """Take a name and the text to stop at; return both."""
        ends = _stops(*stops)
        while True:
            match = ends.pattern.search(self._text, self._at, self._at + MAX_NAME + ends.longest)
            if match:
                return self._take(match.start() - self._at), self._take(len(match[0]))
            if len(self._text) - self._at >= MAX_NAME + ends.longest:
                raise _NoCall
            yield from self._more()

    def _pass(self, stops: _Stops, write: _Write) -> _Steps:
        """Pass the text on up to a text to stop at; return that, or None at the end."""
        while True:
            match = stops.pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text) - stops.held(self._text, self._at)
            if end > self._at:
                write(self._take(end - self._at))
            if match:
                return self._take(len(match[0]))
            if self._ended:
                rest = self._take(len(self._text) - end)
                if rest and not self._in_call:
                    write(rest)
                return None
            yield

    # --------------------------------------------------------------------------- the answer

    def _answer(self, thinks: bool) -> _Steps:
        format, first = self._format, True
        if thinks:
            yield from self._thinking("")
        while True:
            if first and format.thinking and (opened := (yield from self._mark(format.thinking[0]))):
                yield from self._thinking(opened)
            elif first and format.bare and self._tools and not self._said and (yield from self._is_bare()):
                yield from self._try(self._frame())
            elif not self._tools:
                if self._marked:
                    yield from self._drop_space()
                return
            elif begin := (yield from self._pass(self._begin, self._say)):
                self._taken = [begin]
                if begin in format.open:
                    self._back(begin)
                first = yield from self._try(self._frame())
            else:
                return

    def _is_bare(self) -> _Steps:
        """Return whether a call without a marker may stand here."""
        self._taken = []
        found = yield from self._mark(*("[{" if self._format.list else "{"))
        if found:
            self._back(found)
        else:
            self._taken = None
        return found

    def _drop_space(self) -> _Steps:
        while not self._ended:
            self._at = self._space_end()
            if self._at < len(self._text):
                return
            yield

    def _thinking(self, opened: str) -> _Steps:
        """Read thinking up to its end, or to a call if the format has calls that end it."""
        _, close = self._format.thinking or ("", "")
        stops = _stops(close, *(self._format.begin[:1] if self._format.ends_thinking and self._tools else ()))
        write = self._think if self._separate else self._say
        if self._separate:
            self._marked = True
            if self._thought:
                self._emit(ThinkingText, "\n")
        else:
            self._say(opened)
        while (stop := (yield from self._pass(stops, write))) not in (close, None):
            self._taken = [stop]
            if (yield from self._try(self._frame(), write)):
                break
        if stop == close and not self._separate:
            self._say(close)
        self._spaces[ThinkingText] = []

    def _try(self, steps: _Steps, write: _Write | None = None) -> _Steps:
        """Read calls; return whether there was one. What is none is text."""
        before = self._calls
        if self._taken is None:
            self._taken = []
        try:
            yield from steps
        except _NoCall as reason:
            self._write = self._argue
            if self._taken is not None:
                text, self._taken = "".join(self._taken), None
                (write or self._say)(text)
            elif isinstance(reason, _CutOff):
                self._at = len(self._text)
        self._taken, self._in_call = None, False
        return self._calls > before

    def _messages(self, prompt_end: str) -> _Steps:
        """Read the messages of gpt-oss, each with a header that says its channel and its recipient."""
        header, message, _ = prompt_end.rpartition("<|start|>")[2].partition("<|message|>")
        while True:
            if not message:
                try:
                    more, _ = yield from self._until("<|message|>")
                except _NoCall as reason:
                    if header and isinstance(reason, _CutOff):
                        self._at = len(self._text)
                        return
                    more = ""
                lost, _, more = more.rpartition("<|start|>")
                if lost:
                    self._say(lost)
                header += more
            stop = yield from self._message(header)
            if stop is None:
                return
            if stop != "<|start|>":
                yield from self._mark("<|start|>")
            header, message = "<|start|>", ""

    def _message(self, header: str) -> _Steps:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient[1].removeprefix("functions.") in self._tools:
            called = yield from self._try(self._json(self._tool(recipient[1])[0], ""))
            if called and (stop := (yield from self._close(*_MESSAGE_ENDS))):
                return stop
        thinks = self._separate and not recipient and channel is not None and channel[1] == "analysis"
        if thinks:
            self._marked = True
        stop = yield from self._pass(_stops(*_MESSAGE_ENDS), self._think if thinks else self._say)
        self._spaces[ThinkingText] = []
        return stop

    # ---------------------------------------------------------------------------- the calls

    def _frame(self) -> _Steps:
        """Read calls after what begins them."""
        format = self._format
        listed = format.list and (yield from self._mark("["))
        if format.separator is not None and format.end and (yield from self._mark(format.end.strip())):
            self._taken = []  # nothing was called
            return
        while True:
            yield from self._call()
            if listed:
                if (yield from self._close(",", "]")) != ",":
                    break
            elif format.separator is None or format.list or (yield from self._close(format.end.strip())):
                break
            elif format.separator.strip():
                yield from self._close(format.separator.strip())
            self._taken = []
        yield from self._close(format.end.strip())

    def _call(self) -> _Steps:
        format = self._format
        if any(format.open):
            yield from self._need(*format.open)
        if (yield from self._next()) == "{" and format.arguments in ("object", "python"):
            yield from self._object()
        elif not format.name_end:
            raise _NoCall
        else:
            name, end = yield from self._until(*format.name_end)
            tool, id = self._tool(name)
            if format.elements is not None:
                yield from self._elements(format.elements, tool, end)
            elif format.arguments in ("python", "object"):
                yield from self._keywords(tool)
            else:
                if end == "{":
                    self._back(end)
                yield from self._json(tool, id)
        yield from self._close(format.close.strip())

    def _tool(self, name: str) -> tuple[Tool, str]:
        """Return the tool of a name, and the id of the call if the model wrote one."""
        name, _, id = name.strip().partition("[CALL_ID]")
        if name in self._tools:
            return self._tools[name], id
        qualified = _QUALIFIED.fullmatch(name)
        if qualified is None or qualified[1] not in self._tools:
            raise _NoCall
        return self._tools[qualified[1]], f"functions.{name}" if self._format.numbered else id

    def _json(self, tool: Tool, id: str) -> _Steps:
        if (yield from self._next()) != "{":
            raise _NoCall
        self._begin_call(tool, id)
        yield from self._value(self._style)
        self._end_call()

    def _object(self) -> _Steps:
        """Read a call that is an object with the name and the arguments, in any order."""
        self._take(1)
        before, tool, arguments = self._calls, None, None
        while (yield from self._next()) != "}":
            key = json.loads((yield from self._collected(self._string)))
            yield from self._colon()
            first = yield from self._next()
            if self._calls > before or key not in ("name", "arguments", "parameters"):
                yield from self._collected(self._value)
            elif key == "name":
                tool, _ = self._tool(str(json.loads((yield from self._collected(self._value)))))
            elif tool is not None and first == "{":
                self._begin_call(tool)
                yield from self._value(self._style)
            else:
                arguments = _arguments((yield from self._collected(self._value)))
            if (yield from self._next()) == ",":
                self._take(1)
                if (yield from self._next()) == "}":
                    raise _NoCall
            elif self._text[self._at] != "}":
                raise _NoCall
        self._take(1)
        if self._calls == before:
            if tool is None or (arguments is None and self._format.bare):
                raise _NoCall
            self._begin_call(tool)
            self._argue(arguments or "{}")
        self._end_call()

    def _keywords(self, tool: Tool) -> _Steps:
        """Read arguments as Python writes them in a call, after its parenthesis."""
        written = ""
        while (yield from self._next()) != ")":
            key, _ = yield from self._until("=")
            if not key.strip().isidentifier():
                raise _NoCall
            if not written:
                self._begin_call(tool)
            self._argue(f"{written or '{'}{json.dumps(key.strip())}: ")
            yield from self._value(_PYTHON)
            written = ", "
            if (yield from self._next()) == ",":
                self._take(1)
            elif self._text[self._at] != ")":
                raise _NoCall
        self._take(1)
        if not written:
            self._begin_call(tool)
        self._argue("}" if written else "{}")
        self._end_call()

    def _elements(self, elements: Elements, tool: Tool, end: str) -> _Steps:
        """Read arguments that are elements, after the name of the call and what ended it."""
        format = self._format
        if end == '"/>':  # an element without content
            self._begin_call(tool)
            self._argue("{}")
            return self._end_call()
        if end in (elements.open, format.end):
            self._back(end)
        marks = (elements.open, format.close, format.end)
        mark = yield from self._mark(*marks)
        if mark is None:
            raise _NoCall
        self._begin_call(tool)
        written = "{"
        while mark == elements.open:
            key, text = yield from self._element_key(elements, tool)
            self._argue(f"{written}{json.dumps(key, ensure_ascii=False)}: ")
            mark = yield from self._element_value(elements, marks, text, property_types(tool.parameters, key))
            written = ", "
        self._argue("{}" if written == "{" else "}")
        self._end_call()

    def _element_key(self, elements: Elements, tool: Tool) -> _Steps:
        """Return the key of an element, and whether its value is a text."""
        first, *others = _PARTS.findall(elements.middle) if elements.middle.count("<") > 1 else [elements.middle]
        key, _ = yield from self._until(first)
        for other in others:
            yield from self._need(other)
        key = key.strip()
        if not elements.typed:
            return key, property_types(tool.parameters, key) == {"string"}
        return key, (yield from self._need('"true">', '"false">')) == '"true">'

    def _element_value(self, elements: Elements, marks: Sequence[str], text: bool, types: frozenset[str]) -> _Steps:
        """Read a value up to its end, which is followed by a mark; return that."""
        parts: list[str] = []
        write: _Write = (lambda part: self._argue(_escaped(part))) if text else parts.append
        if elements.lines:
            yield from self._accept("\n")
        stops = _stops(elements.close, "\n" + elements.close if elements.lines else "")
        if text:
            self._argue('"')
        while True:
            stop = yield from self._pass(stops, write)
            mark = stop and (yield from self._mark(*marks))
            if mark:
                self._argue('"' if text else value_of("".join(parts), types))
                return mark
            if stop is None or self._is_half(*filter(None, marks)):
                raise _CutOff
            write(stop)

    # --------------------------------------------------------------------------- the values

    def _collected(self, read: Callable[[_Style], _Steps]) -> _Steps:
        """Return the JSON of what is read, instead of writing it."""
        parts: list[str] = []
        write, self._write = self._write, parts.append
        yield from read(self._style)
        self._write = write
        return "".join(parts)

    def _value(self, style: _Style) -> _Steps:
        """Read a value and write it as `json.dumps` would."""
        closers: list[str] = []
        while True:
            first = yield from self._next()
            if first in "{[":
                closers.append("}" if first == "{" else "]")
                if len(closers) > MAX_DEPTH:
                    raise _NoCall
                self._write(self._take(1))
                if (yield from self._next()) != closers[-1]:
                    if first == "{":
                        yield from self._key(style)
                    continue
            else:
                yield from self._scalar(style)
            while True:
                if not closers:
                    return
                after = yield from self._next()
                if after == closers[-1]:
                    self._write(self._take(1))
                    closers.pop()
                elif after == ",":
                    self._take(1)
                    if (yield from self._next()) == closers[-1] and style is not _JSON:
                        continue
                    self._write(", ")
                    break
                else:
                    raise _NoCall
            if closers[-1] == "}":
                yield from self._key(style)

    def _key(self, style: _Style) -> _Steps:
        if style.bare and not (yield from self._stands(*style.strings)):
            match = _BARE_KEY.match(self._text, self._at)
            if match:
                key = self._take(len(match[0]))
            else:
                key, _ = yield from self._until(":")
                self._back(":")
            self._write(json.dumps(key.strip(), ensure_ascii=False))
        else:
            yield from self._string(style)
        yield from self._colon()
        self._write(": ")

    def _colon(self) -> _Steps:
        if (yield from self._next()) != ":":
            raise _NoCall
        self._take(1)

    def _scalar(self, style: _Style) -> _Steps:
        if (yield from self._stands(*style.strings)):
            yield from self._string(style)
            return
        while True:
            match = style.word.match(self._text, self._at, self._at + MAX_NAME + 1)
            assert match is not None
            if len(match[0]) > MAX_NAME:
                raise _NoCall
            if match.end() < len(self._text) or self._ended:
                break
            yield
        if match.end() == len(self._text):
            raise _CutOff
        word = match[0].strip()
        written = style.words.get(word, word if _NUMBER.fullmatch(word) else "")
        if not written and style.bare and word:
            written = json.dumps(word, ensure_ascii=False)
        if not written:
            raise _NoCall
        self._take(len(match[0]))
        self._write(written)

    def _stands(self, *texts: str) -> _Steps:
        """Return which of the texts stands here, without taking it."""
        found = yield from self._accept(*texts)
        if found:
            self._back(found)
        return found

    def _string(self, style: _Style) -> _Steps:
        quote = yield from self._accept(*style.strings)
        if quote is None:
            raise _NoCall
        self._write('"')
        between = style.strings[quote]
        if between is None:
            if (yield from self._pass(_stops(quote), lambda text: self._write(style.written(text)))) is None:
                raise _CutOff
        else:
            while (yield from self._accept(quote)) is None:
                yield from self._between(between, style)
        self._write('"')

    def _between(self, between: re.Pattern[str], style: _Style) -> _Steps:
        """Take text of a string up to its end, or to half of an escape."""
        while (match := between.match(self._text, self._at)) is None:
            if not _HALF_ESCAPE.fullmatch(self._text, self._at):
                raise _NoCall
            yield from self._more()
        self._write(style.written(self._take(len(match[0]))))


def _event(kind: type[Event], index: int, parts: list[str]) -> Event:
    if kind is CallBegins:
        return CallBegins(index, *parts)
    if kind is CallArguments:
        return CallArguments(index, "".join(parts))
    if kind is CallEnds:
        return CallEnds(index)
    return AnswerText("".join(parts)) if kind is AnswerText else ThinkingText("".join(parts))


def _arguments(text: str) -> str:
    """Return the JSON of arguments: an object, one in a string, or null for none."""
    value = json.loads(text)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _NoCall from None
        text = json.dumps(value, ensure_ascii=False)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise _NoCall
    return text
