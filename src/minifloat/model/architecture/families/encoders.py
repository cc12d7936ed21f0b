"""Encoders without a causal mask, as `encoder.layer.N`, and the decoders whose head has another name than lm_head."""

from __future__ import annotations

from minifloat.model.architecture.family import Family

_BERT = (
    *("bert", "ernie", "mobilebert", "roformer", "deberta", "deberta-v2", "fnet", "squeezebert", "megatron-bert"),
    *("big_bird", "nystromformer", "layoutlm", "yoso", "mra", "roc_bert", "nomic_bert"),
)
_ROBERTA = (
    *("roberta", "camembert", "data2vec-text", "mpnet", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    *("longformer", "ibert", "xmod"),
)

FAMILIES: tuple[Family, ...] = (
    Family("BERT", _BERT, renames=(), heads=("cls.predictions.decoder",)),
    Family("RoBERTa", _ROBERTA, renames=(), heads=("lm_head.decoder",)),
    Family("ELECTRA", ("electra", "convbert"), renames=(), heads=("generator_lm_head",)),
    Family("DistilBERT", ("distilbert",), renames=(), heads=("vocab_projector",)),
    Family("ModernBERT", ("modernbert",), renames=(), heads=("decoder",)),
    Family("ModernBERT decoder", ("modernbert-decoder",), renames=(), heads=("decoder",)),
    Family("BioGPT", ("biogpt",), renames=(), heads=("output_projection",)),
    Family("GPT-NeoX Japanese", ("gpt_neox_japanese",), renames=(), heads=("embed_out",)),
)
