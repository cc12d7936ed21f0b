"""llama.cpp on GGUF files that `convert --layout gguf` wrote: tokens, probabilities, and losses by our codes.

The model is storybook-4m, or the folder in MINIFLOAT_GGUF_MODEL. CMAKE_ARGS reaches the build of llama.cpp.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tools import run_script
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm_cases import STORIES, STORYBOOK

from minifloat.engine import Engine, EngineOptions
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.convert import GgufOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint

pytestmark = pytest.mark.timeout(3600)

MODEL = Path(os.environ.get("MINIFLOAT_GGUF_MODEL", STORYBOOK))
TEXTS = (
    "def squares(n):\n    return [i**2 for i in range(n)]  # 3.14\n",
    "\u6211\u60f3\u5728\u5317\u4eac\u5de5\u4f5c\uff0c\u5929\u6c14\u5f88\u597d\u3002",
    "\U0001f680\U0001f636\u200d\U0001f32b\ufe0f ok \u2705 na\u00efve",
    "Once upon a time there was a little dragon who lived on a hill near the sea. ",
)
WINDOWS, LENGTH = 8, 128
#: By how much llama.cpp's loss may exceed that of our engine: it also rounds inputs, to 8 bits in groups of 32.
MORE, ROUNDED_INPUTS = 1.05, 0.002
#: Model type -> what its small config has beyond these sizes.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, **MOE},
    "gemma3_text": {"sliding_window": 16, "num_hidden_layers": 3, "query_pre_attn_scalar": 32,
                    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "phi3": {"pad_token_id": 0, "head_dim": None},
    "glm4": {},
    "gpt_oss": {"num_local_experts": 4},
    "olmo2": {"head_dim": None},
    "granite": {"head_dim": None, "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
                "logits_scaling": 2.0},
    "smollm3": {"pad_token_id": 0, "num_hidden_layers": 4},
}  # fmt: skip


def _ask(folder: Path, **request: Any) -> Any:
    answers = run_script("llama-cpp", "in_llama_cpp.py", [request], folder, timeout=1800)
    assert answers, (folder / "in_llama_cpp.py.log").read_text()[-3000:]
    return answers[0]


def add_merge(folder: Path) -> None:
    """Give the tokenizer of a small model a merge, and tokens of Phi-3's, without which llama.cpp does not load it."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] |= {"ab": 258, "<unk>": 259, "<|endoftext|>": 260}
    tokenizer["model"]["merges"] = [["a", "b"]]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("model_type", KINDS)
def test_an_architecture_gives_the_probabilities_of_transformers(
    make_model: Any, tmp_path: Path, model_type: str
) -> None:
    sizes = {name: value for name, value in {**SIZES, **KINDS[model_type]}.items() if value is not None}
    source = make_model(tmp_path / "m", model_type, **sizes)
    add_merge(source)
    convert_checkpoint(source, tmp_path / "m.gguf", "gguf")
    window = [256, *range(40, 100)]
    found = np.array(_ask(tmp_path, do="logits", file=str(tmp_path / "m.gguf"), window=window))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([window])).logits[0].double().log_softmax(-1).numpy()
    kl = float(np.mean(np.sum(np.exp(expected) * (expected - found), axis=-1)))
    spread = float(np.mean(np.sum(np.exp(expected) * (expected - expected.mean(axis=0)), axis=-1)))
    assert abs(kl) < 0.01 * spread, (kl, spread)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model in BF16 and quantized, each with its file."""
    folder = tmp_path_factory.mktemp("gguf")
    convert_checkpoint(MODEL, folder / "bf16.gguf", "gguf")
    for scheme in ("mxfp4", "nvfp4"):
        quantize_checkpoint(MODEL, folder / scheme, scheme)
        convert_checkpoint(folder / scheme, folder / f"{scheme}.gguf", "gguf")
    convert_checkpoint(MODEL, folder / "parts.gguf", "gguf", gguf=GgufOptions(max_size=3 << 20))
    return folder


def test_llama_cpp_loads_a_model_in_several_files(files: Path, tmp_path: Path) -> None:
    parts = sorted(map(str, files.glob("parts-*")))
    assert len(parts) > 1
    windows = [list(range(5, 50))]
    found = _ask(tmp_path, do="kl", base=str(files / "bf16.gguf"), files=parts[:1], windows=windows)
    assert set(found[parts[0]]) == {0.0}


def test_tokens_are_those_of_the_checkpoint(files: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    texts = [(text, False) for text in TEXTS]
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": TEXTS[3]}]
        texts.append((tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True), True))
    found = _ask(tmp_path, do="tokens", file=str(files / "bf16.gguf"), texts=texts)
    assert found == [tokenizer.encode(text) for text, _ in texts]


@pytest.mark.parametrize("merges", [True, False])
def test_tokens_of_a_unigram_tokenizer_are_those_of_the_checkpoint(
    make_model: Any, tmp_path: Path, merges: bool
) -> None:
    source = make_model(tmp_path / "m", "llama", vocab_size=400, **SIZES)
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Replace(Regex(" {2,}"), " ") if merges else None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    made.train_from_iterator([*TEXTS[:2], TEXTS[3], STORIES.read_text(encoding="utf-8")[:20_000]], trainer)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(source)
    convert_checkpoint(source, tmp_path / "m.gguf", "gguf")
    tokenizer = load_tokenizer(source)
    texts = [text.strip() for text in TEXTS]
    found = _ask(tmp_path, do="tokens", file=str(tmp_path / "m.gguf"), texts=[(text, False) for text in texts])
    assert found == [tokenizer.encode(text) for text in texts]
    assert tokenizer.unk_token_id in found[2]  # emoji


def test_codes_lose_in_llama_cpp_what_they_lose_in_our_engine(files: Path, tmp_path: Path) -> None:
    tokens = load_tokenizer(MODEL).encode(STORIES.read_text(encoding="utf-8"))
    windows = [tokens[at * LENGTH : (at + 1) * LENGTH] for at in range(WINDOWS)]

    def log_probabilities(folder: Path) -> torch.Tensor:
        engine = Engine(folder, EngineOptions(activations="bf16", lm_head="bf16"))
        return torch.cat([part.double() for part in engine.logits_of_each(windows)]).log_softmax(-1)

    expected = log_probabilities(MODEL)
    names = {scheme: str(files / f"{scheme}.gguf") for scheme in ("mxfp4", "nvfp4")}
    found = _ask(tmp_path, do="kl", base=str(files / "bf16.gguf"), files=list(names.values()), windows=windows)
    for scheme, file in names.items():
        own = float((expected.exp() * (expected - log_probabilities(files / scheme))).sum(-1).mean())
        assert float(np.mean(found[file])) < MORE * own + ROUNDED_INPUTS, (scheme, own)
