"""A plan agrees with arithmetic by hand, and with the bytes that `quantize` writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from model_configs import DEEPSEEK_V3, LLAMA_70B

from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.checkpoint import Checkpoint
from minifloat.deploy.estimate import ModelPlan, PlanOptions, SchemeEstimate, plan_model
from minifloat.errors import (
    AlreadyQuantizedError,
    ConfigError,
    NotACheckpointError,
    ShapeError,
    UnknownNameError,
    UsageError,
)
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

ROOT = Path(__file__).parents[3]
STORYBOOK = ROOT / "examples" / "storybook-4m"
INTEROP = ROOT / "tests" / "data" / "interop"

# Parameters of Llama 70B, computed by hand.
_Q, _KV, _MLP = 8192 * 8192, 1024 * 8192, 28672 * 8192
_LAYER = 2 * _Q + 2 * _KV + 3 * _MLP
_LINEARS = 80 * _LAYER
_TABLE = 128256 * 8192
_NORMS = (2 * 80 + 1) * 8192


def scheme_of(plan: ModelPlan, name: str) -> SchemeEstimate:
    return next(candidate for candidate in plan.schemes if candidate.scheme == name)


def test_weight_bytes_of_a_70b_llama_agree_with_arithmetic_by_hand(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="h100")
    assert plan.estimated
    assert plan.counts.total == plan.counts.active == _LINEARS + 2 * _TABLE + _NORMS == 70_553_706_496
    kept = 2 * (2 * _TABLE + _NORMS)  # embedding, lm_head and norms stay in BF16
    channels = 80 * (8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192)
    blocks = 80 * (2 * 64 * 64 + 2 * 8 * 64 + 3 * 224 * 64)
    expected = {
        "bf16": 2 * _LINEARS + kept,  # 141.1 GB
        "fp8-block": _LINEARS + 4 * blocks + kept,  # 72.7 GB: half of the linears, all of the tables
        "fp8": _LINEARS + 4 * channels + kept,
        "fp8-dynamic": _LINEARS + 4 * channels + kept,
        "fp8-static": _LINEARS + (4 + 4) * 80 * 7 + kept,  # a scale per weight, and one per input
        "mxfp8": _LINEARS + _LINEARS // 32 + kept,
        "mxfp4": _LINEARS // 2 + _LINEARS // 32 + kept,  # 40.6 GB
        "nvfp4": _LINEARS // 2 + _LINEARS // 16 + 4 * 80 * 7 + kept,
        "nvfp4-w4a4": _LINEARS // 2 + _LINEARS // 16 + (4 + 4) * 80 * 7 + kept,
    }
    expected |= {"mxfp8-w8a8": expected["mxfp8"], "mxfp4-w4a8": expected["mxfp4"], "mxfp4-w4a4": expected["mxfp4"]}
    assert {scheme_plan.scheme: scheme_plan.weights for scheme_plan in plan.schemes} == expected
    assert [round(expected[name] / 1e9, 1) for name in ("bf16", "fp8-block", "mxfp4")] == [141.1, 72.7, 40.6]
    assert round(_LINEARS / 1e9, 1) == 68.5
    assert not plan.refused


def test_one_h100_holds_70b_in_four_bits_only(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="h100", options=PlanOptions(context=4096))
    fitting = [scheme_plan.scheme for scheme_plan in plan.schemes if scheme_plan.fits]
    assert fitting == ["mxfp4", "nvfp4", "mxfp4-w4a8", "mxfp4-w4a4", "nvfp4-w4a4"]
    assert plan.fastest is not None
    assert plan.fastest.scheme == "mxfp4"


@pytest.mark.parametrize(
    ("scheme", "hardware", "arithmetic"),
    [
        ("mxfp8-w8a8", "h100", "BF16"),
        ("mxfp8-w8a8", "b200", "E4M3"),
        ("mxfp4-w4a8", "b200", "E4M3"),
        ("mxfp4-w4a4", "b200", "E2M1"),
        ("mxfp4-w4a4", "mi355x", "E2M1"),
        ("nvfp4-w4a4", "b200", "E2M1"),
        ("nvfp4-w4a4", "mi355x", "BF16"),
        ("mxfp4", "b200", "BF16"),
    ],
)
def test_small_inputs_are_multiplied_where_the_machine_has_their_format(
    llama_70b: Path, scheme: str, hardware: str, arithmetic: str
) -> None:
    assert scheme_of(plan_model(llama_70b, scheme, hardware), scheme).arithmetic == arithmetic


def test_the_command_for_nvfp4_inputs_calibrates(llama_70b: Path) -> None:
    commands = scheme_of(plan_model(llama_70b, "nvfp4-w4a4", "b200"), "nvfp4-w4a4").commands
    assert "--scheme nvfp4-w4a4 --calibration TEXT" in commands[0]


def test_the_needed_devices_hold_the_model_and_half_as_many_do_not(llama_70b: Path) -> None:
    one = plan_model(llama_70b, hardware="h100")
    for name in ("bf16", "fp8"):
        scheme = scheme_of(one, name)
        assert not scheme.fits
        assert scheme.needed_gpus == 2  # 141 GB and 73 GB on devices with 72 GB usable: the batch is one sequence
        assert scheme_of(plan_model(llama_70b, hardware="h100", options=PlanOptions(gpus=2)), name).fits
    assert scheme_of(one, "mxfp4").needed_gpus is None  # it fits
    small = plan_model(llama_70b, hardware="rtx4090")
    assert scheme_of(small, "bf16").needed_gpus == 8  # 64 heads: 3, 5, 6 and 7 devices cannot share them
    assert not scheme_of(plan_model(llama_70b, hardware="rtx4090", options=PlanOptions(gpus=4)), "bf16").fits


def test_the_least_loss_is_the_fastest_of_those_with_about_the_smallest_measured_divergence(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="h100", options=PlanOptions(gpus=2, batch=32))
    least = plan.least_loss
    assert least is not None
    divergences = {scheme.scheme: scheme.measured_kl for scheme in plan.schemes}
    assert divergences["bf16"] is None
    known = [value for value in divergences.values() if value is not None]
    assert least.measured_kl is not None
    assert least.measured_kl <= 1.1 * min(known)
    assert plan.to_dict()["least_loss"] == least.scheme == "fp8"


def test_the_largest_batch_fits_and_one_more_does_not(llama_70b: Path) -> None:
    found = scheme_of(plan_model(llama_70b, "mxfp4", "h100", PlanOptions(context=4096)), "mxfp4").largest_batch
    assert found > 1
    assert scheme_of(plan_model(llama_70b, "mxfp4", "h100", PlanOptions(context=4096, batch=found)), "mxfp4").fits
    assert not scheme_of(
        plan_model(llama_70b, "mxfp4", "h100", PlanOptions(context=4096, batch=found + 1)), "mxfp4"
    ).fits


def test_the_largest_context_fits_and_one_more_does_not(llama_70b: Path) -> None:
    found = scheme_of(plan_model(llama_70b, "mxfp4", "h100", PlanOptions(batch=8)), "mxfp4").largest_context
    assert 1 < found < 131072
    assert scheme_of(plan_model(llama_70b, "mxfp4", "h100", PlanOptions(batch=8, context=found)), "mxfp4").fits
    assert not scheme_of(plan_model(llama_70b, "mxfp4", "h100", PlanOptions(batch=8, context=found + 1)), "mxfp4").fits


def test_memory_is_taken_by_weights_caches_and_activations(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, "fp8-block", "h200", PlanOptions(context=4096, batch=4, keep_free=0.25))
    assert plan.usable == 105_750_000_000
    for scheme_plan in plan.schemes:
        assert scheme_plan.taken == scheme_plan.device_weights + scheme_plan.cache + scheme_plan.activations
    # tokens x (2 hidden + (heads + 2 kv_heads) head_dim + 2 inner) x 2 bytes + batch x vocab x 4 bytes
    assert plan.schemes[0].activations == 2048 * (2 * 8192 + 80 * 128 + 2 * 28672) * 2 + 4 * 128256 * 4


def test_decode_takes_the_bytes_over_the_bandwidth(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, "mxfp4", "h200", PlanOptions(context=4096, batch=2))
    cache = 2 * 80 * 8 * 128 * 2 * 4096  # keys and values, layers, heads, width, bytes, tokens
    read = _LINEARS // 2 + _LINEARS // 32 + 2 * (_TABLE + _NORMS) + 2 * cache  # the embedding is looked up, not read
    decode = scheme_of(plan, "mxfp4").decode
    operations = 2 * (2 * (_LINEARS + _TABLE) + 4 * 80 * 64 * 128 * 4096)
    assert decode.cost.nbytes == read
    assert sum(decode.cost.operations.values()) == operations
    assert decode.memory_seconds == pytest.approx(read / 4.8e12)
    assert decode.compute_seconds == pytest.approx(operations / 989.5e12)
    assert decode.limit == "memory"
    assert decode.throughput == pytest.approx(2 * 4.8e12 / read)
    assert decode.intensity == pytest.approx(operations / read)
    assert decode.ridge == pytest.approx(989.5 / 4.8)


def test_prefill_is_compute_bound_and_twice_as_fast_in_fp8(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="h200", options=PlanOptions(context=4096))
    attention = 4 * 80 * 64 * 128 * 4096 * 4097 // 2
    linears, rest = 2 * _LINEARS * 4096, attention + 2 * _TABLE
    assert scheme_of(plan, "fp8").prefill.seconds == pytest.approx((linears + rest) / 989.5e12)
    assert scheme_of(plan, "fp8-dynamic").prefill.seconds == pytest.approx(linears / 1979e12 + rest / 989.5e12)
    assert {scheme_of(plan, name).prefill.limit for name in ("fp8", "fp8-dynamic")} == {"compute"}
    assert scheme_of(plan, "fp8").arithmetic == "BF16"
    assert scheme_of(plan, "fp8-dynamic").arithmetic == "E4M3"


def test_without_fp8_arithmetic_everything_is_weight_only(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="a100-80", options=PlanOptions(gpus=4))
    assert {scheme_plan.arithmetic for scheme_plan in plan.schemes} == {"BF16"}
    assert any("weight-only" in note for note in plan.notes)


def test_a_mixture_counts_active_and_total_weights_apart(mixtral: Path) -> None:
    plan = plan_model(mixtral, hardware="h200", options=PlanOptions(context=1024))
    expert = 3 * 4096 * 14336
    rest = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert plan.counts.total == 32 * 8 * expert + rest == 46_702_792_704
    assert plan.counts.active == 32 * 2 * expert + rest == 12_879_925_248
    decode = scheme_of(plan, "bf16").decode
    cache = 2 * 32 * 8 * 128 * 2 * 1024
    assert decode.cost.nbytes == pytest.approx(2 * (32 * 2 * expert + rest - 32000 * 4096) + cache)
    everyone = plan_model(mixtral, "fp8", "h200", PlanOptions(context=1024, batch=256)).schemes[0].decode
    assert everyone.cost.nbytes == pytest.approx(2 * (32 * 8 * expert + rest - 32000 * 4096) + 256 * cache, rel=1e-9)


def test_devices_share_weights_and_copy_what_cannot_be_divided(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, hardware="h100", options=PlanOptions(gpus=16))
    divided = 80 * (2 * _Q + 3 * _MLP) // 16 + 2 * _TABLE // 16
    copied = 80 * 2 * _KV // 8 + _NORMS  # 8 key-value heads on 16 devices: one each
    assert scheme_of(plan, "bf16").device_weights == 2 * (divided + copied)
    assert scheme_of(plan, "bf16").cache == 2 * 80 * 1 * 128 * 2 * 4096
    # channel scales: of rows where rows are divided, all of them where columns are
    scales = 80 * ((8192 + 2 * 28672) // 16 + 2 * 128 + 2 * 8192)
    low = 80 * (2 * _Q + 3 * _MLP) // 16 + 80 * 2 * _KV // 8
    assert scheme_of(plan, "fp8").device_weights == low + 4 * scales + 2 * (2 * _TABLE // 16 + _NORMS)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("gpus", [1, 2])
def test_one_device_has_all_bytes_and_two_have_no_fewer(scheme: str, gpus: int) -> None:
    for scheme_plan in plan_model(STORYBOOK, scheme, "h100", PlanOptions(gpus=gpus)).schemes:
        assert scheme_plan.device_weights * gpus >= scheme_plan.weights
        assert scheme_plan.device_weights * gpus <= scheme_plan.weights * (1 if gpus == 1 else 1.02)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    text = ROOT / "examples" / "texts" / "stories_calibration.txt"
    return Calibration(
        calibrate(STORYBOOK, str(text), CalibrateOptions(samples=2, seq_len=32, held_out=0)).stats, parse_rule("max")
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_predicted_bytes_are_those_that_quantize_writes(scheme: str, calibration: Calibration, tmp_path: Path) -> None:
    predicted = scheme_of(plan_model(STORYBOOK, scheme, "h100"), scheme).weights
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme, calibration=calibration)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert predicted == sum(info.nbytes for info in checkpoint.tensors.values())


def test_scales_of_an_fp8_cache_are_counted(calibration: Calibration, tmp_path: Path) -> None:
    predicted = scheme_of(plan_model(STORYBOOK, "mxfp4", "h100", PlanOptions(kv_cache_dtype="fp8")), "mxfp4").weights
    quantize_checkpoint(STORYBOOK, tmp_path / "out", "mxfp4", QuantizeOptions(kv_cache=True), calibration=calibration)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert predicted == sum(info.nbytes for info in checkpoint.tensors.values())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_predicted_bytes_of_mixtures_are_those_that_quantize_writes(
    model_type: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "model", model_type)
    predicted = scheme_of(plan_model(source, "fp8", "h100"), "fp8").weights
    report = quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert predicted == report.output_bytes


def test_a_config_alone_gives_the_figures_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((STORYBOOK / "config.json").read_text())
    options = PlanOptions(context=512)
    estimated, read = (plan_model(path, hardware="h100", options=options) for path in (tmp_path, STORYBOOK))
    assert (estimated.estimated, read.estimated) == (True, False)
    assert [scheme_plan.weights for scheme_plan in estimated.schemes] == [
        scheme_plan.weights for scheme_plan in read.schemes
    ]
    assert [scheme_plan.decode for scheme_plan in estimated.schemes] == [
        scheme_plan.decode for scheme_plan in read.schemes
    ]


def test_a_scheme_that_cannot_hold_the_model_is_refused_by_name(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_model(tmp_path / "model", "llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    plan = plan_model(source, hardware="h100")
    assert set(plan.refused) == {"mxfp8", "mxfp4", "mxfp8-w8a8", "mxfp4-w4a8", "mxfp4-w4a4"}
    assert "multiple of 32" in plan.refused["mxfp4"]
    with pytest.raises(ShapeError, match="multiple of 32"):
        plan_model(source, "mxfp4", "h100")


def test_wrong_arguments_are_refused_with_their_names(
    llama_70b: Path, tmp_path: Path, make_config: Callable[..., Path]
) -> None:
    for message, options in (
        ("valid: fp8-block", {"scheme": "fp9"}),
        ("valid: cpu, a100-40", {"hardware": "h300"}),
    ):
        with pytest.raises(UnknownNameError, match=message):
            plan_model(llama_70b, **{"hardware": "h100", **options})  # type: ignore[arg-type]
    for message, more in (
        ("131072 positions", {"context": 131073}),
        ("3 devices do not divide 64 heads", {"gpus": 3}),
        ("batch", {"batch": 0}),
        ("valid: bfloat16, fp8", {"kv_cache_dtype": "fp4"}),
        ("keep_free", {"keep_free": 1.0}),
    ):
        with pytest.raises(UsageError, match=message):
            plan_model(llama_70b, hardware="h100", options=PlanOptions(**more))  # type: ignore[arg-type]
    make_config({"model_type": "no_such_model"})
    with pytest.raises(ConfigError, match="does not have it; install a version that does; a folder with its weights"):
        plan_model(llama_70b, hardware="h100")
    with pytest.raises(NotACheckpointError, match="no config"):
        plan_model(ROOT / "examples" / "texts", hardware="h100")


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "mxfp4"])
def test_a_quantized_model_is_planned_as_it_is_and_not_quantized_again(scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(STORYBOOK, out, scheme)
    two = PlanOptions(gpus=2)
    before, after = plan_model(STORYBOOK, scheme, "h100", two), plan_model(out, hardware="h100", options=two)
    assert after.counts == before.counts
    planned, stored = before.schemes[-1], after.schemes[0]
    assert [scheme_plan.scheme for scheme_plan in after.schemes] == [scheme]
    assert (stored.weights, stored.device_weights) == (planned.weights, planned.device_weights)
    assert (stored.decode, stored.arithmetic) == (planned.decode, planned.arithmetic)
    assert stored.commands[0].startswith(f"minifloat serve {out} --engine vllm ")
    with pytest.raises(AlreadyQuantizedError):
        plan_model(out, "fp8", "h100")


@pytest.mark.parametrize("folder", sorted(path.name for path in INTEROP.iterdir() if (path / "config.json").exists()))
def test_golden_checkpoints_of_other_tools_are_planned(folder: str) -> None:
    with Checkpoint.open(INTEROP / folder) as checkpoint:
        nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    plan = plan_model(INTEROP / folder, hardware="h100")
    assert plan.schemes[0].weights == nbytes
    assert plan.schemes[0].device_weights == pytest.approx(nbytes, rel=0.05)


def test_repeated_layers_and_experts_are_all_counted(make_config: Callable[..., Path]) -> None:
    plan = plan_model(make_config(DEEPSEEK_V3), hardware="h200", options=PlanOptions(gpus=8))
    assert plan.counts.total == 671_026_419_200  # what its authors publish, 671B and 37B
    assert plan.counts.active == 37_552_297_472
    latent = 61 * (512 + 64) * 2
    assert plan.caches[0].per_token == latent
    assert plan.caches[0].device == 4096 * latent


def test_planning_imports_no_torch(llama_70b: Path) -> None:
    code = (
        "import sys, minifloat; "
        f"minifloat.plan_model({str(llama_70b)!r}, hardware='h100'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_plan_is_json(llama_70b: Path) -> None:
    plan = json.loads(json.dumps(plan_model(llama_70b, hardware="b200", options=PlanOptions(gpus=2)).to_dict()))
    assert plan["hardware"]["peaks"] == {"BF16": 2250e12, "E4M3": 4500e12, "E2M1": 9000e12}
    assert plan["schemes"][0]["decode"]["tokens_per_second"] > 0
    assert any("--linear-backend marlin" in note for note in plan["notes"])


def test_notes_name_what_the_figures_leave_out(make_config: Callable[..., Path]) -> None:
    folder = make_config(LLAMA_70B, quantization_config={"quant_method": "fp8"})
    plan = plan_model(folder, hardware="h100", options=PlanOptions(gpus=2))
    for words in ("No weights here", "declares weights in fp8", "Communication"):
        assert any(words in note for note in plan.notes)


def test_codes_of_four_bits_are_chosen_with_data(llama_70b: Path) -> None:
    (four,) = [s for s in plan_model(llama_70b, "mxfp4", "h100", PlanOptions(gpus=2)).schemes if s.scheme == "mxfp4"]
    assert four.commands[0] == f"minifloat quantize {llama_70b} OUT --scheme mxfp4 --data self"


def test_commands_make_and_serve_the_checkpoint(llama_70b: Path) -> None:
    plan = plan_model(llama_70b, "fp8-static", "h100", PlanOptions(gpus=2, context=8192, batch=4, kv_cache_dtype="fp8"))
    assert plan.schemes[-1].commands == (
        f"minifloat quantize {llama_70b} OUT --scheme fp8-static --calibration TEXT --kv-cache fp8",
        "minifloat serve OUT --engine vllm --tensor-parallel-size 2 --max-model-len 8192 --max-num-seqs 4 "
        "--kv-cache-dtype fp8 -- --gpu-memory-utilization 0.9",
    )
