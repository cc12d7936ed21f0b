"""From what a request brings (text, token ids, messages) to the tokens of a prompt.

Tokenizing a megabyte takes a second, so it happens in one thread beside the event loop, after a cheap check of the
length; one thread, so that one client's long prompt does not take every core from the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from minifloat.errors import UsageError
from minifloat.serve.server.chat import ChatTemplate
from minifloat.serve.server.protocol import Message

_Result = TypeVar("_Result")


class Prompts:
    """Makes prompts.

    Args:
        tokenizer: Of the model.
        template: Of the model.
        max_characters: The longest text that is tokenized.
        vocab_size: Token ids are less.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, max_characters: int, vocab_size: int
    ) -> None:
        self.template = template
        self._tokenizer, self._max_characters, self._vocab_size = tokenizer, max_characters, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minifloat-tokenizer")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def beside(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run something slow in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def encode(
        self, prompt: str | list[int], *, add_special_tokens: bool = True, may_be_empty: bool = False
    ) -> tuple[int, ...]:
        """The tokens of a text; token ids are taken as they are.

        Raises:
            UsageError: Empty, too long, or with ids that the model does not have.
        """
        if not isinstance(prompt, str):
            if max(prompt) >= self._vocab_size:
                raise UsageError(f"prompt: token id {max(prompt)}; the model has {self._vocab_size} tokens")
            return tuple(prompt)
        if len(prompt) > self._max_characters:
            raise UsageError(
                f"prompt: it has {len(prompt)} characters; at most {self._max_characters} are tokenized "
                "(see --max-model-len and --max-prompt-characters)"
            )
        tokens = await self.beside(self._encode, prompt, add_special_tokens)
        if not tokens and not may_be_empty:
            if self._tokenizer.bos_token_id is None:
                raise UsageError("prompt: it is empty, and the tokenizer has no token to begin a text with")
            tokens = [self._tokenizer.bos_token_id]
        return tuple(tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # not verbose: the tokenizer would log that the text is long, which is judged elsewhere
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    async def encode_chat(self, messages: Sequence[Message], options: dict[str, bool | str]) -> tuple[int, ...]:
        """The tokens of a conversation.

        Raises:
            UsageError: See `ChatTemplate.encode`.
        """
        size = sum(len(text) for message in messages for text in message.for_template().values())
        if size > self._max_characters:
            raise UsageError(f"messages: they have {size} characters; at most {self._max_characters} are tokenized")
        plain = [message.for_template() for message in messages]
        tokens = await self.beside(self.template.encode, plain, options)
        if not tokens:
            raise UsageError("messages: the chat template makes an empty prompt of them")
        return tuple(tokens)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens included.

        Raises:
            UsageError: With ids that the model does not have.
        """
        if tokens and max(tokens) >= self._vocab_size:
            raise UsageError(f"tokens: token id {max(tokens)}; the model has {self._vocab_size} tokens")
        return str(await self.beside(self._tokenizer.decode, list(tokens)))

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The names of tokens in the vocabulary."""
        return [str(piece) for piece in await self.beside(self._tokenizer.convert_ids_to_tokens, list(tokens))]
