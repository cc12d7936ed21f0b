"""Decides which tokens of which sequences the next step computes.

First come, first served, among requests of the same priority; lower priorities leave the queue first. A request that
has waited for `LONGEST_WAIT` seconds is overtaken by none that came later. Every running sequence that waits for one
token gets one; the rest of the token budget goes to prompts, in pieces, oldest first (chunked prefill: Agrawal et al.,
"Sarathi-Serve", OSDI 2024). Beside running sequences the pieces are small, so that a long prompt delays the next token
of the others by little; they grow with the number of these, so that new chats begin while many run. A prompt gets all
its blocks when it is admitted. When an older sequence needs a block and none is free, the youngest sequence loses its
blocks and is computed again later (preemption by recompute: Kwon et al., "PagedAttention", SOSP 2023). The oldest is
therefore never preempted, and every waiting sequence becomes the oldest at some time: none starves.

If a request asks for the log-probabilities of tokens of its prompt, the logits before these tokens are computed. Such
a prompt therefore shares only blocks before them, and a step computes only `SCORED_TOKENS` of such logits, because they
are large.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

from torch import Tensor

from minifloat.engine.cache import BlockPool, StateSnapshots, blocks_for
from minifloat.engine.sequence import Sequence, State
from minifloat.kernels.decoder import BLOCK_TOKENS

#: Tokens of prompts for which one step computes logits: 128 MiB with a vocabulary of 128 Ki.
SCORED_TOKENS = 256
#: Seconds after which no later request of another priority overtakes one that waits.
LONGEST_WAIT = 10.0


class WorkItem(NamedTuple):
    """Tokens ``start .. end - 1`` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int
    scored: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        tokens = self.sequence.tokens[self.start : self.end]
        return [*tokens, *self.drafts] if self.drafts else tokens

    @property
    def samples(self) -> bool:
        """Whether the next token of the sequence can be chosen after this work."""
        return self.end == len(self.sequence.tokens) + len(self.drafts)

    @property
    def ends_pooling(self) -> bool:
        """Whether the vector of a text is known after this work."""
        return self.sequence.pooled is not None and self.samples

    @property
    def ends_scoring(self) -> bool:
        """Whether a sequence that only scores its prompt is finished after this work."""
        return self.sequence.only_scores and self.end == self.sequence.computable

    @property
    def logits(self) -> int:
        """Number of tokens, the last ones, whose logits are needed: all drafts, and the token before the first."""
        return self.scored + (self.samples and 1 + len(self.drafts))


class Scheduler:
    """Holds the sequences that are not finished, and plans the steps."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_tokens: int,
        prompt_tokens_beside: int,
        preempted: Callable[[Sequence], None],
        max_scored_tokens: int = SCORED_TOKENS,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.pool = pool
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.prompt_tokens_beside, self.max_scored_tokens = prompt_tokens_beside, max_scored_tokens
        self._preempted = preempted
        self._snapshots = snapshots
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._slots = list(reversed(range(max_sequences)))
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._stop(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> list[WorkItem]:
        """Return the work of the next step; sequences that wait for one token come first."""
        work = self._next_tokens()
        budget = self.max_tokens - len(work)
        if work:
            budget = min(budget, self.prompt_tokens_beside + len(work))
        scored = self.max_scored_tokens
        if len(work) < len(self.running):
            for sequence in [other for other in self.running if other.pending > 1]:
                budget, scored = self._take(sequence, work, budget, scored)
        while budget > 0 and (admitted := self._admit()) is not None:
            budget, scored = self._take(admitted, work, budget, scored)
        return work

    def next_step(self, items: Sequences[WorkItem]) -> list[WorkItem] | None:
        """Return the work of the step after one that is being computed, before its tokens are known."""
        # Sequences that end with their next token get no work. Nothing is preempted, and no prompt begins.
        if self.waiting and len(self.running) < self.max_sequences:
            return None
        live = [item for item in items if item.sequence.state is State.RUNNING]
        if len(live) != len(self.running) or not all(item.samples for item in live):
            return None
        work = []
        needed = 0
        for sequence, _, end, _, _ in live:
            if end + 1 < sequence.max_length:
                work.append(WorkItem(sequence, end, end + 1))
                needed += end == len(sequence.blocks) * BLOCK_TOKENS
        if not work or needed > self.pool.free:
            return None
        for sequence, _, end, _, _ in work:
            if end > len(sequence.blocks) * BLOCK_TOKENS:
                sequence.blocks += self.pool.allocate(1)
        return work

    def room(self, sequence: Sequence, tokens: int) -> int:
        """Give a running sequence blocks for tokens after its own, as far as blocks are free."""
        length = len(sequence.tokens)
        missing = blocks_for(length + tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += self.pool.allocate(min(missing, self.pool.free))
        return min(tokens, len(sequence.blocks) * BLOCK_TOKENS - length)

    def computed(self, items: Iterable[WorkItem]) -> list[WorkItem]:
        """Note that work is done, and let other sequences share the blocks that it has filled."""
        items = [item for item in items if item.sequence.state is State.RUNNING]
        for item in items:
            # drafts are no tokens of the sequence until they are accepted
            self._publish(item.sequence, item.end - len(item.drafts))
        return items

    def accepted(self, sequence: Sequence) -> None:
        """Note that all tokens of a sequence but its last are in the cache, after drafts were accepted."""
        self._publish(sequence, len(sequence.tokens) - 1)

    def _publish(self, sequence: Sequence, end: int) -> None:
        first, full = sequence.computed // BLOCK_TOKENS, end // BLOCK_TOKENS  # blocks that are full
        sequence.computed = end
        if full > first and self.pool.shares:
            sequence.digests = self.pool.digests(sequence.root, sequence.tokens[:end], sequence.digests[:full])
            for index in range(first, full):
                self.pool.publish(sequence.blocks[index], sequence.digests[index])
        if self._snapshots is not None and end in sequence.snapshots:
            assert sequence.slot is not None
            self._snapshots.keep(sequence.digests[full - 1], sequence.slot)

    def _take(self, sequence: Sequence, work: list[WorkItem], budget: int, scored: int) -> tuple[int, int]:
        """Add the next piece of a prompt to the work of a step, and return the rest of the two budgets."""
        room = budget
        if sequence.unscored:
            room = min(budget, max(sequence.next_scored - 1 - sequence.computed, 0) + scored)
        if room <= 0:
            return budget, scored
        piece = self._piece(sequence, room)
        work.append(piece)
        return budget - (piece.end - piece.start), scored - piece.scored

    def _piece(self, sequence: Sequence, budget: int) -> WorkItem:
        start, end = sequence.computed, min(sequence.computed + budget, sequence.computable)
        end = min([end, *(stop for stop in sequence.snapshots if stop > start)])
        first = max(start, sequence.next_scored - 1)
        last = min(end, sequence.prompt_length - 1)
        if sequence.pooled is not None and sequence.pooled.needs_all:
            return WorkItem(sequence, start, end, end - start - (end == len(sequence.tokens)))
        return WorkItem(sequence, start, end, max(last - first, 0) if sequence.unscored else 0)

    def _next_tokens(self) -> list[WorkItem]:
        """Return work of one token for each sequence that is past its prompt, and give it a block."""
        work: list[WorkItem] = []
        preemptions = self.preemptions
        for sequence in list(self.running):
            length, computed = len(sequence.tokens), sequence.computed
            if length - computed != 1 or sequence.state is not State.RUNNING or len(work) == self.max_tokens:
                continue
            has_room = length <= len(sequence.blocks) * BLOCK_TOKENS
            if has_room or self._extend(sequence):
                work.append(WorkItem(sequence, computed, length))
        if self.preemptions == preemptions:
            return work
        return [item for item in work if item.sequence.state is State.RUNNING]

    def _extend(self, sequence: Sequence) -> bool:
        """Give a sequence the blocks for its tokens, if necessary those of the youngest; False if it was preempted."""
        needed = blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while needed > self.pool.free:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += self.pool.allocate(needed)
        return True

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        assert sequence.slot is not None
        self._slots.append(sequence.slot)
        sequence.slot = None

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        sequence.computed = 0
        sequence.state = State.WAITING
        sequence.preempted += 1
        self.add(sequence)
        self.preemptions += 1
        self._preempted(sequence)

    def _first(self) -> Sequence:
        """Return the sequence that leaves the queue next."""
        oldest = min(self.waiting, key=lambda other: other.timings.arrived)
        return oldest if time.monotonic() - oldest.timings.arrived > LONGEST_WAIT else self.waiting[0]

    def _admit(self) -> Sequence | None:
        """Start the first sequence of the queue, if there are blocks for all its tokens and one more."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return None
        sequence = self._first()
        length = sequence.computable
        # The last token is always computed: the next token is chosen, or the last one scored, by its logits.
        if self.pool.shares:
            sequence.digests = self.pool.digests(sequence.root, sequence.tokens[: length - 1], sequence.digests)
        most = sequence.next_scored - 1 if sequence.unscored else length - 1
        if sequence.pooled is not None and sequence.pooled.needs_all:
            most = 0
        digests = sequence.digests[: most // BLOCK_TOKENS]
        known = self.pool.known(digests)
        usable = known if self._snapshots is None else self._snapshots.longest(digests[:known])
        shared = self.pool.share(digests[:usable])
        needed = length + 1 if self.running else length  # a sequence that runs alone may take the last block
        if blocks_for(needed) - len(shared) > self.pool.free:
            self.pool.release(shared)
            return None
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=lambda other: other.timings.arrived)
        sequence.state = State.RUNNING
        sequence.slot = self._slots.pop()
        if sequence.timings.scheduled is None:
            sequence.timings.scheduled = time.monotonic()
        sequence.blocks = shared + self.pool.allocate(blocks_for(length) - len(shared))
        sequence.computed = len(shared) * BLOCK_TOKENS
        if self._snapshots is not None and self.pool.shares:
            sequence.snapshots = self._snapshots.ends(sequence.computed, length, known)
            if shared:
                self._snapshots.restore(digests[len(shared) - 1], sequence.slot)
        self.prefix_queries += length
        self.prefix_hits += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return sequence


def _rank(sequence: Sequence) -> tuple[bool, int, float]:
    """Return the key by which sequences wait: preempted ones before all others, then by priority."""
    is_new = not sequence.preempted
    return is_new, is_new * sequence.request.priority, sequence.timings.arrived


class Runner:
    """Holds the weights and the memory of the KV cache.

    Attributes:
        name: "native", "device" or "transformers".
        on_device: Whether logits stay on a device, which then chooses tokens and may begin the next step before.
        weight_bytes: Bytes of the weights that one token is multiplied with.
        kv_element: Format of cached keys and values.
        kv_bytes: Bytes of the whole KV cache.
        vocab: Number of logits per token.
        state_bytes: Bytes of the states that some layers keep of sequences beside the KV cache.
        prefill_bytes: Bytes of the second copy of the weights that inputs in FP8 are multiplied with.
        reason_no_prefixes: Why sequences with equal beginnings cannot share blocks; empty if they can.
        snapshots: Copies of these states, which equal beginnings need; None: there are none.
    """

    name: str
    on_device = False
    weight_bytes: int
    kv_element: str
    kv_bytes: int
    vocab: int
    state_bytes = 0
    prefill_bytes = 0
    reason_no_prefixes = ""
    snapshots: StateSnapshots | None = None

    def run(self, works: Sequences[WorkItem], memory: Tensor | None = None) -> Tensor:
        """Compute tokens and put their keys and values into the cache.

        A call that raised may be repeated with some of the same work.

        Args:
            works: What to compute.
            memory: The logits of an earlier call, which these may overwrite: fresh memory takes time.

        Returns:
            float32 ``[n, vocab]``: the logits after the last `WorkItem.logits` tokens of each work item in turn, on the
            runner's device. The next call may overwrite them.
        """
        raise NotImplementedError

    def run_ahead(self, works: Sequences[WorkItem], tokens: Tensor) -> Tensor:
        """Compute one token of each sequence, as `run`, before the host knows the tokens; only if `on_device`."""
        raise NotImplementedError

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of all steps so far by part ("linears", "attention", "rows"); empty if unknown."""
        return {}

    def release(self, sequence: Sequence) -> None:
        """Forget the state of a sequence that has lost its blocks or is finished."""
