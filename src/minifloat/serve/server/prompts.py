"""Turns the text, token ids or messages of a request into the tokens of a prompt.

Tokenizing a megabyte takes a second, so it runs in a thread beside the event loop, after a cheap check of the length.
There is one such thread for long texts and one for all else: long prompts do not take every core from the engine, and
short ones do not wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from minifloat.errors import ChatTemplateError, UsageError
from minifloat.model.runtime.templates import chat_tokens
from minifloat.serve.server.protocol import Message

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

_Result = TypeVar("_Result")

#: Characters, or tokens, of a text that is processed in less than about 10 ms.
_SHORT = 10_000


class Prompts:
    """Encodes and decodes prompts."""

    def __init__(self, tokenizer: TextTokenizer, template: str | None, max_characters: int, vocab_size: int) -> None:
        self._template = template
        self._tokenizer, self._max_characters, self._vocab_size = tokenizer, max_characters, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minifloat-tokenizer")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="minifloat-long-texts")

    @property
    def has_template(self) -> bool:
        return bool(self._template or self._tokenizer.chat_template)

    def close(self) -> None:
        for thread in (self._thread, self._long_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def run_in_thread(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a slow function in the tokenizer's thread."""
        return await self._run(self._thread, work, *arguments)

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[..., _Result], *arguments: Any) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)

    def _thread_for(self, length: int) -> ThreadPoolExecutor:
        return self._thread if length <= _SHORT else self._long_thread

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, may_be_empty: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of a text. Token ids are returned as they are."""
        if not isinstance(prompt, str):
            if max(prompt) >= self._vocab_size:
                raise UsageError(f"prompt: token id {max(prompt)}; the model has {self._vocab_size} tokens")
            return tuple(prompt)
        if len(prompt) > self._max_characters:
            raise UsageError(
                f"prompt: it has {len(prompt)} characters; at most {self._max_characters} are tokenized "
                "(see --max-model-len and --max-prompt-characters)"
            )
        tokens = await self._run(self._thread_for(len(prompt)), self._encode, prompt, add_special_tokens)
        if not tokens and not may_be_empty:
            if self._tokenizer.bos_token_id is None:
                raise UsageError("prompt: it is empty, and the tokenizer has no token that begins a text (BOS)")
            tokens = [self._tokenizer.bos_token_id]
        return tuple(tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # verbose would log a warning about long texts, which are refused elsewhere
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    async def encode_chat(self, messages: Sequence[Message], options: dict[str, bool | str]) -> tuple[int, ...]:
        size = sum(len(text) for message in messages for text in message.for_template().values())
        if size > self._max_characters:
            raise UsageError(f"messages: they have {size} characters; at most {self._max_characters} are tokenized")
        tokens = await self._run(self._thread_for(size), self._encode_chat, messages, options)
        if not tokens:
            raise UsageError("messages: the chat template turns them into an empty prompt")
        return tuple(tokens)

    def _encode_chat(self, messages: Sequence[Message], options: dict[str, bool | str]) -> list[int]:
        if not self.has_template:
            raise UsageError(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE"
            )
        try:
            return chat_tokens(
                self._tokenizer,
                [message.for_template() for message in messages],
                chat_template=self._template,
                add_generation_prompt=True,
                max_characters=self._max_characters,
                **options,
            )
        except ChatTemplateError as error:
            raise UsageError(f"messages: {error}") from error

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        if tokens and max(tokens) >= self._vocab_size:
            raise UsageError(f"tokens: token id {max(tokens)}; the model has {self._vocab_size} tokens")
        return str(await self._run(self._thread_for(len(tokens)), self._tokenizer.decode, list(tokens)))

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the names of tokens in the vocabulary."""
        name = self._tokenizer.convert_ids_to_tokens
        return await self._run(self._thread_for(len(tokens)), lambda: [str(name(token)) for token in tokens])
