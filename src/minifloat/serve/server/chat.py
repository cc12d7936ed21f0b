"""Turns messages into a prompt with the model's chat template.

A template is a program that comes with a checkpoint. transformers runs it in a sandbox (no attributes with underscores,
nothing mutable); this module also limits its processor time and the length of its output. Control tokens in the text of
a message are tokenized as plain characters, so that a message cannot pretend to be another role.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.runtime.tokenizer import TextTokenizer

#: The file name that Jinja gives to the code of a template made from a string.
_TEMPLATE_CODE = "<template>"


class ChatTemplate:
    """Turns messages into tokens.

    Args:
        tokenizer: Tokenizer of the model.
        template: Jinja source; None: the tokenizer's own template.
        seconds: Limit on the processor time of one rendering.
        max_characters: Limit on the length of the rendered prompt.
    """

    def __init__(self, tokenizer: TextTokenizer, template: str | None, seconds: float, max_characters: int) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._seconds, self._max_characters = seconds, max_characters

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return bool(self._template or self._tokenizer.chat_template)

    def encode(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, bool | str]) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the assistant's answer.

        Args:
            messages: ``role`` and ``content`` of each message.
            options: Variables for the template.

        Raises:
            UsageError: If there is no template, or it refuses the messages, takes too long or writes too much.
        """
        if not self.exists:
            raise UsageError(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE"
            )
        text = self._apply(messages, options, tokenize=False)
        if len(text) > self._max_characters:
            raise UsageError(
                f"messages: the rendered prompt has {len(text)} characters; at most {self._max_characters} are accepted"
            )
        return list(self._apply(messages, options, tokenize=True, return_dict=False, sanitize_control_tokens=True))

    def _apply(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any], **arguments: Any) -> Any:
        try:
            with _ProcessorTime(self._seconds):
                return self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    chat_template=self._template,
                    add_generation_prompt=True,
                    **arguments,
                    **options,
                )
        except _OutOfTime:
            raise UsageError(f"messages: the chat template ran for more than {self._seconds} s") from None
        except Exception as error:  # a template is a program, which may raise anything
            raise UsageError(f"messages: the chat template refuses them: {error}") from error


class _OutOfTime(Exception):
    """A template ran for too long."""


class _ProcessorTime:
    """Context manager that raises `_OutOfTime` in Python code of this thread that runs for too long.

    A thread cannot be stopped from outside, but the interpreter calls a trace function for every line of a template and
    for every call, and a trace function may raise. Time spent waiting for other threads does not count.

    Args:
        seconds: Limit on the processor time of the thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._end = time.thread_time() + self._seconds
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if time.thread_time() > self._end:
            raise _OutOfTime
        return self._trace if frame.f_code.co_filename == _TEMPLATE_CODE else None
