"""`FileTokenizer`: a tokenizer.json run by the library `tokenizers`, with the methods that serving calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text."""

    input_ids: list[int]


class FileTokenizer:
    """A tokenizer of one tokenizer.json, with the methods of transformers' tokenizers that serving calls."""

    def __init__(
        self, backend: Tokenizer, named: Mapping[str, str], extra: Sequence[str], chat_template: str | None
    ) -> None:
        self.backend, self.chat_template = backend, chat_template
        self._named = dict(named)
        self._special = list(dict.fromkeys([*named.values(), *extra]))

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Encoding:
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
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def all_special_ids(self) -> list[int]:
        return [token for text in self._special if (token := self.backend.token_to_id(text)) is not None]

    def encode_as_text(self, text: str) -> list[int]:
        """Return the tokens of a text in which no added token is recognized."""
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._named)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    def _id(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _name(self, token: int) -> str | None:
        name = self.backend.id_to_token(int(token))
        return None if name is None else str(name)
