"""Text that the model itself writes: its distribution, its determinism, its file, and its place among the sources."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from minifloat.calibration import own_text
from minifloat.calibration.calibrate import calibrate, load_texts
from minifloat.calibration.data import CalibrationSet, load_calibration_data
from minifloat.calibration.options import TextOptions
from minifloat.calibration.own_text import read_token_file, write_own_text
from minifloat.checkpoint import Checkpoint
from minifloat.commands.main import main
from minifloat.errors import AlreadyQuantizedError, CheckpointError, DataError, StatsError, UnknownNameError, UsageError
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize import own_text as own_text_first
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.planner import PlannedRun
from minifloat.quantize.write import write_run

BOS, EOS = 256, 257
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"


@pytest.fixture
def copy(llama_folder: Path, tmp_path: Path) -> Path:
    """A model of its own that a test may change."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def write(folder: Path, samples: int = 6, seq_len: int = 24, seed: int = 0, **options: Any) -> CalibrationSet:
    text = TextOptions(samples=samples, seq_len=seq_len, seed=seed)
    with Checkpoint.open(folder) as checkpoint:
        return write_own_text(checkpoint, load_tokenizer(folder), text, **options)


def edit_tokenizer(folder: Path, **values: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def begins_with_bos(folder: Path) -> Path:
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every later use of the engine an error."""

    def forbid() -> None:
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("the model was run")

        monkeypatch.setattr(own_text, "Engine", refuse)

    return forbid


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------- the text


def test_sequences_begin_with_a_random_token_that_is_not_special(llama_folder: Path) -> None:
    written = write(llama_folder, samples=40, seq_len=3)
    assert {len(sequence) for sequence in written.sequences} == {3}
    first = {sequence[0] for sequence in written.sequences}
    assert len(first) > 30
    assert max(first) < BOS


def test_bos_comes_first_if_the_tokenizer_begins_texts_with_it(copy: Path) -> None:
    written = write(begins_with_bos(copy))
    assert {sequence[0] for sequence in written.sequences} == {BOS}
    assert all(sequence[1] < BOS for sequence in written.sequences)
    assert {len(sequence) for sequence in written.sequences} == {24}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_negative_log_likelihood_of_the_text_is_the_entropy_of_the_model(
    dtype: str, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_llama(tmp_path / "model", dtype=dtype, initializer_range=0.3)
    tokens = torch.tensor(write(folder, samples=96, seq_len=48).sequences)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = model(tokens).logits[:, :-1].double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    differences = -logprobs.gather(-1, tokens[:, 1:, None])[..., 0] - entropy
    assert 0.5 < entropy.mean() < math.log(288) - 0.5  # neither certain nor uniform
    # The differences at the positions of a sequence are a martingale, so their variances add up.
    assert abs(float(differences.mean())) < 4 * float(differences.std()) / math.sqrt(differences.numel())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_batches_do_not_change_the_text(
    dtype: str, make_llama: Callable[..., Path], tmp_path: Path, threads: Callable[[int], None]
) -> None:
    folder = make_llama(tmp_path / "model", dtype=dtype)
    texts = set()
    for number in (1, 2):
        threads(number)
        texts |= {write(folder, samples=8, max_num_seqs=together).sequences for together in (1, 3, 8)}
    (text,) = texts
    assert [sequence[0] for sequence in text[:3]] == [87, 193, 197]


def test_another_number_of_sequences_keeps_the_first_ones_and_another_seed_none(llama_folder: Path) -> None:
    written = write(llama_folder, samples=6).sequences
    assert write(llama_folder, samples=3).sequences == written[:3]
    assert not set(write(llama_folder, samples=6, seed=1).sequences) & set(written)


def test_a_model_that_only_transformers_runs_writes_text(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama4_text")
    written = write(folder, samples=2, seq_len=6)
    assert [len(sequence) for sequence in written.sequences] == [6, 6]
    assert written.record["sources"][0]["weights"]["runner"] == "transformers"


def test_progress_counts_tokens(llama_folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    write(llama_folder, samples=3, seq_len=8, max_num_seqs=2, progress=lambda *call: calls.append(call))
    assert calls[-1] == (24, 24, "writing calibration text")
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)


# ------------------------------------------------------------------------------------------------- chat templates


def test_every_second_sequence_of_a_chat_model_begins_with_the_users_turn(copy: Path) -> None:
    written = write(begins_with_bos(edit_tokenizer(copy, chat_template=TEMPLATE)))
    user = (BOS, *load_tokenizer(copy)("[user]", add_special_tokens=False).input_ids)
    assert [sequence[: len(user)] == user for sequence in written.sequences] == [False, True] * 3
    assert len({sequence[len(user) :] for sequence in written.sequences}) == 6
    assert written.record["sources"][0]["chat"] == {"sequences": 3}


@pytest.mark.parametrize(
    ("template", "note"),
    [
        ("{{ raise_exception('no users here') }}", "refuses the messages: no users here"),
        ("[user] {{ messages[0].content | lower }}", "does not render the content"),
        ("{{ messages[0].content }}", "nothing before the content"),
        ("a very long system prompt{{ messages[0].content }}", "takes 25 of 24 tokens"),
    ],
)
def test_a_template_that_cannot_serve_is_noted_and_the_text_is_plain(
    template: str, note: str, copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write(copy).sequences
    written = write(edit_tokenizer(copy, chat_template=template))
    chat = written.record["sources"][0]["chat"]
    assert written.sequences == plain
    assert chat["sequences"] == 0
    assert note in chat["note"]
    assert note in caplog.text


# ------------------------------------------------------------------------------------------------- the token file


def test_a_file_is_used_again_and_a_longer_text_continues_it(
    llama_folder: Path, tmp_path: Path, no_engine: Callable[[], None]
) -> None:
    file = tmp_path / "text.safetensors"
    whole = write(llama_folder, samples=6)
    assert write(llama_folder, samples=4, file=file).sequences == whole.sequences[:4]
    assert write(llama_folder, samples=6, file=file) == whole
    no_engine()
    assert write(llama_folder, samples=6, file=file) == whole
    assert write(llama_folder, samples=2, file=file).sequences == whole.sequences[:2]
    assert [path.name for path in tmp_path.iterdir()] == ["text.safetensors"]


def test_an_interrupted_run_continues_after_the_last_saved_batch(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.safetensors"
    monkeypatch.setattr(own_text, "_SAVE_SECONDS", 0.0)

    def interrupt(done: int, _: int, __: str) -> None:
        if done > 3 * 24:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(llama_folder, max_num_seqs=2, file=file, progress=interrupt)
    text = read_token_file(file)
    assert text is not None
    assert len(text.tokens) == 2
    done: list[int] = []
    continued = write(llama_folder, file=file, progress=lambda count, *_: done.append(count))
    assert continued == write(llama_folder)
    assert min(done) >= 2 * 24


def test_text_of_another_model_or_other_settings_is_written_again_and_the_log_says_why(
    llama_folder: Path, make_llama: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "text.safetensors"
    other = make_llama(tmp_path / "other", seed=1)
    for reason, folder, options in (
        ("", llama_folder, {}),
        ("the seed", llama_folder, {"seed": 1}),
        ("the tokens of a sequence", llama_folder, {"seq_len": 12, "seed": 1}),
        ("the values of the weights", other, {"seq_len": 12, "seed": 1}),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert write(folder, file=file, **options) == write(folder, **options)
        assert ("written again, because it differs in " + reason in caplog.text) == bool(reason)


def test_files_that_hold_something_else_or_are_damaged_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.safetensors"
    shutil.copy(llama_folder / "model.safetensors", file)
    with pytest.raises(StatsError, match="no text that a model wrote"):
        write(llama_folder, file=file)
    file.unlink()
    write(llama_folder, file=file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StatsError, match=r"SHA-256; .*delete the file"):
        write(llama_folder, file=file)
    file.write_bytes(bytes(content).replace(b'"version":"2"', b'"version":"9"'))
    with pytest.raises(StatsError, match="version '9'"):
        write(llama_folder, file=file)


# ------------------------------------------------------------------------------------------------- short memory


def test_a_copy_writes_the_text_where_memory_is_short(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "available_memory", lambda _: 1000)
    with pytest.raises(UsageError, match="1,000 bytes of memory are available"):
        write(llama_folder)
    copies: list[Path] = []

    def counted(run: PlannedRun, source: Path, folder: Path) -> object:
        copies.append(folder)
        return write_run(run, source, folder)

    monkeypatch.setattr(own_text_first, "write_run", counted)
    text = TextOptions(6, 24, held_out=0.0)
    file = tmp_path / "text.safetensors"
    with Checkpoint.open(llama_folder) as checkpoint:
        written = own_text_first.prepare_texts(checkpoint, ["self"], text, file)
        assert written.record["sources"][0]["weights"]["scheme"] == "fp8"
        assert own_text_first.prepare_texts(checkpoint, ["self"], text, file) == written
    assert len(copies) == 1
    assert list(tmp_path.iterdir()) == [file]


# ------------------------------------------------------------------------------------------------- bad requests


def test_bad_requests_are_refused(llama_folder: Path, copy: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="129 tokens, but the model has 128 positions"):
        write(llama_folder, seq_len=129)
    with pytest.raises(DataError, match="expected seq_len >= 3; got 2"):
        write(begins_with_bos(Path(shutil.copytree(llama_folder, tmp_path / "bos"))), seq_len=2)
    for options in ({"samples": 0}, {"seq_len": 1}):
        with pytest.raises(UsageError, match=next(iter(options))):
            write(llama_folder, **options)
    quantize_checkpoint(llama_folder, tmp_path / "quantized", "fp8")
    with pytest.raises(AlreadyQuantizedError):
        write(tmp_path / "quantized")
    tokenizer: Any = load_tokenizer(copy)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokenizer.get_vocab())})
    tokenizer.save_pretrained(copy)
    with pytest.raises(DataError, match="no token to begin with"):
        write(copy)


def test_a_model_with_nan_is_refused(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_llama(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"own text: sequence 0: .*not finite"):
        write(folder, samples=1)


# ------------------------------------------------------------------------------------------------- among the sources


def test_the_models_own_text_is_mixed_with_other_sources_by_weight(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"line {number} of a text" for number in range(100)))
    options = TextOptions(samples=8, seq_len=16)
    with Checkpoint.open(llama_folder) as checkpoint:
        mixed = load_texts(checkpoint, ["self#weight=3", text], options)
    own = write(llama_folder, samples=6, seq_len=16)
    real = load_calibration_data(text, load_tokenizer(llama_folder), TextOptions(samples=8, seq_len=16))
    assert {*own.sequences} <= {*mixed.sequences}
    assert len({*mixed.sequences} - {*own.sequences}) == 2
    (first, second) = mixed.record["sources"]
    assert (first["name"], first["kind"], first["weight"], first["sequences"]) == ("self", "self", 3.0, 6)
    assert (second["kind"], second["sequences"]) == ("txt", 2)
    assert mixed.record.keys() == real.record.keys() == own.record.keys()


def test_a_file_or_folder_called_self_is_given_as_a_path(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("self").mkdir()
    Path("self/text.txt").write_text("many words " * 100)
    with Checkpoint.open(llama_folder.absolute()) as checkpoint:
        for source in ("./self", Path("self")):
            loaded = load_texts(checkpoint, source, TextOptions(samples=2, seq_len=8))
            assert loaded.record["sources"][0]["kind"] == "folder"


def test_odd_ways_to_ask_for_own_text_are_refused(llama_folder: Path) -> None:
    def load(*sources: str) -> None:
        with Checkpoint.open(llama_folder) as checkpoint:
            load_texts(checkpoint, sources, TextOptions(samples=2, seq_len=8))

    with pytest.raises(DataError, match="given more than once"):
        load("self", "self#weight=2")
    with pytest.raises(DataError, match=r"no column, config or split; .* \./self"):
        load("self#column=text")
    with pytest.raises(UnknownNameError):
        load("self#seed=1")
    with pytest.raises(DataError, match="serves calibration only"):
        load_calibration_data("self", load_tokenizer(llama_folder), TextOptions(samples=2, seq_len=8))


@pytest.mark.parametrize("max_memory", [None, 300_000], ids=["whole model", "layer by layer"])
def test_statistics_of_own_text_are_collected(max_memory: int | None, llama_folder: Path) -> None:
    from minifloat.calibration.options import CalibrateOptions

    collected = calibrate(llama_folder, "self", CalibrateOptions(samples=4, seq_len=8, max_memory=max_memory))
    assert collected.stats.sequences == 3
    assert collected.stats.data["sources"][0]["name"] == "self"


def test_calibrate_keeps_the_text_beside_the_statistics(llama_folder: Path, tmp_path: Path) -> None:
    arguments = ["calibrate", str(llama_folder), str(tmp_path / "a.safetensors"), "--data", "self", "--samples", "4"]
    result = CliRunner().invoke(main, [*arguments, "--seq-len", "8"])
    assert result.exit_code == 0, result.output
    assert "self: kind self, weight 1.000, sequences 4, tokens 32" in " ".join(result.output.split())
    text = read_token_file(tmp_path / f"{llama_folder.name}.self-text-8.safetensors")
    assert text is not None
    assert np.array_equal(text.tokens, np.array(write(llama_folder, samples=4, seq_len=8).sequences))


def test_every_command_keeps_the_text_of_a_model_in_one_file(llama_folder: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> set[str]:
        result = CliRunner().invoke(main, [*arguments, "--no-report"] if "--scheme" in arguments else [*arguments])
        assert result.exit_code == 0, result.output
        return {path.name for path in tmp_path.iterdir() if path.is_file()}

    model, text = str(llama_folder), f"{llama_folder.name}.self-text-16.safetensors"
    sizes, scheme = ("--calibration-samples", "30", "--calibration-seq-len", "16"), ("--scheme", "fp8-static")
    files = run("calibrate", model, str(tmp_path / "a"), "--data", "self", "--samples", "30", "--seq-len", "16")
    assert {text} == {name for name in files if "self" in name}
    written = (tmp_path / text).read_bytes()
    assert run("quantize", model, str(tmp_path / "b"), *scheme, "--calibration", "self", *sizes) == files
    assert run("quantize", model, str(tmp_path / "c"), *scheme, "--data", "self", *sizes) == files
    longer = run("calibrate", model, str(tmp_path / "d"), "--data", "self", "--samples", "30", "--seq-len", "24")
    assert f"{llama_folder.name}.self-text-24.safetensors" in longer
    assert (tmp_path / text).read_bytes() == written


def test_a_model_without_a_tokenizer_writes_its_text(copy: Path, tmp_path: Path) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with Checkpoint.open(copy) as checkpoint:
        loaded = load_texts(checkpoint, "self", TextOptions(samples=8, seq_len=12))
        with pytest.raises(CheckpointError, match="tokenizer"):
            load_texts(checkpoint, ["self", tmp_path], TextOptions(samples=8, seq_len=12))
    assert {sequence[0] for sequence in loaded.sequences} == {BOS}
    assert not {sequence[1] for sequence in loaded.sequences} & {BOS, EOS}
    assert {len(sequence) for sequence in loaded.sequences} == {12}
