"""Load a checkpoint, quantized or plain, as a transformers model whose linears hold the quantized weights.

Weights are read one at a time by `Checkpoint`, so that no 16-bit copy of the quantized weights ever exists. Inputs are
quantized as servers quantize them, so that measurements are of what will be served. Left out: quantized KV caches.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.errors import KernelUnavailable, MinifloatError, UsageError
from minifloat.kernels.linear import scaled_mm
from minifloat.kernels.pack import Arena
from minifloat.model.layouts import Description, StoredWeight, describe
from minifloat.model.runtime.config import read_generation_config
from minifloat.model.runtime.experts import QuantizedExperts, indexes_experts, multiplies_experts
from minifloat.model.runtime.inputs import InputQuantization, allows_int8
from minifloat.model.runtime.linear import NOT_MULTIPLIED, Packing, QuantizedLinear, QuantizedWeight
from minifloat.model.runtime.lm_head import lm_head_spec, replace_lm_head
from minifloat.model.runtime.names import Assignment, assign, empty_model, keeps_float32
from minifloat.model.runtime.tensors import StoredTensors, check_shape, ignorable_names, listing, warn_of_dequantized
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is loaded.

    Attributes:
        dtype: Dtype of all that is not quantized, and of the activations; by default that of config.json.
        device: Device of the model; every tensor is moved there as soon as it is read.
        weight_only: Keep all inputs in `dtype`, whatever the checkpoint declares.
        prefill: "w8a8" or None. With "w8a8", weight-only linears quantize inputs of `linear.PREFILL_ROWS` rows and
            more: as the checkpoint declares or, where it declares nothing, per token (per group of columns for weights
            in blocks). Prompts then take the time of FP8 tensor cores and have the error of quantized inputs, and the
            output depends on how many rows are computed together. Such weights are in memory twice. Experts stay
            weight-only.
        impl: What multiplies quantized weights: "auto", the kernels where they can, else the reference; "reference",
            everywhere; "cpu" or "triton", the kernels of that device or an error.
        lm_head: "bf16" keeps the output layer as it is stored; "fp8" quantizes it per channel, unless it is stored
            quantized; "auto" does what `Engine` does (`minifloat.model.runtime.lm_head.LM_HEADS`).
        activations: "int8" allows the kernels of the CPU to round inputs of quantized weights to int8; "bf16" does not.
    """

    dtype: torch.dtype | None = None
    device: str | torch.device = "cpu"
    weight_only: bool = False
    prefill: str | None = None
    impl: str = "auto"
    lm_head: str = "bf16"
    activations: str = "bf16"


def load(
    path: str | os.PathLike[str],
    options: LoadOptions = LoadOptions(),
    *,
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a checkpoint, quantized or not, as a transformers model in eval mode, whose parameters require no gradient.

    Quantized linears become `QuantizedLinear`, quantized experts `QuantizedExperts`. A quantized weight that something
    else uses is dequantized, with a warning. Scales of the KV cache are unused. Inputs are quantized as the checkpoint
    declares, every module with its own scales; servers take the largest static scale of the linears that they fuse, and
    those without the arithmetic run weight-only. Where inputs cannot be quantized, a warning names the modules.

    Weights are packed for the kernels as they are read; those without a packed form are multiplied by the reference,
    with a warning. With 16-bit activations the reference rounds the weight to 16 bits first, and the kernels do not.

    Args:
        path: A folder in Hugging Face layout, or a model of the hub.
        options: Dtype, device, and what is done with inputs and the output layer.
        revision: Revision of a model of the hub.

    Raises:
        CheckpointError: If a file is not what it claims to be, a parameter has no tensor, or a tensor no place.
        HubError: If the hub has no such model, refuses it, or cannot be reached.
        ConfigError: If transformers cannot build the model without the checkpoint's code, or a static scale is missing.
        TensorError: If a tensor does not fit its parameter, or a scale is NaN or Inf.
        KernelUnavailable: If the named `impl` cannot pack a weight, or the device cannot do `prefill` or `activations`.
        UnknownNameError: If an option has another value.
        UsageError: If options contradict each other, the device or the checkpoint.
    """
    with Checkpoint.open(model_folder(path, revision=revision)) as checkpoint:
        return load_opened(checkpoint, describe(checkpoint), options)


def load_opened(
    checkpoint: Checkpoint,
    description: Description,
    options: LoadOptions = LoadOptions(),
) -> PreTrainedModel:
    loader = Loader(checkpoint, description, options)
    loader.run()
    model = loader.model
    generation_config = read_generation_config(checkpoint) if model.can_generate() else None
    if generation_config is not None:
        model.generation_config = generation_config
    model.train(False)
    if loader.tensors.quantized:
        model.save_pretrained = _refuse_saving  # type: ignore[method-assign]
    nn.Module.to(model, loader.device)  # the buffers that the model computed itself
    return model


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "transformers cannot save a model with quantized linears (nothing would say how to read them); "
        "copy the folder it was loaded from"
    )


class Loader:
    """Fills an empty model: at once for `load`, or part by part where the whole model would not fit."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        description: Description,
        options: LoadOptions = LoadOptions(),
    ) -> None:
        self.device = torch.device(options.device)
        int8 = allows_int8(
            options.activations, description, self.device, impl=options.impl, weight_only=options.weight_only
        )
        if int8 and options.prefill is not None:
            raise UsageError(f"activations int8 and prefill {options.prefill} exclude each other")
        self.packing = Packing(options.impl, self.device, int8_inputs=int8)
        self._arena = Arena()  # of experts
        self.checkpoint = checkpoint
        self.tensors = StoredTensors(checkpoint, description)
        self.model = empty_model(checkpoint, options.dtype or self.tensors.dtype())
        self.lm_head = lm_head_spec(options.lm_head, checkpoint, description)
        self._lm_head_asked = options.lm_head == "fp8"
        self.inputs = InputQuantization(checkpoint, options.weight_only, options.prefill)
        self.expected: dict[str, Tensor] = self.model.state_dict()
        self.missing = set(self.expected)
        self.float32 = keeps_float32(self.model, self.model.dtype)
        self.dequantized: list[str] = []

    def run(self) -> None:
        """Place every tensor, tie the parameters that the config ties, and check that every parameter is filled."""
        assignments = self.assignments()
        with self.tensors.reading_ahead(source for a in assignments for source in _in_order(a)):
            for assignment in assignments:
                self.place(assignment)
        warn_of_dequantized(self.dequantized)
        self.inputs.warn()
        if any(isinstance(module, QuantizedExperts) for module in self.model.modules()):
            self.model.set_experts_implementation("eager")
        self._tie()
        self._refuse_missing()
        if self.lm_head is not None:
            replace_lm_head(self.model, self.lm_head, self.packing, asked=self._lm_head_asked)
        self.packing.warn()

    def assignments(self) -> list[Assignment]:
        assignments, surplus = assign(self.model, self.tensors.names)
        ignorable = ignorable_names(self.model.config, self.model._keys_to_ignore_on_load_unexpected or ())
        self.tensors.refuse_surplus(type(self.model).__name__, surplus, ignorable)
        return assignments

    def place(self, assignment: Assignment) -> None:
        if not (self._place_linear(assignment) or self._place_experts(assignment)):
            self._place_tensors(assignment)

    def dtype_of(self, target: str) -> torch.dtype:
        """Return the dtype that transformers would give a parameter."""
        own = self.expected[target].dtype
        return torch.float32 if self.float32 is not None and self.float32.search(target) else own

    def _place_linear(self, assignment: Assignment) -> bool:
        """Replace a linear by one with the quantized weight; False if the assignment is not a quantized linear."""
        stored = self.tensors.quantized.get(assignment.sources[0], [])
        path, _, name = assignment.target.rpartition(".")
        owner = self.model.get_submodule(path)
        if type(owner) is not nn.Linear or name != "weight":
            return False
        if assignment.converter is not None or len(assignment.sources) != 1 or len(stored) != 1:
            return False
        check_shape(assignment.target, self.expected[assignment.target].shape, stored[0].shape)
        weight = self.tensors.read_weight(stored[0])
        linear = QuantizedLinear(weight, self.dtype_of(assignment.target), *self.inputs.of(stored[0])).to(self.device)
        if linear.activation is None:
            linear.prefill = self._prefill(weight, stored[0], linear.dtype)
        del weight
        self.packing.pack(linear, stored[0].module)
        linear.register_parameter("bias", owner._parameters["bias"])
        self.model.set_submodule(path, linear)
        self.missing.discard(assignment.target)
        return True

    def _prefill(self, weight: QuantizedTensor, stored: StoredWeight, dtype: torch.dtype) -> QuantizedWeight | None:
        """Return a second copy of the weight, for inputs of many rows; None if one copy serves inputs of any size."""
        inputs = self.inputs.prefill_of(stored)
        if inputs is None:
            return None
        prefill = QuantizedWeight(weight, dtype, *inputs).to(self.device)
        reason = scaled_mm.why_not(prefill.quantized, inputs[0]) if self.device.type != "cpu" else ""
        if reason:
            raise KernelUnavailable(f"{stored.module}: prefill={self.inputs.prefill!r} cannot run: {reason}")
        self.packing.pack(prefill, stored.module)
        return prefill

    def _place_experts(self, assignment: Assignment) -> bool:
        """Replace a parameter ``[E, ...]`` by a `QuantizedExperts`; False if the experts are not all quantized."""
        stored = [self.tensors.quantized.get(source, []) for source in assignment.sources]
        path, _, name = assignment.target.rpartition(".")
        owner = self.model.get_submodule(path)
        if self.expected[assignment.target].ndim != 3 or not all(stored) or not indexes_experts(type(owner), name):
            return False
        if assignment.converter is None:
            experts, transposed = [[weight] for weight in stored[0]], _is_transposed(owner)
        else:
            parts = assignment.expert_parts()
            if parts is None:
                return False
            experts = [[self.tensors.quantized[source][0] for source in expert] for expert in parts]
            transposed = assignment.transposed
        multiplied = multiplies_experts(type(owner), name)
        self._arena = self._arena.next_layer()
        make = functools.partial(self._expert, self.dtype_of(assignment.target), multiplied)
        stack = QuantizedExperts([[make(part) for part in expert] for expert in experts], transposed, multiplied)
        check_shape(assignment.target, self.expected[assignment.target].shape, stack.shape)
        delattr(owner, name)
        setattr(owner, name, stack)
        self.missing.discard(assignment.target)
        return True

    def _expert(self, dtype: torch.dtype, multiplied: bool, stored: StoredWeight) -> QuantizedWeight:
        """Return one weight of an expert; as stored and weight-only if the model does more with it than multiply."""
        weight = self.tensors.read_weight(stored)
        if not multiplied:
            self.inputs.skip(stored, NOT_MULTIPLIED)
        activation, scale = self.inputs.of(stored) if multiplied else (None, None)
        expert = QuantizedWeight(weight, dtype, activation, scale).to(self.device)
        del weight
        self.packing.pack(expert, stored.module, multiplied=multiplied, arena=self._arena)
        return expert

    def _place_tensors(self, assignment: Assignment) -> None:
        """Fill ordinary parameters or buffers, by transformers' conversion where it has one."""
        sources = listing(assignment.sources)
        if assignment.converter is None:
            self.tensors.refuse_doubled(assignment.target, assignment.sources)
        owner = self.model.get_submodule(assignment.target.rpartition(".")[0])
        if not isinstance(owner, nn.Embedding):  # rows of an embedding are looked up dequantized wherever it is
            self.dequantized += [source for source in assignment.sources if source in self.tensors.quantized]
        dtype = self.dtype_of(assignment.target)
        try:
            converted = assignment.convert(lambda source: self._read(source, dtype), self.model)
        except MinifloatError:
            raise
        except Exception as error:  # the operations check little: a wrong shape can be any error
            raise self.tensors.error(f"transformers cannot make {assignment.target} of {sources}: {error}") from error
        for name, tensor in converted.items():
            if name not in self.expected:
                raise self.tensors.error(f"{sources}: transformers makes {name} of it, which the model does not have")
            check_shape(name, self.expected[name].shape, tensor.shape)
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            is_parameter = leaf in owner._parameters
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
            self.missing.discard(name)

    def _read(self, source: str, dtype: torch.dtype) -> Tensor:
        stored = self.tensors.quantized.get(source)
        if stored is None:
            return self.tensors.read_plain(source, dtype).to(self.device, dtype)
        for weight in stored:
            self.inputs.skip(weight, "they are held dequantized")
        weights = [self.tensors.read_weight(weight).dequantize(dtype) for weight in stored]
        if not stored[0].fused:
            return weights[0].to(self.device)
        owner = self.model.get_submodule(source.rpartition(".")[0])
        return torch.stack([weight.T if _is_transposed(owner) else weight for weight in weights]).to(self.device)

    def _tie(self) -> None:
        """Tie parameters as the config says, except where one of the two is stored quantized: then it has its own."""
        tied = self.model.all_tied_weights_keys
        for target, source in list(tied.items()):
            if any(
                isinstance(self.model.get_submodule(n.rpartition(".")[0]), QuantizedLinear) for n in (target, source)
            ):
                _LOG.warning("config.json ties %s to %s, but one of them is stored quantized: not tied", target, source)
                del tied[target]
        self.model.tie_weights(missing_keys=self.missing, recompute_mapping=False)

    def _refuse_missing(self) -> None:
        """Raise a CheckpointError if nothing filled a parameter."""
        optional = re.compile("|".join(f"({p})" for p in self.model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
        unfilled = [
            name
            for name in sorted(self.missing)
            if not optional.search(name) or self.expected[name].device.type == "meta"
        ]
        self.tensors.refuse_missing(type(self.model).__name__, unfilled)


def _in_order(assignment: Assignment) -> Iterable[str]:
    experts = assignment.expert_parts()
    return assignment.sources if experts is None else (source for expert in experts for source in expert)


def _is_transposed(owner: nn.Module) -> bool:
    """Return whether an experts module keeps ``[E, in, out]``; fused codes are always ``[E, out, in]``."""
    return bool(getattr(owner, "is_transposed", False))
