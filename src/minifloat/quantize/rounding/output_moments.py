"""How the outputs of linears bear on the loss of the original model: second moments of gradients, in blocks of outputs.

The loss is the negative log-likelihood of tokens that are drawn from the model's own distribution, so that the moments
are those of the Fisher information. Layers are in memory one at a time: first forward, with the hidden states that
enter each layer kept in a file, then backward.

Source: A. Tseng, Z. Sun and C. De Sa, YAQA (arXiv 2505.22988), the factor of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from minifloat.calibration.data import Batch
from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.calibration.layerwise.walk import LayerWork
from minifloat.checkpoint.array_file import ArrayContent, ArrayFile
from minifloat.checkpoint.progress import Progress
from minifloat.kernels.rounding import ROW_BLOCK
from minifloat.model.runtime.products import fast_products
from minifloat.quantize.estimate import moment_tokens
from minifloat.quantize.rounding.group_damage import DAMAGE_TOKENS, DamageRequest, Damages, LayerDamage
from minifloat.quantize.rounding.layer import tensor_bytes
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT
from minifloat.quantize.rounding.stages import Stage, find_stages, on_output
from minifloat.quantize.rounding.texts import first_sequences

#: Suffix of the work folder.
SUFFIX = "-outputs"


class OutputMoments:
    """The moments of linears, in files of a work folder that the runs of one command share.

    Those of experts, and of linears with several weights, have none. The work folder goes when the block is left
    without an error.
    """

    def __init__(self, work_dir: Path) -> None:
        self._path = work_dir.with_name(work_dir.name + SUFFIX)
        self._exits = ExitStack()
        self._work: LayerWork | None = None
        self._by_module: dict[str, ArrayFile] = {}
        self.damages = Damages()  # of what a request asks for, in nats per token

    def __enter__(self) -> OutputMoments:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        with self._exits:
            if self._work is not None and error is None:
                self._work.remove()

    def take(
        self,
        stack: LayerStack,
        sequences: Sequence[Sequence[int]],
        fingerprint: str,
        progress: Progress | None = None,
        request: DamageRequest | None = None,
    ) -> None:
        """Take the moments of all layers, unless that was done: in this command, or in one that was interrupted.

        With a request, take the damages of groups in the same pass.
        """
        if self._work is not None:
            return
        self._work = folder = self._exits.enter_context(LayerWork(self._path, fingerprint, LAYER_FORMAT))
        if len(folder.finished) < len(stack):
            folder.continues()  # from nothing: the gradients of an interrupted run are lost
            tokens = moment_tokens(stack.model.config.to_dict(), len(stack), stack.model.dtype.itemsize)
            first = first_sequences(sequences, tokens)
            with TensorFile(folder.scratch("states")) as states, TensorFile(folder.scratch("arguments")) as arguments:
                pool = ArgumentPool(arguments, stack.device)
                _Gradients(stack, stack.batches(first), states, pool, progress, request).run(folder)
                states.path.unlink()
        for file in folder.finished:
            for group, damages in file.record.get("damages", {}).items():
                of_group = self.damages.setdefault(group, {})
                for name, damage in damages.items():
                    of_group[name] = of_group.get(name, 0.0) + damage
        self._by_module = {module: file for file in folder.finished for module in file.names}

    def of(self, modules: Iterable[str]) -> dict[str, Tensor]:
        """Return the moments of some modules, float32 ``[blocks, ROW_BLOCK, ROW_BLOCK]``, as far as there are any."""
        shape = (-1, ROW_BLOCK, ROW_BLOCK)
        found = {module: self._by_module[module].read(module) for module in modules if module in self._by_module}
        return {name: torch.from_numpy(data).view(torch.float32).reshape(shape) for name, data in found.items()}


class _Gradients:
    """One pass forward and one backward, which adds up the moments of one layer at a time."""

    def __init__(
        self,
        stack: LayerStack,
        batches: Sequence[Batch],
        file: TensorFile,
        pool: ArgumentPool,
        progress: Progress | None,
        request: DamageRequest | None,
    ) -> None:
        self.stack, self.batches, self.file, self.progress = stack, batches, file, progress
        self.request = request
        self.pool, self.moments, self._layers = pool, dict[str, Tensor](), 0
        self._calls: list[tuple[LayerCall, ...]] = []

    def run(self, folder: LayerWork) -> None:
        """Finish the layers in a folder, the last one first."""
        places = self._forward()
        generator = torch.Generator().manual_seed(0)
        with self.stack.weights.before_layers():
            gradients = [
                self._loss_gradients(batch, self._read(place), generator)
                for batch, place in zip(self.batches, places.pop(), strict=True)
            ]
        for index in reversed(range(len(self.stack))):
            with self.stack.weights.layer(index) as layer:
                gradients, damages = self._backward(index, layer, places.pop(), gradients)
            found = {module: tensor_bytes(moments) for module, moments in self.moments.items()}
            folder.finish(len(folder.finished), ArrayContent({"damages": damages}, found))
            self.moments.clear()
            self._report(index)

    def _loss_gradients(self, batch: Batch, hidden: Tensor, generator: torch.Generator) -> Tensor:
        rows = (hidden[row : row + 1] for row in range(len(batch)))
        return torch.cat([self.stack.loss_gradient(*pair, generator) for pair in zip(batch, rows, strict=True)])

    def _forward(self) -> list[list[StoredTensor]]:
        """Return the places of the hidden states of each batch that enter each layer, and of the last ones."""
        first: list[StoredTensor] = []
        self._calls = self.stack.capture(self.batches, self.pool, lambda _, hidden: first.append(self._keep(hidden)))
        places = [first]
        for index in range(len(self.stack)):
            with self.stack.weights.layer(index) as layer, torch.inference_mode():
                calls = (self._call(index, number) for number in range(len(self.batches)))
                states = zip(calls, places[-1], strict=True)
                places.append([self._keep(call.run(layer, self._read(place))) for call, place in states])
            self._report(index)
        return places

    def _backward(
        self, index: int, layer: nn.Module, places: Sequence[StoredTensor], gradients: Sequence[Tensor]
    ) -> tuple[list[Tensor], Damages]:
        """Add up the moments of a layer; return the gradients of the hidden states that enter it, and damages."""
        stages = self._stages(index, layer, places[0])
        modules = {
            path: module
            for stage in stages
            if stage.outer is None and len(stage.paths) == len(stage.experts[0])
            for path, module in zip(stage.paths, stage.experts[0], strict=True)
        }
        damage = None if self.request is None else LayerDamage(self.request, self.stack, index, stages)
        entering, tokens = [], 0
        for number, (place, gradient) in enumerate(zip(places, gradients, strict=True)):
            measured = damage if tokens < DAMAGE_TOKENS else None
            paths = dict.fromkeys([*modules, *(measured.groups if measured is not None else ())])
            hidden, outputs = self._read(place).requires_grad_(), dict[str, Tensor]()
            with ExitStack() as stack, torch.enable_grad():
                if measured is not None:
                    stack.enter_context(measured.watched())
                for path in paths:
                    on_output(stack, self.stack.model.get_submodule(path), partial(outputs.__setitem__, path))
                output = self.pool.restore(self._calls[number][index], for_backward=True).run(layer, hidden)
            ran = [path for path in paths if path in outputs]
            wanted = [hidden, *(outputs[path] for path in ran)]
            with fast_products():
                of_hidden, *found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
            entering.append(torch.zeros_like(hidden) if of_hidden is None else of_hidden)
            of_outputs = dict(zip(ran, found, strict=True))
            for path, module in modules.items():
                if (of_output := of_outputs.get(path)) is not None:
                    self._add(module, of_output)
            if measured is not None:
                measured.add(of_outputs)
                tokens += hidden.shape[0] * hidden.shape[1]
        return entering, {} if damage is None else damage.measure(tokens)

    def _stages(self, index: int, layer: nn.Module, place: StoredTensor) -> list[Stage]:
        path, sites = f"{self.stack.path}.{index}", self.stack.sites_of(index)
        return find_stages(self.stack.model, path, layer, sites, self._call(index, 0), self._read(place))

    def _add(self, module: str, gradient: Tensor) -> None:
        # Values that are not finite are named by the walk that follows, or are gradients beyond float16.
        rows = gradient.reshape(-1, gradient.shape[-1]).float().nan_to_num_(0.0, 0.0, 0.0)
        blocks = -(-rows.shape[1] // ROW_BLOCK)
        rows = torch.nn.functional.pad(rows, (0, blocks * ROW_BLOCK - rows.shape[1]))
        rows = rows.view(len(rows), blocks, ROW_BLOCK).transpose(0, 1)
        total = self.moments.setdefault(module, torch.zeros(blocks, ROW_BLOCK, ROW_BLOCK))
        total += torch.bmm(rows.transpose(1, 2), rows).cpu()

    def _call(self, index: int, number: int) -> LayerCall:
        return self.pool.restore(self._calls[number][index])

    def _keep(self, hidden: Tensor) -> StoredTensor:
        return self.file.append(hidden)

    def _read(self, place: StoredTensor) -> Tensor:
        return self.file.read(place).to(self.stack.device)

    def _report(self, index: int) -> None:
        self._layers += 1
        if self.progress is not None:
            layers = len(self.stack)
            self.progress(self._layers, 2 * layers, f"gradients of layer {index + 1} of {layers}")
