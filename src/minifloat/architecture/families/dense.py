"""Decoders with one MLP per layer, whose checkpoints have the names of transformers' modules."""

from __future__ import annotations

from minifloat.architecture.family import Family, NativeDecoder

FAMILIES: tuple[Family, ...] = (
    Family("Llama", ("llama", "mistral"), native=NativeDecoder.DENSE, renames=()),
    Family("Ministral", ("ministral", "ministral3"), renames=()),
    Family("Qwen dense", ("qwen2", "qwen3"), native=NativeDecoder.DENSE, renames=()),
    Family("Gemma text", ("gemma", "gemma2", "gemma3_text"), renames=()),
    Family("Granite", ("granite",), renames=()),
    Family("GLM", ("glm", "glm4"), renames=()),
    Family("OLMo", ("olmo", "olmo2", "olmo3"), renames=()),
    Family("Phi-3", ("phi3",), renames=()),
    Family("Cohere", ("cohere", "cohere2"), renames=()),
    Family("EXAONE 4", ("exaone4",), renames=()),
    Family("SmolLM 3", ("smollm3",), renames=()),
    Family("Seed-OSS", ("seed_oss",), renames=()),
    Family("StarCoder 2", ("starcoder2",), renames=()),
    Family("Nemotron", ("nemotron",), renames=()),
    Family("StableLM", ("stablelm",), renames=()),
    Family("ERNIE 4.5", ("ernie4_5",), renames=()),
    Family("Helium", ("helium",), renames=()),
    Family("Hunyuan dense", ("hunyuan_v1_dense",), renames=()),
    Family("GPT-2", ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), renames=(), conv1d=True),
)
