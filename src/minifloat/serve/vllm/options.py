"""Options of a vLLM server, and their translation from the options of `minifloat serve`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minifloat.errors import UsageError
from minifloat.hub import model_name

#: Launchers by which several nodes find each other.
MULTI_NODE = ("vllm", "ray")
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
    "nodes",
    "node_rank",
    "master_addr",
    "multi_node",
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
        model: Checkpoint: a folder, or a model of the hub, which vLLM fetches itself.
        revision: Branch, tag or commit of a model of the hub.
        host: Address that vLLM listens on.
        port: TCP port of vLLM.
        served_model_name: Name of the model in requests; None: the folder's name, or the hub id.
        api_key: API key of vLLM, passed in its environment; None: no key is needed.
        vllm_bin: Path of the command `vllm`, or its name on PATH.
        vllm_python: Python of vLLM's environment, instead of the command.
        tensor_parallel_size: Number of devices that share every matrix.
        pipeline_parallel_size: Number of groups of devices that share the layers.
        nodes: Number of machines that share the model.
        node_rank: Rank of this machine; 0 is the head, which has the API.
        master_addr: Address of the head, if there are several machines.
        multi_node: ``"vllm"`` (torch.distributed) or ``"ray"``.
        hardware: Name in `minifloat.check.ENGINE_HARDWARE`; None: detected.
        settings: Options of vLLM with their values; the value of a flag is None.
        arguments: More arguments of vLLM, passed on unchanged.
        startup_timeout: Seconds until vLLM must answer.
        shutdown_timeout: Seconds that admitted requests have to finish after SIGTERM.
        allow_unquantized: Whether to serve even if vLLM's log says that quantized weights run unquantized.
        quiet: Whether to log warnings only, without vLLM's log.
    """

    model: str
    revision: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    vllm_bin: str = "vllm"
    vllm_python: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    multi_node: str = MULTI_NODE[0]
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
        self._check_nodes()
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

    def _check_nodes(self) -> None:
        world = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.multi_node not in MULTI_NODE:
            raise UsageError(f"--multi-node: expected {' or '.join(MULTI_NODE)}, got {self.multi_node!r}")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank: expected 0 to {self.nodes - 1} with --nodes {self.nodes}")
        if self.nodes == 1:
            if self.master_addr is not None:
                raise UsageError("--master-addr needs --nodes")
            return
        if self.master_addr is None:
            raise UsageError("--nodes: the nodes must know the address of the first node; give --master-addr")
        if world % self.nodes or world < self.nodes:
            raise UsageError(
                f"{self.nodes} nodes cannot share {world} devices evenly (--tensor-parallel-size "
                f"{self.tensor_parallel_size} x --pipeline-parallel-size {self.pipeline_parallel_size})"
            )
        if self.multi_node == "vllm" and self.vllm_python is not None:
            raise UsageError(
                "--vllm-python starts vLLM's API server, which cannot run other nodes; "
                "name the vllm command with --vllm-bin, or use --multi-node ray"
            )

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.served_model_name or model_name(self.model)


def vllm_options(
    model: str, options: Mapping[str, Any], stated: Collection[str], keys: tuple[str, ...], arguments: tuple[str, ...]
) -> VllmOptions:
    """Translate the options of `minifloat serve`.

    Args:
        model: Checkpoint: a folder or a model of the hub.
        options: Values of the options by name.
        stated: Names of the options that the user gave. Defaults of the others are those of minifloat's engine, and are
            not passed to vLLM.
        keys: API keys.
        arguments: Arguments after ``--``.

    Raises:
        UsageError: If vLLM has no counterpart of a stated option, or options contradict each other.
    """
    foreign = [name for name in options if name in stated and name not in {*_TRANSLATED, *_OWN_OPTIONS, *ONLY_VLLM}]
    if foreign:
        raise UsageError(
            f"{', '.join(map(flag, foreign))}: not with --engine vllm, which lacks this option or defines it "
            "differently; give vLLM's own options after --"
        )
    if len(keys) > 1:
        raise UsageError(f"vLLM accepts one API key, got {len(keys)}")
    if "vllm_bin" in stated and "vllm_python" in stated:
        raise UsageError("--vllm-bin and --vllm-python both name vLLM; give one")
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
    return "--" + name.replace("_", "-")
