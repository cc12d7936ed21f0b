"""Which tokens of which sequences the next step computes.

First come, first served. Every running sequence that waits for one token gets it; what the token budget has left goes
to prompts, in pieces, oldest first (chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI 2024). Beside running
sequences the pieces are small, so that a long prompt delays the others' next token by little. A prompt gets all its
blocks when it is admitted. When an older sequence needs a block and none is free, the youngest gives up its own and
will be computed again (preemption by recompute: Kwon et al., "PagedAttention", SOSP 2023). The oldest is therefore
never preempted, and whoever waits becomes the oldest: nobody starves.

Where the log-probabilities of a prompt are asked for, logits of all its tokens are computed, which is why no block that
others have filled stands for them, and why a step takes only so many of such tokens: logits are large.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.serve.engine.cache import BlockPool, blocks_for
from minifloat.serve.engine.sequence import Sequence, State

#: Tokens of prompts that one step computes logits of: with a vocabulary of 128 Ki, 128 MiB.
SCORED_TOKENS = 256


@dataclass(frozen=True)
class Work:
    """Tokens ``start .. end - 1`` of a sequence, to be computed in one step.

    Attributes:
        sequence: Whose.
        start: As many are in the cache already.
        end: One past the last.
        scored: So many of them, before the one that samples, tell how probable the next token of the prompt is.
    """

    sequence: Sequence
    start: int
    end: int
    scored: int = 0

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token can be chosen then."""
        return self.end == len(self.sequence.tokens)

    @property
    def logits(self) -> int:
        """Logits are wanted of so many of its tokens, the last ones."""
        return self.scored + self.samples


class Scheduler:
    """Holds the sequences that are not finished.

    Args:
        pool: The blocks of the KV cache.
        max_sequences: So many run at a time.
        max_tokens: So many tokens are computed in one step.
        max_prompt_tokens_beside: So many tokens of prompts, where running sequences wait for their next token.
        max_scored_tokens: So many tokens of prompts whose log-probabilities are asked for.
        preempted: Called with a sequence that loses its blocks.

    Attributes:
        waiting: Sequences without blocks, the next one first.
        running: Sequences with blocks, the oldest first.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_tokens: int,
        max_prompt_tokens_beside: int,
        preempted: Callable[[Sequence], None],
        max_scored_tokens: int = SCORED_TOKENS,
    ) -> None:
        self.pool = pool
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.max_prompt_tokens_beside, self.max_scored_tokens = max_prompt_tokens_beside, max_scored_tokens
        self._preempted = preempted
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> list[Work]:
        """The work of the next step; sequences that wait for one token come first."""
        work = self._next_tokens()
        budget = self.max_tokens - len(work)
        if work:
            budget = min(budget, self.max_prompt_tokens_beside)
        scored = self.max_scored_tokens
        for sequence in [other for other in self.running if other.pending > 1]:
            budget, scored = self._take(sequence, work, budget, scored)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget, scored = self._take(admitted, work, budget, scored)
        return work

    def computed(self, work: Work) -> None:
        """Note that a piece of work is done, and let others share the blocks that it has filled."""
        sequence = work.sequence
        before, sequence.computed = sequence.computed, work.end
        full = blocks_for(work.end + 1) - 1
        first = blocks_for(before + 1) - 1
        if full > first:
            sequence.digests = self.pool.digests(sequence.root, sequence.tokens[: work.end], sequence.digests[:full])
            for index in range(first, full):
                self.pool.publish(sequence.blocks[index], sequence.digests[index])

    def _take(self, sequence: Sequence, work: list[Work], budget: int, scored: int) -> tuple[int, int]:
        """Add the next piece of a prompt to the work of a step; what is left of the two budgets then."""
        room = min(budget, scored) if sequence.unscored else budget
        if room <= 0:
            return budget, scored
        piece = self._piece(sequence, room)
        work.append(piece)
        return budget - (piece.end - piece.start), scored - piece.scored

    def _piece(self, sequence: Sequence, budget: int) -> Work:
        start, end = sequence.computed, min(sequence.computed + budget, len(sequence.tokens))
        first = max(start, len(sequence.prompt_logprobs))
        last = min(end, sequence.prompt_length - 1)
        return Work(sequence, start, end, max(last - first, 0) if sequence.unscored else 0)

    def _next_tokens(self) -> list[Work]:
        """One token for each sequence that is past its prompt, with a block to put it in."""
        work: list[Work] = []
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING or sequence.pending != 1 or len(work) == self.max_tokens:
                continue
            if self._extend(sequence):
                work.append(Work(sequence, sequence.computed, len(sequence.tokens)))
        return [item for item in work if item.sequence.state is State.RUNNING]

    def _extend(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks that its tokens take, if need be those of the youngest."""
        needed = blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while needed > self.pool.free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += self.pool.allocate(max(needed, 0))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        sequence.state = State.WAITING
        sequence.preempted += 1
        self.waiting.appendleft(sequence)
        self.preemptions += 1
        self._preempted(sequence)

    def _admit(self) -> Sequence | None:
        """Start the first sequence of the queue, if there is room for all its tokens and one more."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        sequence = self.waiting[0]
        length = len(sequence.tokens)
        # The last token is always computed: its logits are what the next token is chosen by.
        sequence.digests = self.pool.digests(sequence.root, sequence.tokens[:-1], sequence.digests)
        most = len(sequence.prompt_logprobs) if sequence.unscored else length - 1
        shared = self.pool.share(sequence.digests[: most // BLOCK_TOKENS])
        wanted = length + 1 if self.running else length  # alone it may take the last block
        if blocks_for(wanted) - len(shared) > self.pool.free:
            self.pool.release(shared)
            return None
        self.waiting.popleft()
        bisect.insort(self.running, sequence, key=lambda other: other.timings.arrived)
        sequence.state = State.RUNNING
        if sequence.timings.scheduled is None:
            sequence.timings.scheduled = time.monotonic()
        sequence.blocks = shared + self.pool.allocate(blocks_for(length) - len(shared))
        sequence.computed = len(shared) * BLOCK_TOKENS
        self.prefix_queries += length
        self.prefix_hits += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return sequence
