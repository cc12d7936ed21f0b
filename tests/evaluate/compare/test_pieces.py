"""Long windows in pieces: the same scores as at once, for models with sliding windows and simulated caches too."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare_models
from torch import Tensor
from transformers import AutoModelForCausalLM

from minifloat.errors import UsageError
from minifloat.evaluate.compare import run as compare_run
from minifloat.evaluate.compare import transformers_model
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.load import LoadOptions

MakeModel = Callable[..., Path]

TEXT = "The quick brown fox jumps over the lazy dog; naive cafe. " * 6

compare_tokens = partial(compare_models, dtype="float32")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' code run the models."""
    monkeypatch.setattr(compare_run, "_why_no_engine", lambda *_: "of this test")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 7}),
        ("gemma3_text", {"sliding_window": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt_oss", {"sliding_window": 6}),
    ],
)
def test_pieces_give_the_logits_of_the_whole_window(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, config: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m", model_type, dtype="float32", **config)
    model = TransformersModel.of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    ids = torch.randint(0, model.vocab_size, (2, 61), generator=torch.Generator().manual_seed(0))
    lengths: list[int] = []
    run = TransformersModel._run

    def counted(self: TransformersModel, ids: Tensor, cache: Any = None) -> Tensor:
        lengths.append(ids.shape[1])
        return run(self, ids, cache)

    monkeypatch.setattr(TransformersModel, "_run", counted)
    with torch.inference_mode():
        whole = torch.cat(list(model.logits(ids)))
        assert lengths == [61]
        monkeypatch.setattr(TransformersModel, "_tokens_at_a_time", lambda *_: 13)
        assert model._continues
        lengths.clear()
        found = torch.cat(list(model.logits(ids)))
    assert lengths == 2 * [13, 13, 13, 13, 9]
    torch.testing.assert_close(found, whole)


def test_the_scores_of_long_windows_are_those_of_transformers(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "fox.txt"
    text.write_text(TEXT, encoding="utf-8")
    other = make_llama(tmp_path / "other", seed=1)
    for cache in ("none", "fp8"):
        whole = compare_tokens(llama_folder, other, [text], window=128, kv_cache=cache).candidates[0].overall
        with monkeypatch.context() as patch:
            patch.setattr(TransformersModel, "_tokens_at_a_time", lambda *_: 30)
            found = compare_tokens(llama_folder, other, [text], window=128, kv_cache=cache).candidates[0].overall
        assert found.kl_mean.value == pytest.approx(whole.kl_mean.value, rel=1e-4)
        assert found.candidate_perplexity == pytest.approx(whole.candidate_perplexity, rel=1e-4)


def test_a_model_that_cannot_continue_runs_whole_and_says_so(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = TransformersModel.of(llama_folder, LoadOptions(dtype=torch.float32))
    run = TransformersModel._run
    # as if each call began a new text
    monkeypatch.setattr(TransformersModel, "_run", lambda self, ids, cache=None: run(self, ids))
    monkeypatch.setattr(TransformersModel, "_tokens_at_a_time", lambda *_: 13)
    ids = torch.arange(40)[None]
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        torch.testing.assert_close(torch.cat(list(model.logits(ids))), run(model, ids)[0, :-1])
    assert "runs long windows whole, because it cannot continue after a part" in caplog.text


def test_attention_that_is_not_fused_runs_in_smaller_pieces(llama_folder: Path) -> None:
    model = TransformersModel.of(llama_folder)
    assert model._tokens_at_a_time(32768) == 2048
    model.model.set_attn_implementation("eager")
    heads = model.model.config.num_attention_heads
    assert model._tokens_at_a_time(1 << 20) * heads << 20 <= 2**28 or model._tokens_at_a_time(1 << 20) == 64
    assert model._tokens_at_a_time(256) == 2048


def test_logits_of_a_window_that_do_not_fit_are_refused(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "fox.txt"
    text.write_text(TEXT, encoding="utf-8")
    vocab_size = TransformersModel.of(llama_folder).vocab_size
    monkeypatch.setattr(transformers_model, "_WHOLE_LOGITS", 100 * vocab_size)
    monkeypatch.setattr(TransformersModel, "_tokens_at_a_time", lambda *_: 20)
    compare_tokens(llama_folder, llama_folder, [text], window=128)
    monkeypatch.setattr(TransformersModel, "_continues", False)
    compare_tokens(llama_folder, llama_folder, [text], window=100)
    with pytest.raises(UsageError, match=r"a window of 128 tokens has .* of logits.* windows of at most 100 tokens"):
        compare_tokens(llama_folder, llama_folder, [text], window=128)
