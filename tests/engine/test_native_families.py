"""Every family of the native decoder computes what transformers computes, and every part of its layout matters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_cases import Session, prompt
from modes import each_value
from native_cases import CASES, TOWERS, VOCAB, config_of, greedy, model_of, quantizable_sizes, with_tower, write

from minifloat.checkpoint import Checkpoint
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.engine.blueprint import Blueprint, blueprint_of
from minifloat.engine.native_decoder import build_native_decoder
from minifloat.kernels.decoder import IMPLEMENTATIONS, Decoder
from minifloat.model.architecture.decoder import NATIVE, NotNative, decoder_layout
from minifloat.model.layouts import describe
from minifloat.model.runtime.config import plain_config
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tensors import StoredTensors
from minifloat.model.runtime.weights import WeightSource
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

COUNT, LENGTH = 8, 75
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
CLOSE = 1e-4

families = pytest.mark.parametrize("name", CASES)


PROMPTS = [prompt(61, 1), prompt(23, 2), prompt(40, 3)]


@functools.cache
def model(name: str) -> Any:
    return model_of(name)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: write(model(name), tmp_path_factory.mktemp("m") / name.replace(" ", "_")))


def assert_greedy(engine: Engine, model: Any) -> list[list[int]]:
    """Assert that the engine's tokens are those of transformers' code, and return them."""
    found = [list(completion.tokens) for completion in engine.generate(PROMPTS, GREEDY)]
    assert found == [greedy(model, tokens, COUNT, guess) for tokens, guess in zip(PROMPTS, found, strict=True)]
    return found


@functools.cache
def expected_logits(name: str) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(name)(torch.tensor([prompt(LENGTH)])).logits[0]
    return logits


def memory_of_blocks(engine: Engine, count: int) -> int:
    """Bytes of a cache of some blocks, and of as many states of sequences as take less than those blocks."""
    blocks = engine.info.kv_bytes_per_token * 16 * count
    state = engine.info.state_bytes // engine.info.max_num_seqs
    return blocks + (blocks // state * state if state else 0)


def decoder_of(folder: Path, change: Callable[[Blueprint], Blueprint] = lambda blueprint: blueprint) -> Decoder:
    with Checkpoint.open(folder) as checkpoint:
        tensors = StoredTensors(checkpoint, describe(checkpoint))
        blueprint = blueprint_of(plain_config(checkpoint), torch.float32)
        weights = WeightSource(tensors, blueprint.parameters(), torch.float32, torch.device("cpu"))
        return build_native_decoder(change(blueprint), weights, {})


def logits_of(decoder: Decoder, impl: str = "auto") -> torch.Tensor:
    """The logits of a prompt in pieces, then token by token."""
    session, tokens, parts = Session.start(decoder, impl), prompt(LENGTH), []
    for begin, end in ((0, 7), (7, 16), (16, 33), (33, 34), (34, 60), *((i, i + 1) for i in range(60, LENGTH))):
        parts.append(session.run({"a": tokens[begin:end]})["a"])
    return torch.cat(parts)


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(NATIVE)


@families
@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "auto"])
def test_logits_are_those_of_transformers(name: str, impl: str, folder_of: Callable[[str], Path]) -> None:
    exact = expected_logits(name)
    scale = float(exact.abs().max())
    assert scale > 0.5, "a model whose logits hardly differ tests nothing"
    found = logits_of(decoder_of(folder_of(name)), impl)
    torch.testing.assert_close(found, exact, atol=CLOSE * scale, rtol=0)


@families
def test_greedy_tokens_are_those_of_transformers(name: str, folder_of: Callable[[str], Path]) -> None:
    """Alone, together, in pieces, after preemption, and from the prefix cache."""
    engine = Engine(folder_of(name), EngineOptions(dtype="float32", max_num_seqs=5, max_num_batched_tokens=16))
    assert engine.info.runner == "native", engine.info.reason_not_native
    alone = [list(engine.generate([tokens], GREEDY)[0].tokens) for tokens in PROMPTS]
    answers = assert_greedy(engine, model(name))
    assert alone == answers
    small = Engine(
        folder_of(name), EngineOptions(dtype="float32", kv_cache_memory=memory_of_blocks(engine, 7), max_model_len=80)
    )
    assert [list(completion.tokens) for completion in small.generate(PROMPTS, GREEDY)] == answers


# ---------------------------------------------------------------------------------- what a layout states, it computes


#: Fields of layouts that change what is computed, and what replaces their values.
_WITHOUT: dict[str, Any] = {
    "embedding_factor": 1.0,
    "logits_factor": 1.0,
    "logits_cap": None,
    "residual_factor": 1.0,
    "window": None,
    "sinks": None,
    "score_cap": None,
    "clip": None,
    "v_norm": None,
    "scalar": None,
    "scales": None,
    "table_factor": 1.0,
    "whole_norms": False,
    "rotary": None,
    "interleaved": False,
    "partial": False,
    "q_norm": None,
    "k_norm": None,
    "attention_norm": None,
    "result_norm": None,
    "offset": 0.0,
    "centered": False,
    "parallel": False,
    "limit": float("inf"),
    "alpha": 1.0,
    "bias": None,
    "correction": None,
    "groups": 1,
    "group_best": 2,
    "kv_norm": None,
    "factor": 1.0,
    "normalize": False,
    "kind": "softmax",
    "grouped": False,
    "shared_gate": None,
    "shared": None,
    "gate_up_bias": None,
    "down_bias": None,
}


#: What a norm behind it undoes, but for its epsilon; and an MLP without which there are no norms of experts.
_UNDONE = {"gemma4_text": ["factor"], "gemma4_text with experts": ["normalize", "shared"]}


def stated(part: Any) -> Iterator[str]:
    """The fields of `_WITHOUT` that a layout sets."""
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name)
        if field.name in _WITHOUT and value != _WITHOUT[field.name]:
            yield field.name
        for inner in value if isinstance(value, tuple) else (value,):
            yield from stated(inner)


def without(part: Any, name: str) -> Any:
    """A layout without a field, wherever it is set."""
    if isinstance(part, tuple):
        return tuple(without(inner, name) for inner in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    values = {field.name: without(getattr(part, field.name), name) for field in fields(part)}
    if name in values:
        values[name] = _WITHOUT[name]
    if name == "groups" and "groups_kept" in values:
        values["groups_kept"] = 1
    return replace(part, **values)


@families
def test_every_part_of_a_layout_changes_the_logits(name: str, folder_of: Callable[[str], Path]) -> None:
    exact = expected_logits(name)
    found: list[str] = []

    def note(blueprint: Blueprint) -> Blueprint:
        found.extend(dict.fromkeys(stated(blueprint.layout)))
        return blueprint

    decoder_of(folder_of(name), note)
    for part in [part for part in found if part not in _UNDONE.get(name, ())]:
        changed = decoder_of(folder_of(name), lambda b, part=part: replace(b, layout=without(b.layout, part)))
        distance = float((logits_of(changed) - exact).abs().max() / exact.abs().max())
        assert distance > 20 * CLOSE, f"{part} changes nothing"


# ------------------------------------------------------------------------------------- shared keys and values


def test_layers_that_share_keys_and_values_have_no_cache(folder_of: Callable[[str], Path]) -> None:
    """Three of six layers have one, of 2 heads of 24 and of 40; a head of values fills whole vectors of 16."""
    decoder = decoder_of(folder_of("gemma4_text"))
    assert [(shape.kv_heads, shape.head_dim) for shape in decoder.cache_shapes] == [(2, 24), (2, 40), (2, 24)]
    assert decoder.caches == (0, 1, 2, 2, 2, 1)
    engine = Engine(folder_of("gemma4_text"), EngineOptions(dtype="float32"))
    assert engine.info.kv_bytes_per_token == 4 * 2 * ((24 + 32) + (40 + 48) + (24 + 32))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "its tokens see those after them"),
        ({"vocab_size_per_layer_input": VOCAB + 1}, "the table of the inputs of its layers has 98 rows"),
        ({"hidden_activation": "tanh"}, "its activation is 'tanh'"),
    ],
)
def test_a_gemma_4_that_is_not_exact_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotNative, match=reason):
        decoder_layout(config_of("gemma4_text", **changes))


def test_a_layer_type_without_keys_to_share_is_an_error() -> None:
    layers = [*["sliding_attention"] * 5, "full_attention"]
    with pytest.raises(ValueError, match="no full_attention layer before layer 5 has keys and values of its own"):
        decoder_layout(config_of("gemma4_text", layer_types=layers))


# ------------------------------------------------------------------------------------- longrope


def test_texts_beyond_the_context_of_training_have_long_factors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a length, sequences are limited to those with the short factors; with one, all have the long factors."""
    model = model_of("phi3 longrope", original_max_position_embeddings=32)
    folder = write(model, tmp_path / "m")
    long, short = prompt(40, 3), prompt(23, 2)
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = Engine(folder, EngineOptions(dtype="float32"))
    assert "sequences are limited to 32 tokens" in caplog.text
    assert (engine.info.runner, engine.info.max_model_len) == ("native", 32)
    assert list(engine.generate([short], GREEDY)[0].tokens) == greedy(model, short, COUNT)
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = Engine(folder, EngineOptions(dtype="float32", max_model_len=100))
    assert "all sequences have the rotary factors of texts beyond 32 tokens (longrope), as in vLLM" in caplog.text
    assert list(engine.generate([long], GREEDY)[0].tokens) == greedy(model, long, COUNT)
    assert list(engine.generate([short], GREEDY)[0].tokens) != greedy(model, short, COUNT)
    caplog.clear()
    assert Engine(folder, EngineOptions(dtype="float32", max_model_len=32)).info.max_model_len == 32
    assert "longrope" not in caplog.text


# ------------------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize(("scheme", "name"), each_value(["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4"], list(CASES)))
def test_quantized_models_make_the_tokens_of_transformers_code(scheme: str, name: str, tmp_path: Path) -> None:
    folder = write(model_of(name, **quantizable_sizes(name)).bfloat16(), tmp_path / "m")
    if name == "gpt_oss":  # which has a layout of its own, for MXFP4 alone
        quantize_checkpoint(folder, tmp_path / "q", "mxfp4", QuantizeOptions(layout="gpt-oss"))
    else:
        quantize_checkpoint(folder, tmp_path / "q", scheme)
    engine = Engine(tmp_path / "q", EngineOptions(dtype="float32", lm_head="bf16"))
    assert engine.info.runner == "native", engine.info.reason_not_native
    reference = load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True, impl="reference"))
    assert_greedy(engine, reference)


# ------------------------------------------------------------------------------------- text models within others


@pytest.mark.parametrize("name", TOWERS)
def test_the_text_model_beside_a_tower_is_native(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = with_tower(name)
    folder = write(model, tmp_path / "m")
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = Engine(folder, EngineOptions(dtype="float32"))
    assert engine.info.runner == "native", engine.info.reason_not_native
    assert "are not used by the model" in caplog.text
    assert "text part native; images are not served" in caplog.text
    assert_greedy(engine, model)
