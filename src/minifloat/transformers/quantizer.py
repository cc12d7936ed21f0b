"""The quantizer that transformers calls while it loads a checkpoint.

It is called before and after transformers fills the parameters: first it takes the quantized ones out of the model,
then it loads the checkpoint by `minifloat.model.runtime.load` and puts the quantized modules into their places.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, MinifloatError, UsageError
from minifloat.model.layouts import READERS, describe
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.load import LoadOptions, load_opened
from minifloat.model.runtime.names import assign
from minifloat.model.runtime.tensors import TORCH_DTYPES, StoredTensors

_LOG = logging.getLogger(__name__)

#: Safetensors dtype -> torch dtype, of all tensors of a checkpoint.
_DTYPES = TORCH_DTYPES | {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
#: Values of `device_map` that let accelerate choose devices.
_CHOSEN_BY_ACCELERATE = {"auto", "balanced", "balanced_low_0", "sequential"}
#: The quantizers that transformers had before `register`, by method.
_ORIGINALS: dict[str, type[HfQuantizer]] = {}


class UnreadableError(Exception):
    """minifloat does not load a checkpoint; the message says why."""


class MinifloatQuantizer(HfQuantizer):
    """Keeps quantized weights, or leaves the model to the quantizer that it stands for."""

    #: Whether inputs stay as they are where the checkpoint declares that they are quantized.
    weight_only = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        HfQuantizer.__init__(self, quantization_config, **kwargs)  # the others import packages that are not needed here
        self._arguments = kwargs
        self._ours = False
        self._source: Path | None = None
        self._targets: list[str] = []

    @property
    def _theirs(self) -> Any:
        """The methods of the quantizer that this one stands for."""
        return super()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Decide by the devices who loads the model."""
        dequantizes = getattr(self.quantization_config, "dequantize", False)
        self._ours = self.pre_quantized and _is_cpu(kwargs.get("device_map")) and not dequantizes
        if not self._ours:
            self._leave(*args, **kwargs)

    def _leave(self, *args: Any, **kwargs: Any) -> None:
        """Leave the model to the quantizer that this one stands for; arguments as `validate_environment`."""
        self._ours = False
        self._theirs.__init__(self.quantization_config, **self._arguments)
        self._theirs.validate_environment(*args, **kwargs)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        if self._ours:
            try:
                return self._take_out(model, kwargs.get("checkpoint_files"))
            except UnreadableError as error:
                _LOG.warning("transformers loads this checkpoint without minifloat's kernels: %s", error)
                self._leave()
        return self._theirs._process_model_before_weight_loading(model, **kwargs)

    def _take_out(self, model: PreTrainedModel, files: Sequence[str] | None) -> None:
        """Take the parameters that are stored quantized out of a model on the meta device."""
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise UnreadableError("it is not a folder of safetensors")
        self._source = Path(files[0]).parent
        try:
            with Checkpoint.open(self._source) as checkpoint:
                tensors = StoredTensors(checkpoint, describe(checkpoint))
        except CheckpointError as error:
            raise UnreadableError(str(error)) from error
        assignments, surplus = assign(model, tensors.names)
        lost = sorted(set(surplus) & tensors.quantized.keys())
        if lost:
            raise UnreadableError(f"{type(model).__name__} has no place for {lost[0]}")
        late: set[str] = set()
        for assignment in assignments:
            if any(source in tensors.quantized for source in assignment.sources):
                path, _, leaf = assignment.target.rpartition(".")
                owner = model.get_submodule(path)
                self._targets.append(assignment.target)
                owner._is_hf_initialized = True  # type: ignore[assignment]
                if isinstance(owner, nn.Embedding):  # stays where output layers are tied to it
                    late |= {assignment.target, *_tied_to(model, assignment.target)}
                else:
                    owner.register_parameter(leaf, None)
        model._keys_to_ignore_on_load_missing = [*(model._keys_to_ignore_on_load_missing or ()), *map(re.escape, late)]
        # the tensors of these parameters have no place now; `load_opened` refuses all that never had one
        model._keys_to_ignore_on_load_unexpected = {r"."}

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        if not self._ours:
            return self._theirs._process_model_after_weight_loading(model, **kwargs)
        assert self._source is not None, "`_take_out` has run"
        with Checkpoint.open(self._source) as checkpoint:
            options = LoadOptions(dtype=model.dtype, weight_only=self.weight_only)
            options = LoadOptions(dtype=model.dtype, weight_only=self.weight_only)
            loaded = load_opened(checkpoint, describe(checkpoint), options)
        for target in self._targets:
            path, _, leaf = target.rpartition(".")
            owner, found = model.get_submodule(path), loaded.get_submodule(path)
            if isinstance(found, QuantizedLinear):
                found.register_parameter("bias", owner._parameters["bias"])
                model.set_submodule(path, found)
            else:  # experts, or a weight that something other than a linear uses, which is dequantized
                delattr(owner, leaf)
                setattr(owner, leaf, getattr(found, leaf))
                for name in _tied_to(model, target):
                    setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], getattr(found, leaf))
        if any(isinstance(module, QuantizedExperts) for module in model.modules()):
            model.set_experts_implementation("eager")
        return model.requires_grad_(False)

    def get_weight_conversions(self) -> list[Any]:
        """Return how stored tensors become parameters: nothing but the model's own conversions."""
        return [] if self._ours else list(self._theirs.get_weight_conversions())

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Return the model's own conversions, which quantized tensors do not take part in."""
        if self._ours:
            return weight_conversions
        return list(self._theirs.update_weight_conversions(weight_conversions, *args))

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the tensors for `save_pretrained`: those of the checkpoint where they are quantized."""
        if not self._ours:
            theirs: tuple[dict[str, Tensor] | None, dict[str, str]] = self._theirs.get_state_dict_and_metadata(model)
            return theirs
        assert self._source is not None, "the model has been loaded"
        try:
            with Checkpoint.open(self._source) as checkpoint:
                description = describe(checkpoint)
                names = {name for weight in description.weights.values() for name in weight.tensors}
                stored = {name: _read(checkpoint, name) for name in sorted(names | description.auxiliary)}
        except MinifloatError as error:
            raise UsageError(f"save_pretrained copies quantized tensors, which are not there now: {error}") from error
        tied = {name for name, source in model.all_tied_weights_keys.items() if source in stored}
        own = {name: value for name, value in model.state_dict().items() if not _is_quantized(model, name)}
        own = {name: value for name, value in own.items() if name not in tied}
        return own | stored, {}

    def is_serializable(self) -> bool:
        return True if self._ours else bool(self._theirs.is_serializable())

    @property
    def is_trainable(self) -> bool:
        return False if self._ours else bool(self._theirs.is_trainable)


def register(*, weight_only: bool = False) -> None:
    """Let transformers load the layouts that minifloat reads by `MinifloatQuantizer`."""
    MinifloatQuantizer.weight_only = weight_only
    quantizers: dict[str, Any] = auto.AUTO_QUANTIZER_MAPPING
    for method in READERS:
        original = quantizers.get(method)
        if original is not None and not issubclass(original, MinifloatQuantizer):
            _ORIGINALS[method] = original
            name = f"Minifloat{original.__name__}"
            quantizers[method] = type(name, (MinifloatQuantizer, original), {})


def unregister() -> None:
    """Undo `register`; models that are loaded stay as they are."""
    auto.AUTO_QUANTIZER_MAPPING.update(_ORIGINALS)
    _ORIGINALS.clear()


def _tied_to(model: PreTrainedModel, source: str) -> list[str]:
    return [name for name, other in model.all_tied_weights_keys.items() if other == source]


def _is_cpu(devices: Any) -> bool:
    """Return whether a `device_map` leaves the whole model on the CPU; None does, and so does "auto" without a GPU."""
    places = set(devices.values()) if isinstance(devices, dict) else {devices}
    on_cpu = {None, "cpu", torch.device("cpu")} | (set() if torch.cuda.is_available() else _CHOSEN_BY_ACCELERATE)
    return places <= on_cpu


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    return torch.from_numpy(checkpoint.read(name)).view(_DTYPES[info.dtype]).reshape(info.shape)


def _is_quantized(model: PreTrainedModel, name: str) -> bool:
    """Return whether a tensor of the state dict belongs to a quantized module; the bias of a linear does not."""
    parts = name.split(".")
    owners = (model.get_submodule(".".join(parts[:end])) for end in range(1, len(parts)))
    owner = next((module for module in owners if isinstance(module, (QuantizedLinear, QuantizedExperts))), None)
    return isinstance(owner, QuantizedExperts) or (owner is not None and parts[-1] != "bias")
