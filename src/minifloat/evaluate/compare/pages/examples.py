"""Examples on a comparison's page: the tokens at which two models differ most, and pairs of continuations.

Text from models is treated as hostile: it goes through `visible`, is escaped, cannot change the direction of other text
(``bdi``), and is cut if it is long.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifloat.evaluate.compare.generation import ContinuationPair, GreedyDivergence
from minifloat.evaluate.compare.pages.numbers import number
from minifloat.evaluate.compare.result import CandidateResult, LikelyToken, WorstToken
from minifloat.report.charts import meter
from minifloat.report.page import beside, folded, remark, subsection
from minifloat.report.svg import escape
from minifloat.report.text import token_text, visible

_SHOWN = 5
_CONTEXT, _TOKEN, _WRITTEN = 240, 40, 1500  #: largest numbers of characters


def worst_tokens(candidate: CandidateResult, name: str) -> str:
    """Show the tokens at which a candidate differs most, in context, with the first choices of both models."""
    cases = [_case(worst) for worst in candidate.worst]
    rest = cases[_SHOWN:]
    return subsection(name, *cases[:_SHOWN], folded(f"{len(rest)} more", "\n".join(rest)) if rest else "")


def _case(worst: WorstToken) -> str:
    place = f"{visible(worst.text)}, document {worst.document}, token {worst.position}"
    context = visible(worst.context)
    before = f"…{context[-_CONTEXT:]}" if len(context) > _CONTEXT else context
    sides = (("baseline", worst.baseline), ("candidate", worst.candidate))
    return _block(
        remark(f"KL {number(worst.kl, 3)} nats; {place}"),
        _written(before, _token(worst.token)),
        beside(*(_likely_tokens(model, tokens, worst.token) for model, tokens in sides)),
    )


def _block(*parts: str) -> str:
    return f'<div class="case">{"".join(parts)}</div>'


def _written(text: str, marked: str = "") -> str:
    """Return a paragraph of text with a marked end, each with its own direction."""
    end = f"<mark><bdi>{escape(marked)}</bdi></mark>" if marked else ""
    return f'<p class="written"><bdi>{escape(text)}</bdi>{end}</p>'


def _likely_tokens(model: str, tokens: Sequence[LikelyToken], actual: str) -> str:
    """Return a list of tokens with their probabilities; the token that the text has is marked."""
    items = []
    for likely in tokens:
        token = f"<bdi>{escape(_token(likely.token))}</bdi>"
        token = f"<mark>{token}</mark>" if likely.token == actual else token
        share = f"{likely.probability:.1%}"
        items.append(f"<li><span>{token}</span> <span>{share}</span> {meter(likely.probability, 80)}</li>")
    return f'{remark(model)}<ol class="choices">{"".join(items)}</ol>'


def _token(token: str) -> str:
    shown = token_text(token)
    return f"{shown[:_TOKEN]}…" if len(shown) > _TOKEN else shown


def greedy_samples(divergence: GreedyDivergence, name: str) -> str:
    """Show continuations of both models side by side."""
    return subsection(name, *map(_sample, divergence.samples))


def _sample(sample: ContinuationPair) -> str:
    first, second = (visible(text, lines=True)[:_WRITTEN] for text in (sample.baseline, sample.candidate))
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    parted = f"they part at token {sample.parted_at}" if sample.parted_at is not None else "the same to the end"
    prompt = visible(sample.prompt)
    prompt = f"…{prompt[-_CONTEXT:]}" if len(prompt) > _CONTEXT else prompt
    sides = (("baseline", first), ("candidate", second))
    return _block(
        remark(f"Prompt; {parted} of the continuation"),
        _written(prompt),
        beside(*(remark(model) + _written(text[:common], text[common:]) for model, text in sides)),
    )
