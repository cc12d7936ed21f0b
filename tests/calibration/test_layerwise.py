"""Layer by layer the statistics are those of the whole model to the bit, also when the work was killed on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import damage_file, finished_in, forking_server, run_and_kill
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from minifloat.calibration.calibrate import calibrate_layerwise, calibrate_set
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise import storage
from minifloat.calibration.layerwise.calls import Capture, LayerCall, LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import DataError, DestinationError, NonFiniteError, UsageError
from minifloat.kernels import native
from minifloat.model.runtime.load import Loader

Make = Callable[..., Path]

ROOM = 1 << 30
OPTIONS = {"histogram": True, "per_channel": True}
_RANDOM = random.Random(0)
DATA = CalibrationSet(
    tuple(tuple(_RANDOM.randrange(256) for _ in range(length)) for length in (40, 40, 17, 64, 1)),
    {"sources": ["made up"]},
)

#: Kinds of models beyond those of conftest: what their config needs to be tiny, and to have what is to be tested.
ALTERNATING = {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": ALTERNATING,
    "gemma3_text": {**ALTERNATING, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96},
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 288,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "mamba": {},
}


def make(folder: Path, model_type: str) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 288}
    values = {**sizes, "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": None, **CONFIGS[model_type]}
    if model_type == "gpt_neox":
        del values["num_key_value_heads"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def layerwise(
    folder: Path, data: CalibrationSet = DATA, *, progress: Progress | None = None, **options: Any
) -> ActivationStats:
    run = CalibrateOptions(**options)
    with Checkpoint.open(folder) as checkpoint:
        return calibrate_layerwise(CalibrationModel(checkpoint, run), data, run, progress)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "minifloat.calibration.calibrate"]


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2", "gemma3_text", "opt"]
)
def test_the_statistics_are_those_of_the_whole_model_to_the_bit(
    make_model: Make, tmp_path: Path, model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    if model_type in CONFIGS:
        folder = make(tmp_path / "model", model_type)
    else:
        folder = make_model(tmp_path / "model", model_type)
    stats = layerwise(folder, DATA, max_memory=ROOM, **OPTIONS)
    assert stats == calibrate_set(folder, DATA, CalibrateOptions(**OPTIONS))
    assert stats.kv
    assert not warnings_of(caplog), "the whole model was calibrated instead"


def test_another_dtype_without_options_gives_the_statistics_of_the_whole_model(llama_folder: Path) -> None:
    layered = layerwise(llama_folder, DATA, max_memory=ROOM, dtype=torch.float32)
    assert layered == calibrate_set(llama_folder, DATA, CalibrateOptions(dtype=torch.float32))
    assert layered != calibrate_set(llama_folder, DATA)


def test_calibrate_runs_layer_by_layer_if_the_weights_exceed_the_memory(llama_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    stats = calibrate_set(
        llama_folder, DATA, CalibrateOptions(max_memory=140_000), progress=lambda *step: seen.append(step)
    )
    assert stats == calibrate_set(llama_folder, DATA)
    assert "layer 2 of 2" in seen[-1][2]
    assert seen[-1][0] == seen[-1][1] == 2 * DATA.tokens
    assert [done for done, _, _ in seen] == sorted({done for done, _, _ in seen})


def test_masks_beyond_the_memory_limit_of_arguments_are_read_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "model", "gemma2")
    expected = calibrate_set(folder, DATA, CalibrateOptions(**OPTIONS))
    reads = []
    plain = storage.TensorFile.read
    monkeypatch.setattr(storage, "ARGUMENT_BYTES", 0)
    monkeypatch.setattr(storage.TensorFile, "read", lambda file, slot: reads.append(file.path) or plain(file, slot))
    assert layerwise(folder, DATA, max_memory=ROOM, work_dir=tmp_path / "work", **OPTIONS) == expected
    assert tmp_path / "work" / "arguments.scratch" in reads


def test_equal_arguments_are_kept_once(tmp_path: Path) -> None:
    with storage.TensorFile(tmp_path / "file") as file:
        pool = storage.ArgumentPool(file, torch.device("cpu"))
        one, other = (
            pool.keep([LayerCall((), {"mask": torch.ones(3), "positions": (torch.zeros(2), 1)}, False)])
            for _ in range(2)
        )
        assert one[0] is other[0]
        changed = pool.keep([LayerCall((), {"mask": torch.zeros(3), "positions": (torch.zeros(2), 1)}, False)])
        assert changed[0] is not one[0]
        assert changed[0].kwargs["positions"][0] is one[0].kwargs["positions"][0]


def watch_weights(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of weights in memory each time a weight is placed."""
    sizes: list[int] = []
    plain = Loader.place

    def place(loader: Loader, assignment: Any) -> None:
        plain(loader, assignment)
        assert not assignment.target.startswith("lm_head"), "lm_head is not needed"
        real = {id(p): p.nbytes for p in loader.model.parameters() if not p.is_meta}
        sizes.append(sum(real.values()))

    monkeypatch.setattr(Loader, "place", place)
    return sizes


def test_weights_in_memory_never_exceed_the_limit_and_a_limit_one_byte_smaller_is_refused(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = watch_weights(monkeypatch)
    layerwise(llama_folder, DATA, max_memory=ROOM)
    largest = max(sizes)
    assert largest < sum(file.stat().st_size for file in llama_folder.glob("*.safetensors")) / 1.5
    layerwise(llama_folder, DATA, max_memory=largest)
    with pytest.raises(UsageError, match=r"model\.layers\.\d needs \d+ MiB"):
        layerwise(llama_folder, DATA, max_memory=largest - 1)


def test_experts_need_twice_their_memory_while_they_are_stacked(make_model: Make, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mixtral")
    layer = 2 * (4 * 3 * 64 * 96 + 64 * (64 + 32 + 32 + 64) + 4 * 64 + 2 * 64)
    stacked = 2 * 4 * 2 * 64 * 96
    layerwise(folder, DATA, max_memory=layer + stacked)
    with pytest.raises(UsageError, match=r"model\.layers\.0"):
        layerwise(folder, DATA, max_memory=layer + stacked - 1)


def test_embeddings_that_do_not_fit_are_refused_by_name(make_model: Make, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", vocab_size=3000)
    with pytest.raises(UsageError, match="embed_tokens"):
        layerwise(folder, DATA, max_memory=2 * 3000 * 64 - 1, work_dir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("model_type", "reason"), [("gemma3n_text", "share an object"), ("mamba", "no hidden states")])
def test_a_model_whose_layers_cannot_run_one_at_a_time_is_calibrated_whole_with_a_warning(
    tmp_path: Path, model_type: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(tmp_path / "model", model_type)
    stats = layerwise(folder, DATA, max_memory=ROOM, work_dir=tmp_path / "work")
    assert stats == calibrate_set(folder, DATA)
    [warning] = warnings_of(caplog)
    assert reason in warning
    assert "the whole model is loaded" in warning
    assert not (tmp_path / "work").exists()


class Decoder(nn.Module):
    """A minimal model for `Capture`; subclasses call its layers in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    @property
    def base_model(self) -> Decoder:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        hidden = input_ids[..., None].float().expand(*input_ids.shape, 4)
        return self.decode(hidden)

    def decode(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Indexed(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden_states=hidden)[0]
        return hidden


class Scaled(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden) * 2
        return hidden


class Dependent(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        first = hidden
        for layer in self.layers:
            hidden = layer(hidden, first=first.mean())
            first = hidden
        return hidden


class Caching(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            hidden = layer(hidden, shared=shared)
        return hidden


class Backwards(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return hidden


class Skipping(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        for layer in self.layers[:2]:
            hidden = layer(hidden)
        return hidden


class Peeking(Decoder):
    def decode(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
            if hidden.isnan().any():
                raise ValueError("NaN")
        return hidden


@pytest.mark.parametrize("cls", [Decoder, Indexed])
def test_hidden_states_may_be_returned_bare_or_first_in_a_tuple(cls: type[Decoder]) -> None:
    model: Any = cls()
    capture = Capture(model, model.layers)
    capture.check(torch.tensor([[1, 2]]))
    hidden, calls = capture.run(torch.tensor([[3, 4, 5]]))
    assert hidden[0, :, 0].tolist() == [3, 4, 5]
    assert len(calls) == 3
    assert all("forward" not in layer.__dict__ for layer in model.layers)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Scaled, "not what the layer before it returned"),
        (Dependent, "depend on what other layers computed"),
        (Caching, "share an object of class dict"),
        (Backwards, "not called once each, in order"),
        (Skipping, "not every layer is called"),
        (Peeking, "the model fails"),
    ],
)
def test_layers_that_cannot_run_one_at_a_time_are_detected(cls: type[Decoder], reason: str) -> None:
    model: Any = cls()
    with pytest.raises(LayersNotSeparableError, match=reason):
        Capture(model, model.layers).check(torch.tensor([[1, 2]]))
    assert all("forward" not in layer.__dict__ for layer in model.layers)


# ------------------------------------------------------------------------------------------------- interruption

SERVER = """
from minifloat.calibration.calibrate import calibrate_layerwise
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
def run(progress, model, work, data):
    options = CalibrateOptions(max_memory=1 << 30, histogram=True, per_channel=True, work_dir=work)
    with Checkpoint.open(model) as checkpoint:
        calibrate_layerwise(CalibrationModel(checkpoint, options), data, options, progress)
"""


@pytest.fixture(scope="module")
def deep_folder(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("deep") / "model", "llama", num_hidden_layers=10)


def test_a_run_killed_several_times_gives_the_same_statistics_and_runs_no_finished_layer_again(
    deep_folder: Path, tmp_path: Path
) -> None:
    expected = calibrate_set(deep_folder, DATA, CalibrateOptions(**OPTIONS))
    work, log = tmp_path / "work", tmp_path / "log"
    moments = random.Random(2026)
    resumed = 0
    with forking_server(SERVER, log, deep_folder, work, DATA, pause=0.01) as server:
        while (before := finished_in(work)) < 5:
            lines = run_and_kill(server, log, moments.randrange(1, 3 * len(DATA.sequences)))
            assert lines[0] == f"layer {before + 1} of 10, sequence 1"
            resumed += before > 0
    assert resumed
    left = finished_in(work)
    seen: list[str] = []
    stats = layerwise(
        deep_folder, DATA, max_memory=ROOM, work_dir=work, progress=lambda _, __, what: seen.append(what), **OPTIONS
    )
    assert stats == expected
    assert len(seen) == (10 - left) * len(DATA.sequences)
    assert not work.exists()


def interrupt(folder: Path, work: Path, layer: int, data: CalibrationSet = DATA, **options: Any) -> None:
    """Raise KeyboardInterrupt in the middle of a layer."""

    def progress(_: int, __: int, what: str) -> None:
        if what.startswith(f"layer {layer} ") and what.endswith("sequence 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layerwise(folder, data, max_memory=ROOM, work_dir=work, progress=progress, **options)


def layers_run(folder: Path, work: Path, data: CalibrationSet = DATA, **options: Any) -> tuple[set[str], Any]:
    seen: set[str] = set()
    stats = layerwise(
        folder,
        data,
        max_memory=ROOM,
        work_dir=work,
        progress=lambda _, __, what: seen.add(what.split(",")[0]),
        **options,
    )
    return seen, stats


def test_ctrl_c_keeps_the_finished_layers(deep_folder: Path, tmp_path: Path) -> None:
    interrupt(deep_folder, tmp_path / "work", 4)
    seen, stats = layers_run(deep_folder, tmp_path / "work")
    assert seen == {f"layer {number} of 10" for number in range(4, 11)}
    assert stats == calibrate_set(deep_folder, DATA)


@pytest.mark.parametrize("change", ["data", "options", "dtype", "weights"])
def test_work_with_other_data_options_or_weights_is_not_continued(
    make_model: Make, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model(tmp_path / "model", "llama")
    interrupt(folder, tmp_path / "work", 2)
    data, options = DATA, {}
    if change == "data":
        data = CalibrationSet((*DATA.sequences[:-1], (7,)), DATA.record)
    elif change == "options":
        options = {"histogram": True}
    elif change == "dtype":
        options = {"dtype": torch.float32}
    else:
        make_model(folder, "llama", seed=1)
    seen, stats = layers_run(folder, tmp_path / "work", data, **options)
    assert seen == {"layer 1 of 2", "layer 2 of 2"}
    assert stats == calibrate_set(folder, data, CalibrateOptions(**options))
    assert any("not continued" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("file", ["layer-1.safetensors", "hidden-3"])
@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "gone"])
def test_damaged_work_is_done_again(
    deep_folder: Path, tmp_path: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = tmp_path / "work"
    interrupt(deep_folder, work, 4)
    damage_file(work / file, damage)
    assert (work / file).exists() == (damage != "gone")
    seen, stats = layers_run(deep_folder, work)
    assert len(seen) == 10
    assert ("were written: check the disk. It is computed again" in caplog.text) == (damage != "gone")
    assert stats == calibrate_set(deep_folder, DATA)
    assert not work.exists()


def test_a_work_folder_with_other_files_is_refused_and_not_changed(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DestinationError, match=r"thesis\.txt"):
        layerwise(llama_folder, DATA, max_memory=ROOM, work_dir=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_second_run_in_the_same_work_folder_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    def progress(*_: object) -> None:
        with pytest.raises(DestinationError, match="is writing here"):
            layerwise(llama_folder, DATA, max_memory=ROOM, work_dir=tmp_path / "work")

    layerwise(llama_folder, DATA, max_memory=ROOM, work_dir=tmp_path / "work", progress=progress)


# ------------------------------------------------------------------------------------------------- errors


def test_nan_in_an_activation_is_refused_with_module_and_sequence(make_model: Make, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.embed_tokens.weight[DATA.sequences[2][3]] = torch.nan
    model.save_pretrained(folder)
    first = next(i for i, ids in enumerate(DATA.sequences) if DATA.sequences[2][3] in ids)
    with pytest.raises(NonFiniteError, match=rf"model\.layers\.0\..* in sequence {first};"):
        layerwise(folder, DATA, max_memory=ROOM)


def test_bad_data_is_refused_before_anything_runs(llama_folder: Path, tmp_path: Path) -> None:
    for sequences in ((), ((1, 2), ()), ((1, 288),)):
        with pytest.raises(DataError):
            layerwise(llama_folder, CalibrationSet(sequences), max_memory=ROOM, work_dir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("library", [True, False], ids=["library", "torch"])
def test_logits_of_a_model_in_16_bits_are_not_rounded(
    make_llama: Make, tmp_path: Path, dtype: torch.dtype, library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not library:
        monkeypatch.setattr(native, "load", lambda: None)
    folder, states = make_llama(tmp_path / "llama"), list[Tensor]()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with Checkpoint.open(folder) as checkpoint, storage.TensorFile(tmp_path / "calls") as calls:
        model = CalibrationModel(checkpoint, CalibrateOptions(dtype=dtype))
        stack = LayerStack(model, model.loader(), None)
        pool = storage.ArgumentPool(calls, stack.device)
        batch = DATA.sequences[:2]
        stack.capture([batch], pool, lambda _, hidden: states.append(hidden))
        with stack.logits_in_float32():
            found = [list(logits) for logits in stack.logits_of(batch, states)]
    with torch.inference_mode():
        expected = whole.model.norm(states[0]).float() @ whole.lm_head.weight.float().T
    for [logits], wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
