"""Every error that a user can cause, as one tree.

    MinifloatError
    ├── UsageError                    the request itself is wrong
    │   ├── UnknownNameError          a scheme, layout or rule that does not exist; lists the valid names
    │   ├── PatternError              a regex that does not compile or matches nothing
    │   ├── DestinationError          the output folder exists, or cannot be created there
    │   ├── DataError                 calibration text that is missing, empty, too short or unreadable
    │   └── ContextLengthError        a prompt that leaves no room in the model's context
    ├── CheckpointError               the files on disk are not what they claim to be
    │   ├── NotACheckpointError       no config.json, no safetensors
    │   ├── UnsafeFileError           pickle files; names that leave the folder
    │   ├── HeaderError               a safetensors header that lies
    │   ├── ShardIndexError           the shard index disagrees with the shards
    │   ├── ConfigError               config.json or its quantization_config cannot be read
    │   └── StatsError                activation statistics: damaged, of another version or of another model
    ├── TensorError                   one tensor cannot be handled; `.tensor` names it
    │   ├── NonFiniteError            NaN or Inf where a finite number is needed
    │   ├── ShapeError                the size does not fit the scheme
    │   └── UnsupportedTensorError    dtype or role that this operation does not cover
    ├── NotCalibratedError            calibration saw too little of a module to give it a scale; names it
    ├── SaturationError               static scales would saturate more held-out text than is allowed
    ├── ConversionError               a checkpoint cannot be carried into another layout without loss
    ├── AlreadyQuantizedError         the source carries a quantization_config already
    ├── KernelUnavailable             an implementation was named that cannot run here
    ├── QueueFull                     as many requests wait for the engine as may
    ├── EngineStopped                 the engine is shutting down, or has failed
    ├── HubError                      a model of the hub that cannot be had, or not be pushed; `.model` names it
    └── StorageError                  the operating system refused: disk full, no permission, a failed read

A message names the file or tensor, what was expected, what was found, and the cure. The command line prints
it as one line and exits with status 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar


class MinifloatError(Exception):
    """Base class: catching it catches everything that this package raises on purpose."""


class UsageError(MinifloatError):
    """The request itself is wrong; nothing was read or written."""


class UnknownNameError(UsageError):
    """A name that is in no table.

    Args:
        kind: What was looked up, for example ``"scheme"``.
        name: The name that was given.
        valid: The names that exist.
    """

    def __init__(self, kind: str, name: str, valid: Iterable[str]) -> None:
        self.kind, self.name, self.valid = kind, name, tuple(valid)
        super().__init__(f"unknown {kind} {name!r}; valid: {', '.join(self.valid)}")


_Entry = TypeVar("_Entry")


def lookup(kind: str, name: str, table: Mapping[str, _Entry]) -> _Entry:
    """The entry of a table.

    Raises:
        UnknownNameError: No entry of that name; the message lists the names that exist.
    """
    try:
        return table[name]
    except KeyError:
        raise UnknownNameError(kind, name, table) from None


class PatternError(UsageError):
    """A pattern that does not compile, or that matches no module of the checkpoint."""


class DestinationError(UsageError):
    """The output folder exists already, or its parent does not."""


class DataError(UsageError):
    """The text for calibration is missing, empty, too short or unreadable."""


class ContextLengthError(UsageError):
    """A prompt that leaves no room for an answer in the model's context."""


class CheckpointError(MinifloatError):
    """The files on disk are not what they claim to be.

    Args:
        path: The file at fault.
        problem: What was expected and what was found.
    """

    def __init__(self, path: Path | str, problem: str) -> None:
        self.path = Path(path)
        super().__init__(f"{path}: {problem}")


class NotACheckpointError(CheckpointError):
    """No config.json, or no safetensors files."""


class UnsafeFileError(CheckpointError):
    """A pickle file, or a name that leaves the checkpoint's folder."""


class HeaderError(CheckpointError):
    """A safetensors header that disagrees with its file or with itself."""


class ShardIndexError(CheckpointError):
    """model.safetensors.index.json disagrees with the shards beside it."""


class ConfigError(CheckpointError):
    """config.json, or the quantization_config in it, cannot be understood."""


class StatsError(CheckpointError):
    """Activation statistics that are damaged, of another version, or of another model."""


class TensorError(MinifloatError):
    """One tensor cannot be handled.

    Args:
        tensor: Its name in the checkpoint.
        problem: What was expected, what was found, and the cure.
    """

    def __init__(self, tensor: str, problem: str) -> None:
        self.tensor = tensor
        super().__init__(f"{tensor}: {problem}")


class NonFiniteError(TensorError):
    """NaN or Inf where a finite number is needed."""


class ShapeError(TensorError):
    """The size of the tensor does not fit the scheme."""


class UnsupportedTensorError(TensorError):
    """A dtype or a role that the operation does not cover."""


_SHOWN_MODULES = 8  #: a message stays readable when a whole model is at fault


class NotCalibratedError(MinifloatError):
    """Calibration saw too little of these modules to give them a scale.

    Args:
        modules: Their names in the checkpoint.
        problem: What is missing, and the cure.
    """

    def __init__(self, modules: Iterable[str], problem: str) -> None:
        self.modules = tuple(modules)
        shown = ", ".join(self.modules[:_SHOWN_MODULES])
        more = len(self.modules) - _SHOWN_MODULES
        super().__init__(f"{shown}{f' and {more} more' if more > 0 else ''}: {problem}")


class SaturationError(MinifloatError):
    """Static scales would saturate more of the held-out text than the caller allows."""


class ConversionError(MinifloatError):
    """A quantized checkpoint cannot be carried into another layout without loss; nothing was written."""


class AlreadyQuantizedError(MinifloatError):
    """The source is quantized already; quantizing it again would round twice."""


class KernelUnavailable(MinifloatError):
    """An implementation was asked for by name that cannot run here."""


class QueueFull(MinifloatError):
    """As many requests wait for the engine as may; the same request may be possible later."""


class EngineStopped(MinifloatError):
    """The engine is shutting down, or has failed: it takes no requests."""


class HubError(MinifloatError):
    """The hub has no such model, refuses it, or cannot be reached.

    Args:
        model: Its id.
        problem: What went wrong, and the cure.
    """

    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        super().__init__(f"{model}: {problem}")


class StorageError(MinifloatError):
    """The operating system refused a read or a write (disk full, no permission)."""
