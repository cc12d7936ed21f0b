"""What is asked of vLLM: a value that the command line, a test and an embedding program make alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from minifloat.errors import UsageError
from minifloat.hub import model_name

#: How several nodes find each other.
MULTI_NODE = ("vllm", "ray")
#: Options of `minifloat serve` that vLLM has too -> vLLM's name. A flag's value is None.
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
#: Options of ours that are not passed on as they are, but mean the same.
_SHARED = {"revision", "host", "port", "served_model_name", "shutdown_timeout", "quiet", "api_key", "api_key_file"}
#: Options that only vLLM has, beside the fields of `VllmOptions` of the same names.
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
#: vLLM's options that are refused after ``--``: they would move the server from where it is looked for, or show a key.
_NOT_PASSED_ON = {
    "--api-key": "other users see arguments; use --api-key-file or MINIFLOAT_API_KEY",
    "--model": "MODEL says it",
    "--revision": "MODEL@REV says it, or --revision before the --",
    "--uds": "the server is looked for at --host and --port",
}


@dataclass(frozen=True)
class VllmOptions:
    """What is to be served, and how.

    Attributes:
        model: The folder, or a model of the hub, which vLLM then fetches itself.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.
        host: The address that vLLM listens on.
        port: Its TCP port.
        served_model_name: What requests call the model; None: the folder's name, or its id.
        api_key: What vLLM asks requests for, in its environment; None: nothing.
        vllm_bin: The command `vllm`, by path or as PATH has it.
        vllm_python: The Python of vLLM's environment, in place of the command.
        tensor_parallel_size: Devices that share every matrix.
        pipeline_parallel_size: Groups of devices that share the layers.
        nodes: Machines that share the model.
        node_rank: Which of them this is; 0 is the head, which has the API.
        master_addr: The head's address, where there are several.
        multi_node: ``"vllm"`` (torch.distributed) or ``"ray"``.
        hardware: A name of `minifloat.check.ENGINE_HARDWARE`; None: found out.
        settings: Options of vLLM with their values; None for a flag.
        arguments: More arguments, passed on as they are.
        startup_timeout: Seconds until it must answer.
        shutdown_timeout: Seconds that admitted requests are given to end after SIGTERM.
        allow_unquantized: Serve even where vLLM says that quantized weights run unquantized.
        quiet: Log warnings only, and not what vLLM writes.
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
            raise UsageError("--port 0: vLLM is looked for at a port that is known before it starts; name a free one")
        self._check_nodes()
        stated = {name for name, _ in self.settings} | {"--host", "--port", "--served-model-name", "--shutdown-timeout"}
        for argument in self.arguments:
            name = argument.partition("=")[0].replace("_", "-")
            if name in _NOT_PASSED_ON:
                raise UsageError(f"{name} after --: {_NOT_PASSED_ON[name]}")
            if name in stated:
                raise UsageError(f"{name} after --: it is stated already; give it before the --")

    def _check_nodes(self) -> None:
        world = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.multi_node not in MULTI_NODE:
            raise UsageError(f"--multi-node: expected {' or '.join(MULTI_NODE)}, got {self.multi_node!r}")
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(f"--node-rank: expected 0 to {self.nodes - 1} with --nodes {self.nodes}")
        if self.nodes == 1:
            if self.master_addr is not None:
                raise UsageError("--master-addr goes with --nodes")
            return
        if self.master_addr is None:
            raise UsageError("--nodes: the nodes must know the address of the first one; say --master-addr")
        if world % self.nodes or world < self.nodes:
            raise UsageError(
                f"{self.nodes} nodes cannot share {world} devices evenly (--tensor-parallel-size "
                f"{self.tensor_parallel_size} x --pipeline-parallel-size {self.pipeline_parallel_size})"
            )
        if self.multi_node == "vllm" and self.vllm_python is not None:
            raise UsageError(
                "--vllm-python starts vLLM's API server, which has no part for other nodes; "
                "name the vllm command with --vllm-bin, or use --multi-node ray"
            )

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.served_model_name or model_name(self.model)


def vllm_options(
    model: str, options: Mapping[str, Any], given: Collection[str], keys: tuple[str, ...], arguments: tuple[str, ...]
) -> VllmOptions:
    """Translate the options of `minifloat serve`.

    Args:
        model: The folder, or a model of the hub.
        options: The options by name, parsed.
        given: Those that the user gave; defaults of the others are our engine's, and not vLLM's.
        keys: The API keys.
        arguments: What stood after ``--``.

    Raises:
        UsageError: An option that was given has no like in vLLM, or options contradict each other.
    """
    foreign = [name for name in options if name in given and name not in {*_TRANSLATED, *_SHARED, *ONLY_VLLM}]
    if foreign:
        raise UsageError(
            f"{', '.join(map(flag, foreign))}: not with --engine vllm, which has no such option or means another thing "
            "by it; what vLLM has of its own goes after --"
        )
    if len(keys) > 1:
        raise UsageError(f"vLLM takes one API key from its environment, got {len(keys)}")
    if "vllm_bin" in given and "vllm_python" in given:
        raise UsageError("--vllm-bin and --vllm-python are two ways to the same thing; give one")
    own = {name: options[name] for name in ONLY_VLLM if name in options and name != "print_command"}
    return VllmOptions(
        model=model,
        api_key=keys[0] if keys else None,
        settings=tuple(
            (theirs, None if options[ours] is True else str(options[ours]))
            for ours, theirs in _TRANSLATED.items()
            if ours in given
        ),
        arguments=arguments,
        **{
            name: options[name]
            for name in ("revision", "host", "port", "served_model_name", "shutdown_timeout", "quiet")
        },
        **own,
    )


def flag(name: str) -> str:
    """An option as it is written."""
    return "--" + name.replace("_", "-")
