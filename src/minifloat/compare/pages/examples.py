"""Examples on a comparison's page: tokens at which two models differ most, and what each writes by itself.

What models write is hostile until shown otherwise: it goes through `visible`, is escaped, keeps its direction to itself
(``bdi``) and is cut where it is long.
"""

from __future__ import annotations

from collections.abc import Sequence

from minifloat.compare.generation import ContinuationPair, GreedyDivergence
from minifloat.compare.pages.numbers import number
from minifloat.compare.result import CandidateResult, LikelyToken, WorstToken
from minifloat.report.charts import meter
from minifloat.report.page import beside, folded, remark, subsection
from minifloat.report.svg import escape
from minifloat.report.text import token_text, visible

_SHOWN = 5
_CONTEXT, _TOKEN, _WRITTEN = 240, 40, 1500  #: characters at most


def worst_tokens(candidate: CandidateResult, name: str) -> str:
    """Where a candidate differs most, in context, with the first choices of both.

    Args:
        candidate: Whose.
        name: Heading; none: no heading.
    """
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
        beside(*(_choices(who, choices, worst.token) for who, choices in sides)),
    )


def _block(*parts: str) -> str:
    return f'<div class="case">{"".join(parts)}</div>'


def _written(text: str, marked: str = "") -> str:
    """What was written, with its end marked; each keeps its direction to itself."""
    end = f"<mark><bdi>{escape(marked)}</bdi></mark>" if marked else ""
    return f'<p class="written"><bdi>{escape(text)}</bdi>{end}</p>'


def _choices(who: str, choices: Sequence[LikelyToken], came: str) -> str:
    """Tokens with their probabilities; the one that came is marked."""
    items = []
    for choice in choices:
        token = f"<bdi>{escape(_token(choice.token))}</bdi>"
        token = f"<mark>{token}</mark>" if choice.token == came else token
        share = f"{choice.probability:.1%}"
        items.append(f"<li><span>{token}</span> <span>{share}</span> {meter(choice.probability, 80)}</li>")
    return f'{remark(who)}<ol class="choices">{"".join(items)}</ol>'


def _token(token: str) -> str:
    shown = token_text(token)
    return f"{shown[:_TOKEN]}…" if len(shown) > _TOKEN else shown


def greedy_samples(found: GreedyDivergence, name: str) -> str:
    """What both models wrote, side by side.

    Args:
        found: Of one candidate.
        name: Heading; none: no heading.
    """
    return subsection(name, *map(_sample, found.samples))


def _sample(sample: ContinuationPair) -> str:
    first, second = (visible(text, lines=True)[:_WRITTEN] for text in (sample.baseline, sample.candidate))
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    parted = f"they part at token {sample.parted_at}" if sample.parted_at is not None else "the same to the end"
    prompt = visible(sample.prompt)
    prompt = f"…{prompt[-_CONTEXT:]}" if len(prompt) > _CONTEXT else prompt
    sides = (("baseline", first), ("candidate", second))
    return _block(
        remark(f"Prompt; {parted} of the continuation"),
        _written(prompt),
        beside(*(remark(who) + _written(text[:same], text[same:]) for who, text in sides)),
    )
