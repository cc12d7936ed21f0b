"""`FileTokenizer`: a tokenizer.json run by the library `tokenizers`, with the methods that serving calls.

`minifloat.runtime.tokenizer_files` decides which tokenizers these are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from minifloat.runtime.chat_format import ControlTokens


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text.

    Attributes:
        input_ids: The token ids.
    """

    input_ids: list[int]


class FileTokenizer:
    """A tokenizer of one tokenizer.json, with the methods of transformers' tokenizers that serving calls.

    Args:
        backend: The tokenizer; not changed any more.
        named: Special tokens by transformers' names.
        extra: Further special tokens.
        chat_template: Jinja source, or None.

    Attributes:
        backend: As given.
        chat_template: As given; may be set.
    """

    def __init__(
        self, backend: Tokenizer, named: Mapping[str, str], extra: Sequence[str], chat_template: str | None
    ) -> None:
        self.backend, self.chat_template = backend, chat_template
        self._named = dict(named)
        self._special = list(dict.fromkeys([*named.values(), *extra]))

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Encoding:
        """Return the tokens of a text.

        Args:
            text: The text; special tokens in it are recognized.
            add_special_tokens: Whether to put those around it that the tokenizer puts around a text.
            verbose: As in transformers, which then warns of long texts; has no effect.
        """
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

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token; that of the unknown token, which may be None, for a name that has none."""
        found = self.backend.token_to_id(token)
        return self._id("unk_token") if found is None else int(found)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self._id("eos_token")

    @property
    def all_special_ids(self) -> list[int]:
        """The special tokens."""
        return [token for text in self._special if (token := self.backend.token_to_id(text)) is not None]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        sanitize_control_tokens: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Return the tokens of messages, or their text.

        Args:
            messages: ``role``, ``content`` and further texts of each message.
            chat_template: Jinja source instead of the tokenizer's own.
            add_generation_prompt: Whether the assistant's answer begins at the end.
            tokenize: Whether to return tokens.
            return_dict: Must be False.
            sanitize_control_tokens: Whether control tokens in messages and variables are tokenized as text.
            variables: Further variables of the template.

        Raises:
            ValueError: If there is no template or no message, or an argument has another value.
            Exception: Whatever the template raises.
        """
        from minifloat.runtime import chat_format

        template = chat_template or self.chat_template
        if template is None or not messages or return_dict or (sanitize_control_tokens and not tokenize):
            raise ValueError("expected a chat template, messages, return_dict=False, and tokens to be sanitized")
        if not sanitize_control_tokens:
            values = {**self._named, **variables, "add_generation_prompt": add_generation_prompt}
            text = chat_format.render(template, messages, values)
            return self(text, add_special_tokens=False).input_ids if tokenize else text
        control = _control_tokens(template, tuple(self._added().items()))
        messages = [{name: control.mark(value) for name, value in message.items()} for message in messages]
        marked = {name: control.mark(value) if isinstance(value, str) else value for name, value in variables.items()}
        values = {**self._named, **marked, "add_generation_prompt": add_generation_prompt}
        return control.encode(
            chat_format.render(template, messages, values),
            lambda text: self(text, add_special_tokens=False).input_ids,
            self._encode_as_text,
            self.convert_tokens_to_ids,
        )

    def _encode_as_text(self, text: str) -> list[int]:
        """Return the tokens of a text in which no added token is recognized."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    def _added(self) -> dict[str, bool]:
        """Return the added tokens, and whether each is special."""
        tokens = sorted(self.backend.get_added_tokens_decoder().items())
        return {token.content: token.special for _, token in tokens}

    def _id(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _name(self, token: int) -> str | None:
        name = self.backend.id_to_token(int(token))
        return None if name is None else str(name)


@functools.lru_cache(maxsize=16)
def _control_tokens(template: str, added: tuple[tuple[str, bool], ...]) -> ControlTokens:
    from minifloat.runtime.chat_format import ControlTokens

    return ControlTokens(template, dict(added))
