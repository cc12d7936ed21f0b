"""Decoders with one MLP per layer, whose checkpoints have the names of transformers' modules."""

from __future__ import annotations

from minifloat.model.architecture.family import ALL_FOLDS, FOLDS_WITHOUT_NORMS, Family

FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("llama", "mistral"), renames=(), folds=ALL_FOLDS),
    Family("Ministral", ("ministral", "ministral3"), renames=(), folds=ALL_FOLDS),
    Family("Qwen dense", ("qwen2", "qwen3"), renames=(), folds=ALL_FOLDS),
    Family("Gemma text", ("gemma", "gemma2", "gemma3_text"), renames=(), folds=FOLDS_WITHOUT_NORMS),
    Family("Granite", ("granite",), renames=(), folds=ALL_FOLDS),
    Family("GLM", ("glm", "glm4"), renames=(), folds=ALL_FOLDS),
    Family("OLMo", ("olmo", "olmo2", "olmo3"), renames=(), folds=FOLDS_WITHOUT_NORMS),
    Family("Phi-3", ("phi3",), renames=(), folds=ALL_FOLDS),
    Family("Cohere", ("cohere", "cohere2"), renames=()),
    Family("EXAONE 4", ("exaone4",), renames=(), folds=FOLDS_WITHOUT_NORMS),
    Family("SmolLM 3", ("smollm3",), renames=(), folds=ALL_FOLDS),
    Family("Seed-OSS", ("seed_oss",), renames=(), folds=ALL_FOLDS),
    Family("StarCoder 2", ("starcoder2",), renames=(), folds=ALL_FOLDS),
    Family("Nemotron", ("nemotron",), renames=()),
    Family("StableLM", ("stablelm",), renames=()),
    Family("ERNIE 4.5", ("ernie4_5",), renames=(), folds=ALL_FOLDS),
    Family("Helium", ("helium",), renames=(), folds=ALL_FOLDS),
    Family("Hunyuan dense", ("hunyuan_v1_dense",), renames=(), folds=ALL_FOLDS),
    Family("GPT-2", ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), renames=(), conv1d=True),
)
