"""The decoder step in C++ against the reference, on every instruction set; caches are filled with NaN first."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from decoder_cases import VOCAB, Session, Shape, prompt, random_decoder
from kernel_cases import ISAS

from minifloat.kernels.decoder import Decoder, KVCache, cpu, step

#: Largest relative L2 distance of logits: sums in another order; with a narrow dtype or cache, what rounds the other
#: way now and then.
CLOSE = {"float32": 1e-5, "bfloat16": 3e-3, "E4M3": 3e-3}
CLOSE_DTYPES = {torch.float16: 3e-3, torch.bfloat16: 1e-2}

SHAPES = {
    "one head": Shape(heads=1, kv_heads=1, head_dim=8),
    "groups of one": Shape(heads=3, kv_heads=3, head_dim=64),
    "groups of three": Shape(heads=6, kv_heads=2, head_dim=80, biases=True),
    "groups of five": Shape(heads=5, kv_heads=1, head_dim=20, windows=(5, None)),
    "groups of seven": Shape(heads=14, kv_heads=2, head_dim=24, norms=True),
    "groups of eight": Shape(heads=8, kv_heads=1, head_dim=128, windows=(16, 17)),
    "groups of eleven": Shape(heads=11, kv_heads=1, head_dim=6, rotary=2),
    "groups of four": Shape(heads=8, kv_heads=2, head_dim=64, windows=(None, 70)),
    "large heads": Shape(heads=2, kv_heads=1, head_dim=256, rotary=64),
    "latents": Shape(heads=4, kv_heads=1, head_dim=48, rotary=16, latent=(32, 24, 20, 40), biases=True),
    "latents of odd sizes": Shape(
        heads=3, kv_heads=1, head_dim=46, rotary=6, norms=True, latent=(38, 7, 13, 0), windows=(19, None)
    ),
    "latents of DeepSeek": Shape(
        heads=17, kv_heads=1, head_dim=576, rotary=64, windows=(None,), latent=(512, 128, 128, 600)
    ),
    "odd sizes": Shape(heads=2, kv_heads=2, head_dim=34, rotary=0, windows=(1, 33), hidden=51, intermediate=37),
}

#: Shapes whose arithmetic differs between instruction sets in 16 bits.
IN_16_BITS = [
    "groups of three",
    "groups of four",
    "groups of eight",
    "large heads",
    "odd sizes",
    "latents",
    "latents of DeepSeek",
]

EXPERTS = {
    "six experts": Shape(experts=6, apart=True),
    "all of five experts": Shape(experts=5, top_k=5, shared=True),
    "one of 37 experts": Shape(experts=37, top_k=1, hidden=600, intermediate=33, apart=True, shared=True, biases=True),
    "eight of 128 experts": Shape(experts=128, top_k=8, hidden=64, intermediate=16),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results lie in memory that held NaN."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **how: empty(*size, **how) if how else torch.full(size, torch.nan)
    )


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.isfinite().all()
    return float((found - expected).norm() / expected.norm())


#: Ends of pieces of a prompt, at and around the edges of blocks; then token by token.
PIECES = (1, 3, 15, 16, 17, 31, 48, 49, 112, 160, 161, 176, 191, 192, 193, 200)
LENGTH = 203


@functools.cache
def expected(shape: str, dtype: torch.dtype, element: str) -> dict[str, torch.Tensor]:
    return in_pieces(Session.start(random_decoder(SHAPES[shape], dtype, (0.7, 0.3)), "reference", element=element))


def in_pieces(session: Session) -> dict[str, torch.Tensor]:
    """Logits of two sequences, the second starting later, both with pieces of all sizes."""
    parts: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    tokens = {"a": prompt(LENGTH, 1), "b": prompt(LENGTH, 2)}
    begin = 0
    for number, end in enumerate((*PIECES, *range(PIECES[-1] + 1, LENGTH + 1))):
        new = {"a": tokens["a"][begin:end]}
        if number >= 4:
            before = session.contexts.get("b", 0)
            new["b"] = tokens["b"][before : before + (number * 7) % 23 + 1]
        for name, logits in session.run(new).items():
            parts[name].append(logits)
        begin = end
    return {name: torch.cat(logits) for name, logits in parts.items()}


@pytest.mark.parametrize("element", ["float32", "bfloat16", "E4M3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_reference(isa: str, shape: str, element: str) -> None:
    decoder = random_decoder(SHAPES[shape], torch.float32, (0.7, 0.3))
    found = in_pieces(Session.start(decoder, "cpu", element=element))
    for name, exact in expected(shape, torch.float32, element).items():
        assert distance(found[name], exact) < CLOSE[element]


@pytest.mark.parametrize("shape", EXPERTS)
def test_experts_are_those_of_the_reference(isa: str, shape: str) -> None:
    decoder, exact = through_experts(shape)
    session = Session.start(decoder, "cpu")
    found = torch.cat([session.run({"a": prompt(130)})["a"], session.run({"a": [5, 6]})["a"]])
    # Nothing is normed inside of experts, and some tokens multiply a difference by ten.
    assert distance(found, exact) < 3 * CLOSE["float32"]


@functools.cache
def through_experts(shape: str) -> tuple[Decoder, torch.Tensor]:
    decoder = random_decoder(EXPERTS[shape], torch.float32)
    session = Session.start(decoder, "reference")
    return decoder, torch.cat([session.run({"a": prompt(130)})["a"], session.run({"a": [5, 6]})["a"]])


def test_nan_of_a_token_does_not_reach_others_through_experts(isa: str) -> None:
    decoder = random_decoder(Shape(experts=6, shared=True), torch.float32)
    decoder.embedding[13] = torch.nan
    logits = Session.start(decoder, "cpu").run({"a": [1, 2], "b": [13, 13, 3], "c": [4, 5]})
    assert logits["a"].isfinite().all()
    assert logits["b"].isnan().all()
    assert logits["c"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", IN_16_BITS)
def test_logits_in_16_bits(isa: str, shape: str, dtype: torch.dtype) -> None:
    found = in_pieces(Session.start(random_decoder(SHAPES[shape], dtype), "cpu", element="bfloat16"))
    for name, exact in in_16_bits(shape, dtype).items():
        assert distance(found[name], exact) < CLOSE_DTYPES[dtype]


@functools.cache
def in_16_bits(shape: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return in_pieces(Session.start(random_decoder(SHAPES[shape], dtype), "reference", element="bfloat16"))


@pytest.mark.parametrize("element", ["float32", "bfloat16", "E4M3"])
def test_the_cache_holds_what_the_reference_writes(isa: str, element: str) -> None:
    shape = Shape(head_dim=22, norms=True)
    caches = []
    for impl in ("cpu", "reference"):
        # Scales at which some values saturate; one layer, so that no difference has gone through attention.
        session = Session.start(
            random_decoder(dataclasses.replace(shape, windows=(None,)), torch.float32, (0.004, 0.003)), impl, 4, element
        )
        session.run({"a": prompt(37)})
        caches.append(session.cache.data)
    width = {"float32": torch.float32, "bfloat16": torch.bfloat16, "E4M3": torch.uint8}[element]
    found, exact = (cache.view(width).float() for cache in caches)
    assert torch.equal(found.isnan(), exact.isnan())
    same = found.nan_to_num() == exact.nan_to_num()
    assert same.float().mean() > (0.2 if element == "float32" else 0.99)
    torch.testing.assert_close(found, exact, atol=1e-5 if element == "float32" else 1.0, rtol=1e-2, equal_nan=True)
    if element == "E4M3":
        assert int((caches[0] == 0x7E).sum()) > 10, "nothing saturated"


@pytest.mark.parametrize("element", ["float32", "bfloat16", "E4M3"])
def test_long_contexts_are_cut_into_ranges(isa: str, element: str) -> None:
    shape = Shape(heads=6, kv_heads=2, head_dim=16, windows=(None, 700))
    tokens, results = prompt(1300), {}
    for impl in ("reference", "cpu"):
        session = Session.start(random_decoder(shape, torch.float32), impl, 90, element)
        session.run({"a": tokens[:1297]})
        results[impl] = torch.cat([session.run({"a": [token]})["a"] for token in tokens[1297:]])
    assert distance(results["cpu"], results["reference"]) < CLOSE[element]


def test_a_sequence_is_the_same_alone_and_among_others(isa: str) -> None:
    decoder = random_decoder(Shape(), torch.float32)
    alone, among = Session.start(decoder, "cpu"), Session.start(decoder, "cpu")
    others = {f"other {i}": prompt(3 * i + 1, i) for i in range(16)}
    for new in (prompt(40), [3], [4], [5, 6]):
        single = alone.run({"a": new})["a"]
        assert distance(among.run({"x": prompt(5), "a": new, **others})["a"], single) < 1e-5
        others = {name: [1] for name in others}


#: Elements of the cache and dtypes; the last goes through AMX where there is one.
WAYS = (("float32", torch.float32), ("bfloat16", torch.float32), ("E4M3", torch.float32), ("bfloat16", torch.bfloat16))
WIDE = Shape(heads=8, kv_heads=2, head_dim=32)


def test_nan_of_one_sequence_does_not_reach_another(isa: str) -> None:
    for element, dtype in WAYS:
        decoder = random_decoder(WIDE, dtype)
        decoder.embedding[13] = torch.nan
        session = Session.start(decoder, "cpu", element=element)
        clean = [token if token != 13 else 0 for token in prompt(30)]
        for piece in (clean[:20], clean[20:21], clean[21:]):
            logits = session.run({"a": piece, "b": [13, *piece], "c": piece})
            assert logits["a"].isfinite().all()
            assert logits["c"].isfinite().all()
            assert logits["b"].isnan().all()


@pytest.mark.parametrize("shape", [WIDE, Shape(heads=2, kv_heads=2, head_dim=32)], ids=["groups of four", "no groups"])
def test_nan_does_not_reach_earlier_tokens(isa: str, shape: Shape) -> None:
    for element, dtype in WAYS:
        decoder = random_decoder(shape, dtype)
        decoder.embedding[13] = torch.nan
        clean = [token if token != 13 else 0 for token in prompt(37)]
        logits = Session.start(decoder, "cpu", element=element).run({"a": [*clean, 13, 5]})["a"]
        assert logits[:37].isfinite().all()
        assert logits[37:].isnan().all()


def test_the_number_of_threads_changes_no_bit(isa: str) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            session = Session.start(random_decoder(Shape(), torch.float32), "cpu", 90)
            first = session.run({"a": prompt(1100), "b": prompt(90)})
            results.append(torch.cat([*first.values(), *session.run({"a": [1], "b": [2]}).values()]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])


def test_logits_of_some_tokens_in_any_order(isa: str) -> None:
    decoder = random_decoder(Shape(), torch.float32)
    everything = Session.start(decoder, "cpu")
    exact = everything.run({"a": prompt(20), "b": prompt(9, 1)})
    exact_rows = torch.cat([exact["a"], exact["b"]])
    for rows in ([28], [5, 28, 5, 0], list(range(29)) * 2, []):
        session = Session.start(decoder, "cpu")
        batch = session.batch({"a": prompt(20), "b": prompt(9, 1)}, rows)
        logits = step(decoder, session.cache, batch, "cpu")
        assert logits.shape == (len(rows), VOCAB)
        torch.testing.assert_close(logits, exact_rows[rows], atol=1e-4, rtol=1e-4)
        assert (
            torch.equal(session.cache.data, everything.cache.data)
            or distance(
                session.run({"a": [1]})["a"],
                Session(decoder, everything.cache, "cpu", {"a": 20, "b": 9}, everything.blocks).run({"a": [1]})["a"],
            )
            < 1e-5
        )


def test_the_time_of_each_part_is_reported(isa: str) -> None:
    decoder = random_decoder(Shape(), torch.float32)
    session = Session.start(decoder, "cpu")
    nanoseconds = torch.zeros(len(cpu.PARTS), dtype=torch.int64)
    cpu.step(decoder, session.cache, session.batch({"a": prompt(20)}), nanoseconds)
    assert (nanoseconds > 0).all()


def test_the_structures_of_a_decoder_are_freed_with_it() -> None:
    decoder = random_decoder(Shape(), torch.float32)
    session = Session.start(decoder, "auto")
    session.run({"a": [1]})
    count = len(cpu._DESCRIBED)
    del session, decoder
    assert len(cpu._DESCRIBED) == count - 1 or not ISAS


def test_a_cache_of_one_block_serves_its_tokens(isa: str) -> None:
    decoder = random_decoder(Shape(), torch.float32)
    session = Session.start(decoder, "cpu", 1)
    assert isinstance(session.cache, KVCache)
    assert session.run({"a": prompt(16)})["a"].isfinite().all()
