"""Small random models of transformers' architectures, written as plain BF16 checkpoints.

Weights are drawn so that logits are of order one, and norms and biases are not trivial. Each tensor has a generator of
its own, seeded by its name.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from families import LEFT_OUT, OVERRIDES
from small_configs import small_config
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

#: Models with more weights than this are not small.
MAX_WEIGHTS = 10_000_000
_STD = 0.09  # 1 / sqrt(HIDDEN)
_KEPT = ("A_log", "dt_bias", "inv_freq", "mamba.D")


class NotSmallError(Exception):
    """The architecture cannot be made small by the rules here, or does not answer text alone."""


@dataclass(frozen=True)
class Case:
    """One row of the matrix."""

    name: str
    model_type: str
    overrides: dict[str, Any] = field(default_factory=dict)
    stored: tuple[str, str] | None = None

    @property
    def architecture(self) -> str:
        """Name of the model class in transformers."""
        return model_classes()[self.model_type]


def model_classes() -> dict[str, str]:
    """Return the name of the class of each model type that answers text: causal, and vision-language."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    vision = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    names = {**causal, **vision}
    return {key: name if isinstance(name, str) else name[0] for key, name in names.items()}


def make_model(case: Case, folder: Path) -> Path:
    """Write the small model of a case as a BF16 checkpoint with a tokenizer of bytes."""
    if case.model_type in LEFT_OUT:
        raise NotSmallError(LEFT_OUT[case.model_type])
    try:
        config = small_config(case.model_type, {**OVERRIDES.get(case.model_type, {}), **case.overrides})
        cls = getattr(transformers, case.architecture)
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in cls._from_config(config).parameters())
        if weights > MAX_WEIGHTS:
            raise NotSmallError(f"{weights / 1e6:.0f} million weights")
        torch.manual_seed(0)
        model = cls._from_config(config, dtype=torch.float32).eval()
        _randomize(model)
        with torch.no_grad():
            logits = model(input_ids=torch.arange(40, 56)[None]).logits
    except NotSmallError:
        raise
    except Exception as error:
        raise NotSmallError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if not logits.isfinite().all():
        raise NotSmallError("its logits are not finite")
    model.save_pretrained(folder)
    cls.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)  # some parameters stay in float32
    _state_dtype(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _state_dtype(folder: Path) -> None:
    """Write bfloat16 as the dtype of a config: transformers writes that of the first parameter."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if any(kept in name for kept in _KEPT) or not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.copy_(noise * _STD)
        elif "norm" in name and name.endswith("weight"):
            parameter.add_(noise * 0.1)
        else:
            parameter.add_(noise * 0.05)


def byte_tokenizer() -> Any:
    """Return a tokenizer with one token per byte of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(sorted(alphabet))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
