"""What proposes tokens: the text so far, the model's own copy in MXFP4, or another model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.engine.native_runner import NativeRunner
from minifloat.engine.options import EngineOptions
from minifloat.engine.sampling import SamplingState
from minifloat.engine.scheduler import Runner, WorkItem
from minifloat.engine.sequence import Sequence
from minifloat.engine.speculation import Drafter
from minifloat.errors import UsageError
from minifloat.kernels.decoder import Attention, Decoder, DeltaNet, Experts, Layer, Mlp, Rotary
from minifloat.kernels.draw import Logits
from minifloat.kernels.memory import available_memory
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack, why_not
from minifloat.model.runtime.lm_head import FP8, round_weight
from minifloat.model.runtime.tokenizer import serving_tokenizer
from minifloat.numerics.scheme import WeightSpec, get_scheme

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

#: Tokens of a sequence that a draft model computes at a time where it has fallen behind.
_PIECE = 512
#: Lengths of the endings that are looked up, the longest first.
_LENGTHS = (4, 3, 2)
#: Only this many last tokens are searched, so that a search takes microseconds in a long context.
_SEARCHED = 8192
_BYTES = 4


# Good where output repeats its input (Saxena, "Prompt Lookup Decoding", 2023; "ngram" in vLLM).
class PromptLookup:
    """Proposes the tokens that followed the last occurrence of the sequence's last tokens, in prompt or output."""

    name = "prompt"
    weight_bytes = 0
    memory = 0

    def propose(self, sequences: Sequences[Sequence], counts: Sequences[int]) -> list[tuple[int, ...]]:
        return [_following(sequence.tokens, count) for sequence, count in zip(sequences, counts, strict=True)]

    def release(self, sequence: Sequence) -> None:
        """Do nothing: there is no state."""


def _following(tokens: Sequences[int], count: int) -> tuple[int, ...]:
    """Return at most `count` tokens that followed the last tokens before, none if those are new."""
    first = max(0, len(tokens) - _SEARCHED)
    text = b"".join([token.to_bytes(_BYTES, "little") for token in tokens[first:]])
    for length in _LENGTHS:
        if len(tokens) - first <= length:
            continue
        ending, end = text[-length * _BYTES :], len(text) - 1
        while (found := text.rfind(ending, 0, end)) >= 0:
            if found % _BYTES == 0:
                start = first + found // _BYTES + length
                return tuple(tokens[start : start + count])
            end = found + len(ending) - 1
    return ()


# A draft model with layers like the model's works in the model's own KV cache: it reads the model's keys and values and
# writes those of its drafts where the model overwrites them in the same step. Others have a cache of their own, with
# the same block numbers, and compute each sequence from its first token.
class ModelDrafter:
    def __init__(self, name: str, runner: NativeRunner, *, shares_cache: bool, memory: int) -> None:
        self.name, self.memory, self.shares_cache = name, memory, shares_cache
        self.weight_bytes = runner.weight_bytes
        self._runner = runner
        self._computed: dict[str, int] = {}  # tokens that a cache of its own holds, by request id

    def propose(self, sequences: Sequences[Sequence], counts: Sequences[int]) -> list[tuple[int, ...]]:
        """Propose tokens, as `Drafter.propose`; they stand in the sequences meanwhile."""
        lengths = [len(sequence.tokens) for sequence in sequences]
        active, items = list(range(len(sequences))), [self._catch_up(sequence) for sequence in sequences]
        try:
            while active:
                rows = self._runner.run(items).numpy()
                for row, token, index in zip(rows, rows.argmax(axis=-1).tolist(), active, strict=True):
                    sequence = sequences[index]
                    ahead = len(sequence.tokens) - lengths[index]
                    sequence.tokens.append(_draft(row, sequence.sampling, token, ahead))
                active = [index for index in active if len(sequences[index].tokens) - lengths[index] < counts[index]]
                items = [
                    WorkItem(sequences[index], len(sequences[index].tokens) - 1, len(sequences[index].tokens))
                    for index in active
                ]
            if not self.shares_cache:
                self._computed |= {each.request_id: length for each, length in zip(sequences, lengths, strict=True)}
            return [tuple(each.tokens[length:]) for each, length in zip(sequences, lengths, strict=True)]
        finally:
            for sequence, length in zip(sequences, lengths, strict=True):
                del sequence.tokens[length:]

    def release(self, sequence: Sequence) -> None:
        self._computed.pop(sequence.request_id, None)

    def _catch_up(self, sequence: Sequence) -> WorkItem:
        """Compute all tokens of a sequence that are missing in the cache but the last piece, and return that."""
        length = len(sequence.tokens)
        if self.shares_cache:
            return WorkItem(sequence, length - 1, length)
        start = min(self._computed.get(sequence.request_id, 0), length - 1)
        while length - start > _PIECE:
            self._runner.run([WorkItem(sequence, start, start + _PIECE)])
            start += _PIECE
        return WorkItem(sequence, start, length)


def _draft(logits: Logits, state: SamplingState, best: int, ahead: int) -> int:
    """Return the token that the draft model chooses; logits that are not finite give any token."""
    if state.params.is_greedy or not math.isfinite(logits[best]):
        return best
    return state.draw(logits, ahead)


_LOG = logging.getLogger(__name__)
#: Bytes of a draft per byte of the model that it copies: four bits and scales over eight.
_SELF_SHARE = 0.55
_MIB = 1 << 20
_BODY = get_scheme("mxfp4").weight
#: Four bits in the last linear change the largest logit far more often than in the others.
_HEAD = FP8
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


def open_drafter(
    options: EngineOptions,
    runner: Runner,
    tokenizer: TextTokenizer,
    read_draft: Callable[[Checkpoint], Decoder],
) -> Drafter | None:
    kind = "draft" if options.draft is not None else options.speculate
    if kind is None:
        return None
    if not isinstance(runner, NativeRunner):
        raise UsageError(
            f"speculate: only the native decoder of the CPU verifies drafts; the {runner.name} runner has this model"
        )
    if runner.states is not None:
        raise UsageError(
            "speculate: this model keeps one state of each sequence (gated delta rule), which cannot go back to before "
            "drafts that are refused; serve it without speculate and draft"
        )
    if kind == "prompt":
        return PromptLookup()
    started = time.perf_counter()
    if kind == "self":
        _check_memory(round(runner.weight_bytes * _SELF_SHARE), "the copy of the model in MXFP4")
        draft = SelfDraft(runner.decoder)
        drafter = ModelDrafter(
            "self", runner.drafting(draft.decoder, shares_cache=True), shares_cache=True, memory=draft.memory
        )
    else:
        assert options.draft is not None
        drafter = _read_draft(model_folder(options.draft), runner, tokenizer, read_draft)
    _LOG.info(
        "drafts by %s: %.0f MiB beside the model%s, made in %.1f s",
        "a copy of the model in MXFP4" if kind == "self" else options.draft,
        drafter.memory / _MIB,
        ", in the KV cache of the model" if drafter.shares_cache else ", its own KV cache included",
        time.perf_counter() - started,
    )
    return drafter


def _read_draft(
    folder: Path, runner: NativeRunner, tokenizer: TextTokenizer, read_draft: Callable[[Checkpoint], Decoder]
) -> ModelDrafter:
    ids = list(range(runner.vocab))
    if serving_tokenizer(folder).convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids):
        raise UsageError(f"draft: {folder} has another vocabulary than the model; its token ids mean other text")
    with Checkpoint.open(folder) as checkpoint:
        _check_memory(sum(info.nbytes for info in checkpoint.tensors.values()), f"the draft {folder}")
        decoder = read_draft(checkpoint)
    reason = why_not_draft(runner.decoder, decoder)
    if reason:
        raise UsageError(f"draft: {folder} cannot draft for the model: {reason}")
    shares = shares_cache(runner.decoder, decoder)
    if shares:
        decoder = with_cache_scales(decoder, runner.decoder)
    drafting = runner.drafting(decoder, shares_cache=shares)
    memory = drafting.weight_bytes + decoder.embedding.nbytes + (0 if shares else drafting.kv_bytes)
    return ModelDrafter("model", drafting, shares_cache=shares, memory=memory)


def _check_memory(nbytes: int, what: str) -> None:
    free = available_memory()
    if nbytes > free:
        raise UsageError(f"speculate: {what} takes {nbytes / _MIB:.0f} MiB, and {free / _MIB:.0f} MiB are free")


class SelfDraft:
    """A copy of a decoder whose linears are MXFP4, and whose last linear is FP8, rounded to nearest."""

    def __init__(self, decoder: Decoder) -> None:
        self.memory = 0
        layers = tuple(self._layer(layer) for layer in decoder.layers)
        if not self.memory:
            raise UsageError(
                "speculate: the weights have four bits already, so the model has no cheaper copy of itself; "
                "use speculate='prompt', or a smaller model as the draft"
            )
        self.decoder = replace(decoder, layers=layers, lm_head=self._weight(decoder.lm_head, _HEAD))

    def _layer(self, layer: Layer) -> Layer:
        attention = self._attention(_plain(layer))
        mlp = self._experts(layer.mlp) if isinstance(layer.mlp, Experts) else self._mlp(layer.mlp)
        return replace(layer, attention=attention, mlp=mlp)

    def _attention(self, attention: Attention) -> Attention:
        qkv, out, latent = self._group(FusedWeights, attention.qkv), self._weight(attention.out), attention.latent
        if latent is not None:
            latent = replace(
                latent,
                keys=self._group(PackedExperts, latent.keys),
                values=self._group(PackedExperts, latent.values),
                q_up=None if latent.q_up is None else self._weight(latent.q_up),
            )
        return replace(attention, qkv=qkv, out=out, latent=latent)

    def _mlp(self, mlp: Mlp) -> Mlp:
        return replace(mlp, gate_up=self._group(FusedWeights, mlp.gate_up), down=self._weight(mlp.down))

    def _experts(self, experts: Experts) -> Experts:
        return replace(
            experts,
            gate_up=tuple(self._group(PackedExperts, stack) for stack in experts.gate_up),
            down=self._group(PackedExperts, experts.down),
            shared=None if experts.shared is None else self._mlp(experts.shared),
        )

    def _group(self, kind: type[_Weights], weights: Sequences[PackedWeight]) -> _Weights:
        """Convert weights of one call, all of them or none: a call takes weights of one format."""
        converted = [self._converted(weight, _BODY) for weight in weights]
        if any(weight is None for weight in converted):
            return kind(list(weights))
        self.memory += sum(weight.nbytes for weight in converted if weight is not None)
        return kind([weight for weight in converted if weight is not None])

    def _weight(self, weight: PackedWeight, spec: WeightSpec = _BODY) -> PackedWeight:
        converted = self._converted(weight, spec)
        if converted is None:
            return weight
        self.memory += converted.nbytes
        return converted

    def _converted(self, weight: PackedWeight, spec: WeightSpec) -> PackedWeight | None:
        """Return a weight in another format; None if it is as small already, or has no such form."""
        bits = 16.0 if weight.spec is None else weight.spec.bits_per_weight(weight.shape)
        if spec.bits_per_weight(weight.shape) >= bits or why_not(spec, weight.shape, "cpu"):
            return None
        return pack(round_weight(weight.dequantize(torch.bfloat16), spec, "the draft's copy of a weight"))


def why_not_draft(model: Decoder, draft: Decoder) -> str:
    if draft.lm_head.shape[0] != model.lm_head.shape[0]:
        return f"it has {draft.lm_head.shape[0]} logits per token, the model {model.lm_head.shape[0]}"
    if draft.state_floats:
        return "it keeps one state of each sequence (gated delta rule), which cannot go back to before refused drafts"
    return ""


def shares_cache(model: Decoder, draft: Decoder) -> bool:
    """Return whether a draft can work in the KV cache of a model: the same layers of attention."""
    if len(model.layers) != len(draft.layers) or model.hidden != draft.hidden:
        return False
    return all(
        _same_attention(_plain(first), _plain(second)) and first.cache_of == second.cache_of
        for first, second in zip(model.layers, draft.layers, strict=True)
    )


def _plain(layer: Layer) -> Attention:
    """Return the attention of a layer; models with others neither draft nor verify drafts."""
    assert not isinstance(layer.attention, DeltaNet)
    return layer.attention


def _same_attention(first: Attention, second: Attention) -> bool:
    """Return whether keys and values of one have the shapes, the positions and the scale of the other's."""
    fields = ("heads", "cache_shape", "scale", "window", "values")
    return all(getattr(first, field) == getattr(second, field) for field in fields) and _same_rotary(
        first.rotary, second.rotary
    )


def _same_rotary(first: Rotary | None, second: Rotary | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        first.scaling == second.scaling
        and first.interleaved == second.interleaved
        and torch.equal(first.inv_freq, second.inv_freq)
    )


def with_cache_scales(draft: Decoder, model: Decoder) -> Decoder:
    """Return a draft that reads and writes an E4M3 cache with the scales of a model."""
    layers = []
    for layer, other in zip(draft.layers, model.layers, strict=True):
        scales = _plain(other)
        attention = replace(_plain(layer), k_scale=scales.k_scale, v_scale=scales.v_scale)
        layers.append(replace(layer, attention=attention))
    return replace(draft, layers=tuple(layers))
