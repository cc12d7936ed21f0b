"""Turns messages into a prompt with the model's chat template.

A template is a program that comes with a checkpoint. It runs in a sandbox (no attributes with underscores, nothing
mutable) in a process of its own, which has limits of memory and processor time (`minifloat.model.runtime.templates`).
Control tokens in the text of a message are tokenized as plain characters, so that a message cannot pretend to be
another role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minifloat.errors import ChatTemplateError, UsageError
from minifloat.model.runtime.templates import WORKER, RenderLimits, chat_tokens

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer


class ChatTemplate:
    """Turns messages into tokens."""

    def __init__(self, tokenizer: TextTokenizer, template: str | None, seconds: float, max_characters: int) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._limits = RenderLimits(seconds, max_characters)
        if self.exists:
            WORKER.start()

    @property
    def exists(self) -> bool:
        """Whether there is a template."""
        return bool(self._template or self._tokenizer.chat_template)

    def encode(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, bool | str]) -> list[int]:
        """Return the tokens of a conversation up to the beginning of the assistant's answer."""
        if not self.exists:
            raise UsageError(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE"
            )
        try:
            return chat_tokens(
                self._tokenizer,
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                limits=self._limits,
                **options,
            )
        except ChatTemplateError as error:
            raise UsageError(f"messages: {error}") from error
