"""Long windows in pieces: the same scores as at once, for models with sliding windows and simulated caches too."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare_models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from minifloat.errors import UsageError
from minifloat.evaluate.compare import opening, transformers_model
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.load import LoadOptions

MakeModel = Callable[..., Path]

TEXT = "The quick brown fox jumps over the lazy dog; naive cafe. " * 6

compare_tokens = partial(compare_models, dtype="float32")


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' code run the models."""
    monkeypatch.setattr(opening, "_why_no_engine", lambda *_: "of this test")


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 7}),
        ("gemma3_text", {"sliding_window": 6, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt_oss", {"sliding_window": 6}),
    ],
)
def test_pieces_give_the_features_of_the_whole_window(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, config: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m", model_type, dtype="float32", **config)
    predictor = TransformersModel.of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    ids = torch.randint(0, predictor.vocab_size, (2, 61), generator=torch.Generator().manual_seed(0))
    lengths: list[int] = []
    run = TransformersModel._run

    def counted(self: TransformersModel, module: nn.Module, ids: Tensor, cache: Any = None) -> Any:
        lengths.append(ids.shape[1])
        return run(self, module, ids, cache)

    monkeypatch.setattr(TransformersModel, "_run", counted)
    with torch.inference_mode():
        whole = predictor.features(ids)
        monkeypatch.setattr(transformers_model, "_PIECE_TOKENS", 13)
        assert predictor._continues
        lengths.clear()
        found = predictor.features(ids)
    assert lengths == [13, 13, 13, 13, 9]
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
            patch.setattr(transformers_model, "_PIECE_TOKENS", 30)
            found = compare_tokens(llama_folder, other, [text], window=128, kv_cache=cache).candidates[0].overall
        assert found.kl_mean.value == pytest.approx(whole.kl_mean.value, rel=1e-4)
        assert found.candidate_perplexity == pytest.approx(whole.candidate_perplexity, rel=1e-4)


def test_a_model_that_cannot_continue_runs_whole_and_says_so(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = TransformersModel.of(llama_folder, LoadOptions(dtype=torch.float32))
    features = TransformersModel._features

    def forgets(self: TransformersModel, ids: Tensor, cache: Any) -> Tensor:
        return features(self, ids, None)  # as if each call began a new text

    monkeypatch.setattr(TransformersModel, "_features", forgets)
    monkeypatch.setattr(transformers_model, "_PIECE_TOKENS", 13)
    ids = torch.arange(40)[None]
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        whole = features(predictor, ids, None)
        torch.testing.assert_close(predictor.features(ids), whole)
    assert "runs long windows whole, because it cannot continue after a part" in caplog.text


def test_attention_that_is_not_fused_runs_in_smaller_pieces(llama_folder: Path) -> None:
    model = TransformersModel.of(llama_folder).model
    assert transformers_model._piece_tokens(model, 32768) == transformers_model._PIECE_TOKENS
    model.set_attn_implementation("eager")
    heads = model.config.num_attention_heads
    assert transformers_model._piece_tokens(model, 32768) * heads * 32768 <= 2**28
    assert transformers_model._piece_tokens(model, 256) == transformers_model._PIECE_TOKENS


def test_logits_of_a_window_that_do_not_fit_are_refused(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "fox.txt"
    text.write_text(TEXT, encoding="utf-8")
    vocab_size = TransformersModel.of(llama_folder).vocab_size
    monkeypatch.setattr(transformers_model, "_WHOLE_LOGITS", 100 * vocab_size)
    compare_tokens(llama_folder, llama_folder, [text], window=128)
    monkeypatch.setattr(transformers_model.TransformersModel, "_head_runs_alone", lambda _: False)
    compare_tokens(llama_folder, llama_folder, [text], window=100)
    with pytest.raises(UsageError, match=r"a window of 128 tokens has .* of logits.* windows of at most 100 tokens"):
        compare_tokens(llama_folder, llama_folder, [text], window=128)
