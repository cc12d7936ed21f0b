"""Which block of the KV cache belongs to whom: allocation, sharing of equal prefixes, and eviction.

A block holds the keys and values of `BLOCK_TOKENS` tokens in every layer. What lies in it depends on its tokens and on
all tokens before them, so a full block is known by a digest of both: SHA-256 over the digest of the block before it and
its own tokens. The first block takes a salt in the place of a digest, random for this process and with the request's
own salt, so that neither the time a request takes nor a crafted collision tells one tenant what another has asked
(CVE-2025-46570). A block that nobody uses keeps its contents until it is needed, the longest unused one first.

The memory itself is the runner's; this module only counts.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from minifloat.kernels.decoder import BLOCK_TOKENS

_SALT_BYTES = 32


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens of one sequence take."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Blocks ``0 .. count - 1`` with their users.

    Args:
        count: How many there are.
        share: Whether sequences with equal beginnings share blocks.
    """

    def __init__(self, count: int, *, share: bool = True) -> None:
        self.count = count
        self._share = share
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._users = [0] * count
        self._digests: list[bytes | None] = [None] * count
        self._known: dict[bytes, int] = {}
        #: Without users, longest unused first; those with contents that may be wanted again come last.
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks without a user."""
        return len(self._unused)

    @property
    def usage(self) -> float:
        """The share of the blocks that have a user."""
        return 1.0 - self.free / self.count if self.count else 0.0

    def allocate(self, count: int) -> list[int]:
        """Take blocks, whose contents are forgotten.

        Raises:
            ValueError: There are fewer (`free`).
        """
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        taken = []
        for _ in range(count):
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back; their contents stay until the memory is needed.

        Args:
            blocks: In the order of the sequence: its end is forgotten first, since nothing matches without the start.
        """
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._unused[block] = None
                if self._digests[block] is None:
                    self._unused.move_to_end(block, last=False)

    def root(self, salt: str) -> bytes:
        """What stands before the first block of the sequences that may share with each other."""
        return hashlib.sha256(self._salt + salt.encode()).digest()

    def digests(self, root: bytes, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """The digests of all full blocks of a sequence.

        Args:
            root: Of `root`.
            tokens: All tokens of the sequence.
            known: The digests of its first blocks, which are not computed again.
        """
        found = list(known)
        before = found[-1] if found else root
        for start in range(len(found) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before = hashlib.sha256(before + array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()).digest()
            found.append(before)
        return found

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Become a user of the blocks that hold the longest known beginning.

        Args:
            digests: Of `digests`.
        """
        blocks: list[int] = []
        for digest in digests:
            block = self._known.get(digest)
            if block is None:
                break
            if self._users[block] == 0:
                del self._unused[block]
            self._users[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """Say what a full block holds, once its keys and values have been computed."""
        if self._share and self._digests[block] is None and digest not in self._known:
            self._digests[block] = digest
            self._known[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None
