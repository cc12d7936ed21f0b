"""The distributions of two models over a vocabulary, compared in float64: totals, KL divergence, first choices.

In float64 a model compared with itself gives exactly 0. The native kernel reads float32 logits once for the largest and
once for the sums; the reference in torch takes a slab of positions at a time, and any dtype and device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels import native, threads
from minifloat.kernels.native import STRUCTS

#: Number of most probable tokens whose overlap between two models is counted.
TOP_K = 10
#: Logits of one model that the reference holds in float64 at a time: so few that they stay in the processor's caches.
_SLAB_ELEMENTS = 2**18


@dataclass
class Choices:
    """The first choices of one model after each of R texts; logits are less `largest`, in nats."""

    top: Tensor  # int64 [R, k]; equal logits in the order of the tokens
    top_logits: Tensor  # float64 [R, k]
    largest: Tensor  # float64 [R]
    log_total: Tensor  # float64 [R]

    def margin(self) -> Tensor:
        """Return the nats ``[R]`` between the first and the second choice; Inf where there is no second."""
        if self.top.shape[-1] < 2:
            return torch.full_like(self.log_total, torch.inf)
        return self.top_logits[:, 0] - self.top_logits[:, 1]

    def top_log_probabilities(self) -> Tensor:
        """Return the log-probabilities ``[R, k]`` of the tokens in `top`, in nats."""
        return self.top_logits - self.log_total[:, None]

    def nll_of(self, logits: Tensor) -> Tensor:
        """Return -log of the probabilities of tokens with these logits ``[R]``, in nats."""
        return self.log_total - (logits.double() - self.largest)


class Distribution(Choices):
    """The distributions of one model's logits ``[R, V]``."""

    def __init__(self, logits: Tensor) -> None:
        wide = logits.double()
        top_logits, top = _ordered(*wide.topk(min(TOP_K, wide.shape[-1]), dim=-1))
        largest = top_logits[:, 0].clone()
        self.logits = wide.sub_(largest[:, None]) if wide is not logits else wide - largest[:, None]
        self.weights = self.logits.exp()
        self.total = self.weights.sum(-1)
        super().__init__(top, top_logits - largest[:, None], largest, self.total.log())

    def nll(self, targets: Tensor) -> Tensor:
        """Return -log of the probabilities of tokens ``[R]``, in nats."""
        return self.log_total - self.logits.gather(-1, targets[:, None].to(self.logits.device))[:, 0]


def _ordered(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Put equal logits in the order of the tokens, of which greedy decoding takes the first."""
    tokens, order = tokens.sort(dim=-1)
    logits, order = logits.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return logits, tokens.gather(-1, order)


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """Return ``sum p (log p - log q)`` over the vocabulary, ``[R]``, in nats."""
    total = (p.logits - q.logits).mul_(p.weights).sum(-1)
    if bool(total.isnan().any()):  # 0 times infinity, or NaN in a model's logits
        terms = torch.where(p.weights == 0, torch.zeros_like(p.weights), p.weights * (p.logits - q.logits))
        total = terms.sum(-1)
    return _normalized(total, p.total, p, q)


def _normalized(total: Tensor, weights: Tensor, p: Choices, q: Choices) -> Tensor:
    return (total / weights - p.log_total + q.log_total).clamp_min(0)  # rounding can make it negative


def divergence(p: Tensor, q: Tensor, *, impl: str = "auto") -> tuple[Tensor, Choices, Choices]:
    """Return the KL divergence ``[R]`` of logits `q` from logits `p`, both ``[R, V]``, and the choices of both."""
    if p.ndim != 2 or p.shape != q.shape or p.shape[1] < 1:
        raise ShapeError("q", f"expected logits [R, V] of the shape of p, {list(p.shape)}, got {list(q.shape)}")
    reason = None if p.device.type == q.device.type == "cpu" else f"the logits are on {p.device} and {q.device}"
    if native.runs("divergence", impl, reason):
        return _divergence_native(p.float().contiguous(), q.float().contiguous())
    rows = max(_SLAB_ELEMENTS // p.shape[1], 1)
    parts = [
        _divergence_in_torch(*few) for few in zip(torch.split(p, rows), torch.split(q.to(p.device), rows), strict=True)
    ]
    kl, of_p, of_q = zip(*parts, strict=True)
    return torch.cat(kl), _joined(of_p), _joined(of_q)


def _divergence_in_torch(p: Tensor, q: Tensor) -> tuple[Tensor, Choices, Choices]:
    of_p, of_q = Distribution(p), Distribution(q)
    return kl_divergence(of_p, of_q), of_p, of_q


def _joined(parts: tuple[Choices, ...]) -> Choices:
    names = ("top", "top_logits", "largest", "log_total")
    return Choices(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _divergence_native(p: Tensor, q: Tensor) -> tuple[Tensor, Choices, Choices]:
    rows, vocab = p.shape
    top = min(TOP_K, vocab)
    sums = torch.empty(rows, 3, dtype=torch.float64)
    logits = torch.empty(2, rows, top)
    tokens = torch.empty(2, rows, top, dtype=torch.int32)
    args = STRUCTS["divergence_args"](
        p=p.data_ptr(),
        q=q.data_ptr(),
        rows=rows,
        vocab=vocab,
        top=top,
        threads=threads.count(),
        sums=sums.data_ptr(),
        p_logits=logits[0].data_ptr(),
        q_logits=logits[1].data_ptr(),
        p_tokens=tokens[0].data_ptr(),
        q_tokens=tokens[1].data_ptr(),
    )
    native.require().call("divergence", args)
    wide, log_totals = logits.double(), sums[:, :2].log()
    of_p, of_q = (
        Choices(tokens[model].long(), wide[model] - wide[model, :, :1], wide[model, :, 0], log_totals[:, model])
        for model in range(2)
    )
    return _normalized(sums[:, 2], sums[:, 0], of_p, of_q), of_p, of_q
