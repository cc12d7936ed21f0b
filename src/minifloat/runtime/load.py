"""A checkpoint becomes a transformers model whose linears hold the quantized weights.

transformers builds the empty model and says how names map; everything read from disk goes through `Checkpoint`, which
has validated every shard before, one tensor at a time, so that at no moment a 16-bit copy of the quantized weights
exists. Plain checkpoints take the same way and serve as the baseline. Inputs are quantized where the checkpoint says
that servers quantize them, so that what is measured is what will be served.

Left out: quantized KV caches.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.errors import (
    CheckpointError,
    KernelUnavailable,
    MinifloatError,
    ShapeError,
    UnsupportedTensorError,
    UsageError,
)
from minifloat.hub import model_folder
from minifloat.kernels.linear import scaled_mm
from minifloat.layouts import Description, StoredWeight, describe, read_weight
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.runtime.ahead import ReadAhead
from minifloat.runtime.build import config_dtype, empty_model, load_generation_config
from minifloat.runtime.experts import QuantizedExperts, indexes_experts, multiplies_experts
from minifloat.runtime.inputs import InputQuantization
from minifloat.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.runtime.names import Assignment, assign, keeps_float32, listing, split_ignorable
from minifloat.runtime.packing import NOT_MULTIPLIED, Packing

_LOG = logging.getLogger(__name__)

#: Safetensors dtype of a tensor that belongs to no quantized weight -> torch dtype.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    weight_only: bool = False,
    prefill: str | None = None,
    impl: str = "auto",
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a checkpoint, quantized or not, as a transformers model in eval mode.

    Quantized linears become `QuantizedLinear`, quantized experts `QuantizedExperts`; every layout that
    `minifloat.layouts.describe` knows is read. A quantized weight that something other than a plain `torch.nn.Linear`
    or indexed experts uses is dequantized here, and a warning names it. Scales of the KV cache are passed over.

    Where the checkpoint declares FP8 inputs (W8A8: `fp8-static`, `fp8-dynamic`, `fp8-block` and the like of other
    tools), they are quantized as a server with FP8 hardware does it, by `minifloat.kernels.linear.linear`; every module
    with its own scales. Servers that fuse q/k/v, gate/up or all experts of a layer take the largest static scale of
    those, which is the same where they share one. Servers on other hardware (Ampere: Marlin kernels) run the same
    checkpoints weight-only, and `weight_only` is what they compute. Inputs of MX and NVFP4 weights, and of experts
    whose class does more with a weight than multiply, are not quantized; a warning names them.

    On the CPU and on a GPU every quantized weight is packed for the kernels as soon as it is read, and the codes as
    stored are forgotten: memory holds both of the tensor at work and the next ones only. Weights that have no packed
    form, or all where the native library or triton is missing, are held as stored and multiplied by the reference,
    which decodes them in every call; a warning says why and how many. The two differ in one rounding: with 16-bit
    activations the kernels multiply what codes and scales say, in float32; the reference rounds the weight to the 16
    bits first, as a model of dequantized weights would (`minifloat.kernels.linear.linear`).

    Args:
        path: A folder in Hugging Face layout, or a model of the hub.
        dtype: Dtype of all that is not quantized, and of the activations; by default that of config.json.
        device: Where the model goes, tensor by tensor.
        weight_only: Keep all inputs in `dtype`, whatever the checkpoint declares.
        prefill: "w8a8": linears that are weight-only quantize inputs of `linear.PREFILL_ROWS` rows and more, as the
            checkpoint declares or, where it declares nothing, per token (per group of columns for weights in blocks).
            Prompts then take the time of FP8 tensor cores and have the error of quantized inputs, and what a model
            says depends on how many rows are computed together. Such weights are in memory twice. Experts stay as they
            are. None: nothing of it.
        impl: What multiplies quantized weights: "auto", as above; "reference", everywhere; "cpu" or "triton", the
            kernels of that device or an error.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Returns:
        The model; its parameters want no gradient.

    Raises:
        CheckpointError: A file is not what it claims to be, a parameter has no tensor, or a tensor no place.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        ConfigError: transformers cannot build the model, or only with the checkpoint's own code; or static inputs are
            declared and a module has no scale for them.
        TensorError: A tensor does not fit its parameter, or a scale is NaN or Inf.
        KernelUnavailable: `impl` is "cpu" or "triton" and a weight cannot be packed, or goes to another device; or the
            GPU has no FP8 product for `prefill`.
        UnknownNameError: Another `impl` or `prefill`.
    """
    with Checkpoint.open(model_folder(path, revision=revision)) as checkpoint:
        loader = Loader(checkpoint, dtype=dtype, device=device, weight_only=weight_only, prefill=prefill, impl=impl)
        loader.run()
        model = loader.model
        load_generation_config(model, checkpoint)
    model.train(False)
    if loader.quantized:
        model.save_pretrained = _refuse_saving  # type: ignore[method-assign]
    nn.Module.to(model, device)  # the buffers that the model computed itself
    return model


def _stored_dtype(checkpoint: Checkpoint, description: Description) -> torch.dtype:
    """The dtype of the first floating tensor that belongs to no quantized weight."""
    known = _tensors_of(description)
    found = (TORCH_DTYPES.get(info.dtype) for name, info in checkpoint.tensors.items() if name not in known)
    return next((dtype for dtype in found if dtype is not None and dtype.is_floating_point), torch.float32)


def _tensors_of(description: Description) -> set[str]:
    """Tensors that are not parameters of the plain model."""
    return {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary


def _refuse_saving(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "transformers cannot save a model with quantized linears (nothing would say how to read them); "
        "copy the folder it was loaded from"
    )


class Loader:
    """Fills an empty model: at once for `load`, or part by part where it would not fit.

    Args:
        checkpoint: Open as long as tensors are placed.
        dtype: As in `load`.
        device: As in `load`.
        weight_only: As in `load`.
        prefill: As in `load`.
        impl: As in `load`.

    Attributes:
        model: The model; parameters that nothing was placed in are on the meta device.
        expected: Its parameters and persistent buffers by name, as they were when it was empty.

    Raises:
        ConfigError: transformers cannot build the model, or only with the checkpoint's own code.
        UnknownNameError: Another `impl` or `prefill`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        weight_only: bool = False,
        prefill: str | None = None,
        impl: str = "auto",
    ) -> None:
        self.device = torch.device(device)
        self.packing = Packing(impl, self.device)
        description = describe(checkpoint)
        dtype = dtype or config_dtype(checkpoint) or _stored_dtype(checkpoint, description)
        self.model = empty_model(checkpoint, dtype)
        self.checkpoint = checkpoint
        self.inputs = InputQuantization(checkpoint, weight_only, prefill)
        self.expected: dict[str, Tensor] = self.model.state_dict()
        self.missing = set(self.expected)
        self.float32 = keeps_float32(self.model, self.model.dtype)
        self.quantized = _by_plain_name(description)
        known = _tensors_of(description)
        self.plain = [name for name in checkpoint.tensors if name not in known]
        self.dequantized: list[str] = []
        self._read_weight: Callable[[StoredWeight], QuantizedTensor] = functools.partial(read_weight, checkpoint)

    def run(self) -> None:
        """Place every tensor, tie what is tied, and account for the rest."""
        assignments = self.assignments()
        order = (weight for a in assignments for source in _in_order(a) for weight in self.quantized.get(source, ()))
        with ReadAhead(self.checkpoint, order) as ahead:
            self._read_weight = ahead.read
            for assignment in assignments:
                self.place(assignment)
        if self.dequantized:
            _LOG.warning(
                "%d quantized weights are held dequantized, because no quantized module can take their place: %s",
                len(self.dequantized),
                listing(self.dequantized),
            )
        self.inputs.warn()
        self.packing.warn()
        if any(isinstance(module, QuantizedExperts) for module in self.model.modules()):
            self.model.set_experts_implementation("eager")
        self._tie()
        self._account_for_missing()

    def assignments(self) -> list[Assignment]:
        """Where in the model every tensor goes.

        Raises:
            CheckpointError: The model has no place for a tensor.
        """
        assignments, homeless = assign(self.model, [*self.plain, *self.quantized])
        self._account_for_homeless(homeless)
        return assignments

    def place(self, assignment: Assignment) -> None:
        """Read tensors and put them where they go.

        Raises:
            CheckpointError: They cannot be made into the parameter.
            TensorError: They do not fit it, or a scale is NaN or Inf.
        """
        if not (self._place_linear(assignment) or self._place_experts(assignment)):
            self._place_tensors(assignment)

    def dtype_of(self, target: str) -> torch.dtype:
        """The dtype that transformers would give a parameter."""
        own = self.expected[target].dtype
        return torch.float32 if self.float32 is not None and self.float32.search(target) else own

    def _place_linear(self, assignment: Assignment) -> bool:
        """Swap a linear for one with the quantized weight; False if that is not what this is."""
        stored = self.quantized.get(assignment.sources[0], [])
        path, _, name = assignment.target.rpartition(".")
        owner = self.model.get_submodule(path)
        if type(owner) is not nn.Linear or name != "weight":
            return False
        if assignment.converter is not None or len(assignment.sources) != 1 or len(stored) != 1:
            return False
        self._check_shape(assignment.target, torch.Size(stored[0].shape))
        weight = self._read_weight(stored[0])
        swapped = QuantizedLinear(weight, self.dtype_of(assignment.target), *self.inputs.of(stored[0])).to(self.device)
        if swapped.activation is None:
            swapped.prefill = self._prefill(weight, stored[0], swapped.dtype)
        del weight
        self.packing.pack(swapped, stored[0].module)
        swapped.register_parameter("bias", owner._parameters["bias"])
        self.model.set_submodule(path, swapped)
        self.missing.discard(assignment.target)
        return True

    def _prefill(self, weight: QuantizedTensor, stored: StoredWeight, dtype: torch.dtype) -> QuantizedWeight | None:
        """The weight once more, for inputs of many rows; None where one does for all.

        Raises:
            KernelUnavailable: The GPU has no FP8 product of such inputs and weights.
        """
        inputs = self.inputs.prefill_of(stored)
        if inputs is None:
            return None
        made = QuantizedWeight(weight, dtype, *inputs).to(self.device)
        reason = scaled_mm.why_not(made.quantized, inputs[0]) if self.device.type != "cpu" else ""
        if reason:
            raise KernelUnavailable(f"{stored.module}: prefill={self.inputs.prefill!r} cannot run: {reason}")
        self.packing.pack(made, stored.module)
        return made

    def _place_experts(self, assignment: Assignment) -> bool:
        """Put a `QuantizedExperts` in the place of a parameter ``[E, ...]``; False if that is not what this is."""
        stored = [self.quantized.get(source, []) for source in assignment.sources]
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
            experts = [[self.quantized[source][0] for source in expert] for expert in parts]
            rows, cols = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
            fits = self.expected[assignment.target].shape[1:] == (rows, cols)
            transposed = assignment.may_transpose and not fits
        multiplied = multiplies_experts(type(owner), name)
        make = functools.partial(self._expert, self.dtype_of(assignment.target), multiplied)
        stack = QuantizedExperts([[make(part) for part in expert] for expert in experts], transposed, multiplied)
        self._check_shape(assignment.target, stack.shape)
        delattr(owner, name)
        setattr(owner, name, stack)
        self.missing.discard(assignment.target)
        return True

    def _expert(self, dtype: torch.dtype, multiplied: bool, stored: StoredWeight) -> QuantizedWeight:
        """One weight of an expert; weight-only, and as it is stored, where it is not merely multiplied."""
        weight = self._read_weight(stored)
        if not multiplied:
            self.inputs.skip(stored, NOT_MULTIPLIED)
        activation, scale = self.inputs.of(stored) if multiplied else (None, None)
        made = QuantizedWeight(weight, dtype, activation, scale).to(self.device)
        del weight
        self.packing.pack(made, stored.module, multiplied=multiplied)
        return made

    def _place_tensors(self, assignment: Assignment) -> None:
        """Make ordinary parameters or buffers, by transformers' conversion where it has one."""
        sources = listing(assignment.sources)
        if assignment.converter is None and len(assignment.sources) > 1:
            raise self._error(f"{sources} are all the parameter {assignment.target}; expected one of them")
        self.dequantized += [source for source in assignment.sources if source in self.quantized]
        dtype = self.dtype_of(assignment.target)
        try:
            made = assignment.convert(lambda source: self._read(source, dtype), self.model)
        except MinifloatError:
            raise
        except Exception as error:  # the operations check little: a wrong shape can be any error
            raise self._error(f"transformers cannot make {assignment.target} of {sources}: {error}") from error
        for name, tensor in made.items():
            if name not in self.expected:
                raise self._error(f"{sources}: transformers makes {name} of it, which the model does not have")
            self._check_shape(name, tensor.shape)
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            is_parameter = leaf in owner._parameters
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
            self.missing.discard(name)

    def _read(self, source: str, dtype: torch.dtype) -> Tensor:
        """A tensor as the plain checkpoint would hold it, in `dtype`."""
        stored = self.quantized.get(source)
        if stored is None:
            return self._read_plain(source, dtype).to(self.device, dtype)
        for weight in stored:
            self.inputs.skip(weight, "they are held dequantized")
        weights = [self._read_weight(weight).dequantize(dtype) for weight in stored]
        if stored[0].expert is None:
            return weights[0].to(self.device)
        owner = self.model.get_submodule(source.rpartition(".")[0])
        return torch.stack([weight.T if _is_transposed(owner) else weight for weight in weights]).to(self.device)

    def _read_plain(self, name: str, target: torch.dtype) -> Tensor:
        info = self.checkpoint.tensors[name]
        stored = TORCH_DTYPES.get(info.dtype)
        if stored is None or stored.is_floating_point != target.is_floating_point:
            fitting = [
                key for key, dtype in TORCH_DTYPES.items() if dtype.is_floating_point == target.is_floating_point
            ]
            raise UnsupportedTensorError(name, f"the model has {target} here; expected {fitting}, found {info.dtype}")
        return torch.from_numpy(self.checkpoint.read(name)).view(stored).reshape(info.shape)

    def _tie(self) -> None:
        """Tie as the config says, except to what is stored quantized: that is a weight of its own."""
        tied = self.model.all_tied_weights_keys
        for target, source in list(tied.items()):
            if any(
                isinstance(self.model.get_submodule(n.rpartition(".")[0]), QuantizedLinear) for n in (target, source)
            ):
                _LOG.warning("config.json ties %s to %s, but one of them is stored quantized: not tied", target, source)
                del tied[target]
        self.model.tie_weights(missing_keys=self.missing, recompute_mapping=False)

    def _account_for_homeless(self, names: Sequence[str]) -> None:
        """Refuse tensors that the model has no place for, except those that it says it ignores."""
        droppable, lost = split_ignorable(self.model, names)
        if lost:
            raise self._error(
                f"{len(lost)} tensors have no place in {type(self.model).__name__}: {listing(lost)}; "
                "the config is of another model, or transformers is too old for this one"
            )
        if droppable:
            _LOG.warning("%d tensors are not used by the model: %s", len(droppable), listing(droppable))

    def _account_for_missing(self) -> None:
        """Refuse a model with a parameter that nothing filled."""
        optional = re.compile("|".join(f"({p})" for p in self.model._keys_to_ignore_on_load_missing or ()) or r"(?!)")
        unfilled = [
            name
            for name in sorted(self.missing)
            if not optional.search(name) or self.expected[name].device.type == "meta"
        ]
        if unfilled:
            raise self._error(
                f"{len(unfilled)} parameters of {type(self.model).__name__} have no tensor: {listing(unfilled)}"
            )

    def _check_shape(self, target: str, found: torch.Size) -> None:
        expected = self.expected[target].shape
        if found != expected:
            raise ShapeError(
                target, f"the config expects {list(expected)}, the checkpoint holds {list(found)}: not the same model"
            )

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.path, problem)


def _by_plain_name(description: Description) -> dict[str, list[StoredWeight]]:
    """Quantized weights by the name that the tensor has in the plain checkpoint; several for fused experts."""
    weights: dict[str, list[StoredWeight]] = {}
    for stored in sorted(description.weights.values(), key=lambda weight: weight.expert or 0):
        name = f"{stored.module}.weight" if stored.expert is None else stored.module.rpartition(".")[0]
        weights.setdefault(name, []).append(stored)
    return weights


def _in_order(assignment: Assignment) -> Iterable[str]:
    """The sources of an assignment in the order in which they are read."""
    experts = assignment.expert_parts()
    return assignment.sources if experts is None else (source for expert in experts for source in expert)


def _is_transposed(owner: nn.Module) -> bool:
    """Whether an experts module keeps ``[E, in, out]``, where fused codes are always ``[E, out, in]``."""
    return bool(getattr(owner, "is_transposed", False))
