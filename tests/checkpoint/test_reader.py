from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.reader import READ_AHEAD_BYTES
from minifloat.errors import (
    CheckpointError,
    ConfigError,
    NotACheckpointError,
    ShardIndexError,
    StorageError,
    UnsafeFileError,
)

ARRAYS = {
    "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
    "i64": np.array([-1, 2**40], dtype=np.int64),
    "flag": np.array([True, False]),
    "scalar": np.array(7, dtype=np.int16),
    "empty": np.zeros((0, 5), dtype=np.float16),
}


@pytest.fixture
def folder(model):
    return model({"model.safetensors": safetensors.numpy.save(ARRAYS, {"format": "np"})})


def test_files_of_the_safetensors_package_are_read_bit_for_bit(folder):
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(ARRAYS)
        for name, array in ARRAYS.items():
            info = checkpoint.tensors[name]
            assert info.shape == array.shape
            assert info.nbytes == array.nbytes
            assert checkpoint.read(name).tobytes() == array.tobytes()
        assert checkpoint.tensors["f32"].dtype == "F32"
        assert checkpoint.metadata == {"model.safetensors": {"format": "np"}}
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.shards == ("model.safetensors",)
        assert checkpoint.ignored_files == ()
        assert checkpoint.quantization_config is None
        assert checkpoint.shard_path("model.safetensors") == folder.resolve() / "model.safetensors"


def test_a_part_of_a_tensor_is_read_into_the_callers_memory(folder):
    with Checkpoint.open(folder) as checkpoint:
        row = np.full(16, 0xFF, dtype=np.uint8)
        checkpoint.read_into(checkpoint.tensors["f32"], row, start=16)
        assert row.view(np.float32).tolist() == [4.0, 5.0, 6.0, 7.0]
        two_rows = np.empty((2, 16), dtype=np.uint8)
        checkpoint.read_into(checkpoint.tensors["f32"], memoryview(two_rows), start=16)
        assert two_rows.tobytes() == ARRAYS["f32"][1:].tobytes()


@pytest.mark.parametrize(("size", "start"), [(49, 0), (1, 48), (4, -1)])
def test_a_range_outside_the_tensor_is_refused(folder, size, start):
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ValueError, match="of a tensor of 48"):
        checkpoint.read_into(checkpoint.tensors["f32"], np.empty(size, np.uint8), start)


def test_many_threads_read_at_once(model):
    arrays = {f"t{i}": np.random.default_rng(i).integers(0, 256, 50_000, dtype=np.uint8) for i in range(16)}
    weight_map = {name: f"model-{i % 4}.safetensors" for i, name in enumerate(arrays)}
    files = {
        shard: safetensors.numpy.save({n: arrays[n] for n in arrays if weight_map[n] == shard})
        for shard in set(weight_map.values())
    }
    folder = model(files | {"model.safetensors.index.json": {"weight_map": weight_map}})
    wrong = []
    with Checkpoint.open(folder) as checkpoint:

        def work(seed):
            for name in np.random.default_rng(seed).permutation(sorted(arrays)):
                if not np.array_equal(checkpoint.read(str(name)), arrays[str(name)]):
                    wrong.append(name)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_closed_checkpoint_does_not_read(folder):
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.read("f32")
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("f32")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts the descriptors in /proc")
def test_files_are_opened_only_when_a_tensor_is_read(folder):
    def descriptors():
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    before = descriptors()
    checkpoint = Checkpoint.open(folder)
    assert descriptors() == before
    checkpoint.read("f32")
    checkpoint.read("i64")
    assert descriptors() == before + 1
    checkpoint.close()
    assert descriptors() == before


def test_a_file_that_changed_since_it_was_opened_is_refused(folder):
    with Checkpoint.open(folder) as checkpoint:
        os.utime(folder / "model.safetensors", ns=(1, 1))
        with pytest.raises(StorageError, match=r"model\.safetensors: the file changed"):
            checkpoint.read("f32")


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_names_it(folder):
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.read("f32")
        os.truncate(folder / "model.safetensors", 100)
        with pytest.raises(StorageError, match=r"model\.safetensors: the file ends"):
            checkpoint.read("f32")


def test_a_file_that_was_deleted_is_an_error_that_names_it(folder):
    with Checkpoint.open(folder) as checkpoint:
        (folder / "model.safetensors").unlink()
        with pytest.raises(StorageError, match=r"model\.safetensors: cannot open"):
            checkpoint.read("f32")


def test_a_failing_disk_is_an_error_that_names_the_file(folder, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    with Checkpoint.open(folder) as checkpoint:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StorageError, match=r"model\.safetensors: cannot read: Input/output error; the disk"):
            checkpoint.read("f32")


# Folders that are not checkpoints


def test_a_missing_folder_is_not_a_checkpoint(tmp_path):
    with pytest.raises(NotACheckpointError, match="no such folder; download"):
        Checkpoint.open(tmp_path / "none")


def test_a_file_is_not_a_checkpoint(folder):
    with pytest.raises(NotACheckpointError, match="not a folder"):
        Checkpoint.open(folder / "model.safetensors")


def test_a_path_with_a_nul_is_not_a_checkpoint():
    with pytest.raises(NotACheckpointError, match="not a usable path"):
        Checkpoint.open("a\0b")


def test_a_loop_of_links_is_not_a_checkpoint(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(NotACheckpointError):
        Checkpoint.open(tmp_path / "a")


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({"model.safetensors": b""}, False, "no config.json"),
        ({"snapshots/abc": b""}, False, "snapshots/REVISION"),
        ({}, None, "no .safetensors file"),
        ({"minifloat-journal.jsonl": b"{}"}, None, "interrupted minifloat output; run the same command again"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(model, files, config, message):
    with pytest.raises(NotACheckpointError, match=re.escape(message)):
        Checkpoint.open(model(files, config=config))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.CKPT"])
def test_pickle_files_are_refused_with_the_way_to_convert_them(model, name):
    with pytest.raises(UnsafeFileError, match="save_pretrained"):
        Checkpoint.open(model({name: b"\x80\x02."}))


def test_a_folder_inside_an_unfinished_output_is_refused(model, shard):
    inner = model({"model.safetensors": shard("a")})
    (inner.parent / "minifloat-journal.jsonl").write_text("{}")
    with pytest.raises(NotACheckpointError, match="interrupted"):
        Checkpoint.open(inner)


# config.json


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b" " * (16 * 2**20) + b"{}", "are credible"),
        (b'{"quantization_config": "fp8"}', "quantization_config: expected an object"),
    ],
    ids=["empty", "cut", "list", "null", "utf-16", "huge integer", "deep", "large", "quantization as text"],
)
def test_an_invalid_config_is_refused(model, shard, content, message):
    folder = model({"model.safetensors": shard("a"), "config.json": content})
    with pytest.raises(ConfigError, match=message):
        Checkpoint.open(folder)


def test_infinity_in_a_config_is_read_because_real_models_have_it(model, shard):
    folder = model({"model.safetensors": shard("a"), "config.json": b'{"time_step_limit": [0.0, Infinity]}'})
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config["time_step_limit"][1] == float("inf")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_the_quantization_config_is_found_in_the_places_that_servers_search(model, shard, config):
    with Checkpoint.open(model({"model.safetensors": shard("a")}, config=config)) as checkpoint:
        assert checkpoint.quantization_config == {"quant_method": "fp8"}


def test_the_quantization_config_of_modelopt_is_found_in_its_own_file(model, shard):
    with Checkpoint.open(model({"model.safetensors": shard("a"), "hf_quant_config.json": {"quantization": {}}})) as c:
        assert c.quantization_config == {"quantization": {}}


# Index


def index(**weight_map):
    return {"model.safetensors.index.json": {"metadata": {"total_size": 2}, "weight_map": weight_map}}


def test_a_sharded_model_is_read_through_its_index(model, shard):
    files = {"m-1.safetensors": shard("b", "a"), "m-2.safetensors": shard("c")}
    folder = model(files | index(a="m-1.safetensors", c="m-2.safetensors", b="m-1.safetensors"))
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["b", "a", "c"]
        assert checkpoint.shards == ("m-1.safetensors", "m-2.safetensors")
        assert checkpoint.read("a").tolist() == [2]


def test_weights_that_the_index_does_not_name_are_ignored_by_name(model, shard):
    files = {"m-1.safetensors": shard("a"), "consolidated.safetensors": b"junk", "training_args.bin": b""}
    with Checkpoint.open(model(files | index(a="m-1.safetensors"))) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]
        assert checkpoint.ignored_files == ("consolidated.safetensors", "training_args.bin")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}", "no weight_map"),
        (b'{"weight_map": []}', "no weight_map"),
        (b'{"weight_map": {}}', "no weight_map"),
        (b'{"weight_map": {"a": 1}}', "expected a file name, found int"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is declared twice"),
        (b'{"weight_map": {"a": "m-2.safetensors"}}', "1 of 1 shards are missing, the first is 'm-2.safetensors'"),
        (b'{"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}}', "'b' should be in m-1.safetensors"),
    ],
)
def test_an_invalid_index_is_refused(model, shard, content, message):
    folder = model({"m-1.safetensors": shard("a"), "model.safetensors.index.json": content})
    with pytest.raises(ShardIndexError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "..",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "a\0.safetensors",
        "",
        "model.bin",
        "model.safetensors.index.json",
    ],
)
def test_a_shard_name_that_leads_out_of_the_folder_is_refused(model, shard, name):
    folder = model({"m-1.safetensors": shard("a")} | index(a=name))
    (folder.parent / "model.safetensors").write_bytes(shard("a"))
    with pytest.raises(UnsafeFileError, match="shard name"):
        Checkpoint.open(folder)


def test_a_single_file_of_any_name_is_the_model(model, shard):
    with Checkpoint.open(model({"weights.safetensors": shard("a")})) as checkpoint:
        assert checkpoint.shards == ("weights.safetensors",)


def test_without_an_index_model_safetensors_is_the_model_and_other_files_are_ignored(model, shard):
    folder = model({"model.safetensors": shard("a"), "consolidated.safetensors": shard("b")})
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.shards == ("model.safetensors",)
        assert checkpoint.ignored_files == ("consolidated.safetensors",)


@pytest.mark.parametrize(
    ("files", "placed", "message"),
    [
        ({"m-1": "ab"}, {"a": "m-1"}, "m-1.safetensors holds tensor 'b', but the index does not name it"),
        ({"m-1": "a", "m-2": "b"}, {"a": "m-2", "b": "m-1"}, "m-1.safetensors holds tensor 'a', but the index says"),
        ({"m-1": "a", "m-2": "ab"}, {"a": "m-1", "b": "m-2"}, "m-2.safetensors holds tensor 'a', but the index says"),
        ({"m-1": "a", "model": "a"}, {"a": "m-1"}, "two models in one folder"),
        ({"some": "a", "other": "b"}, None, "2 .safetensors files but no model.safetensors.index.json"),
    ],
)
def test_shards_that_contradict_the_index_or_have_none_are_refused(model, shard, files, placed, message):
    shards = {f"{name}.safetensors": shard(*tensors) for name, tensors in files.items()}
    named = {} if placed is None else index(**{name: f"{file}.safetensors" for name, file in placed.items()})
    with pytest.raises(ShardIndexError, match=re.escape(message)):
        Checkpoint.open(model(shards | named))


# Links and files that are not regular


@pytest.fixture
def hub(tmp_path, shard):
    """A hub cache with two models, whose snapshots hold links to blobs."""
    for name in ("models--org--good", "models--org--other"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        snapshot = tmp_path / name / "snapshots" / "abc123"
        (snapshot / "additional_chat_templates").mkdir(parents=True)
        contents = {"config.json": b"{}", "model.safetensors": shard("a"), "tokenizer.json": b"[1]"}
        for file_name, content in contents.items():
            (tmp_path / name / "blobs" / f"hash-{file_name}").write_bytes(content)
            (snapshot / file_name).symlink_to(f"../../blobs/hash-{file_name}")
        (tmp_path / name / "blobs" / "hash-t").write_bytes(b"{{x}}")
        (snapshot / "additional_chat_templates" / "t.jinja").symlink_to("../../../blobs/hash-t")
    return tmp_path


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(hub):
    with Checkpoint.open(hub / "models--org--good" / "snapshots" / "abc123") as checkpoint:
        assert checkpoint.read("a").tolist() == [1]
        assert checkpoint.sidecars() == ("additional_chat_templates/t.jinja", "tokenizer.json")
        assert checkpoint.read_file("tokenizer.json") == b"[1]"
        assert checkpoint.read_file("additional_chat_templates/t.jinja") == b"{{x}}"


def test_a_link_to_a_snapshot_of_the_hub_cache_is_the_snapshot(hub):
    (hub / "short").symlink_to(hub / "models--org--good" / "snapshots" / "abc123")
    with Checkpoint.open(hub / "short") as checkpoint:
        assert checkpoint.read("a").tolist() == [1]


@pytest.mark.parametrize(
    "target",
    [
        "../../../models--org--other/blobs/hash-model.safetensors",
        "../../blobs/../secret",
        "../../blobs/sub/file",
        "/etc/hostname",
    ],
)
def test_a_link_out_of_the_blobs_of_the_same_model_is_refused(hub, shard, target):
    good = hub / "models--org--good"
    (good / "secret").write_bytes(shard("a"))
    (good / "blobs" / "sub").mkdir()
    (good / "blobs" / "sub" / "file").write_bytes(shard("a"))
    link = good / "snapshots" / "abc123" / "model.safetensors"
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        Checkpoint.open(link.parent)


def test_a_blob_that_is_itself_a_link_elsewhere_is_refused(hub, shard):
    (hub / "secret").write_bytes(shard("a"))
    blob = hub / "models--org--good" / "blobs" / "hash-model.safetensors"
    blob.unlink()
    blob.symlink_to(hub / "secret")
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        Checkpoint.open(hub / "models--org--good" / "snapshots" / "abc123")


def test_a_missing_blob_is_an_error_that_names_it(hub):
    (hub / "models--org--good" / "blobs" / "hash-model.safetensors").unlink()
    with pytest.raises(ShardIndexError, match="missing; download it again"):
        Checkpoint.open(hub / "models--org--good" / "snapshots" / "abc123")


def test_a_link_like_those_of_the_hub_cache_is_refused_outside_a_hub_cache(tmp_path, shard):
    folder = tmp_path / "project" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "project" / "blobs").mkdir()
    (tmp_path / "project" / "blobs" / "h").write_bytes(shard("a"))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to("../../blobs/h")
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_every_file_that_is_a_link_out_of_the_folder_is_refused(model, shard, tmp_path, name):
    folder = model({"model.safetensors": shard("a")})
    (tmp_path / "outside").write_bytes(b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        Checkpoint.open(folder)


def test_a_link_inside_the_folder_is_followed(model, shard):
    folder = model({"weights": shard("a")})
    (folder / "model.safetensors").symlink_to("weights")
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.read("a").tolist() == [1]


def test_a_link_to_itself_is_refused(model):
    folder = model()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_files_that_are_not_regular_are_refused_without_waiting(model, shard, name, kind):
    folder = model({"model.safetensors": shard("a")})
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UnsafeFileError, match="leaves the folder" if kind == "device" else "not a regular file"):
        Checkpoint.open(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_an_error_with_the_cure(folder):
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(StorageError, match="check the permissions"):
        Checkpoint.open(folder)


def test_a_refused_permission_is_an_error_with_the_cure(folder, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"config\.json: cannot open it: Permission denied; check the permissions"):
        Checkpoint.open(folder)


# Sidecars


def test_sidecars_are_the_files_that_a_model_needs_beside_its_weights(model, shard):
    carried = [
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "modeling_custom.py",
        "LICENSE",
        "License.txt",
        "NOTICE",
        "USE_POLICY.md",
        "additional_chat_templates/rag.jinja",
    ]
    left = ["README.md", "hf_quant_config.json", "params.json", "training_args.bin", "vocab.bin", ".gitattributes"]
    files = dict.fromkeys(carried + left, b"{}") | {".git/config": b"", "runs/tokenizer.json": b""}
    with Checkpoint.open(model(files | {"model.safetensors": shard("a")})) as checkpoint:
        assert checkpoint.sidecars() == tuple(sorted(carried))


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/x.jinja"])
def test_a_sidecar_that_links_out_of_the_folder_is_refused_before_the_work(model, shard, tmp_path, name):
    folder = model({"model.safetensors": shard("a"), "additional_chat_templates/y.jinja": b""})
    (tmp_path / "secret").write_text("secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(UnsafeFileError, match="leaves the folder"):
            checkpoint.sidecars()
        with pytest.raises(UnsafeFileError, match="leaves the folder"):
            checkpoint.read_file(name)


def test_a_fifo_named_like_a_sidecar_is_refused(model, shard):
    folder = model({"model.safetensors": shard("a")})
    os.mkfifo(folder / "tokenizer.json")
    with Checkpoint.open(folder) as checkpoint:
        with pytest.raises(UnsafeFileError, match="not a regular file"):
            checkpoint.sidecars()
        with pytest.raises(UnsafeFileError, match="not a regular file"):
            checkpoint.read_file("tokenizer.json")


@pytest.mark.parametrize("name", ["../config.json", "/etc/hostname", "", "a/../../b"])
def test_reading_a_file_outside_the_folder_is_refused(folder, name):
    with Checkpoint.open(folder) as checkpoint, pytest.raises(UnsafeFileError, match="leaves the folder"):
        checkpoint.read_file(name)


def test_a_sidecar_that_was_deleted_is_an_error_that_names_it(folder):
    with Checkpoint.open(folder) as checkpoint, pytest.raises(StorageError, match=r"tokenizer\.json: the file is gone"):
        checkpoint.read_file("tokenizer.json")


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such hint")
def test_the_system_is_told_what_will_be_read_next(folder, monkeypatch):
    hints = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, hint: hints.append((start, size, hint)))
    with Checkpoint.open(folder) as checkpoint:
        info = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
        checkpoint.read_into(info, np.empty(info.nbytes - 1, np.uint8), 1)
        checkpoint.read("empty")  # a size of zero would mean the rest of the file
    assert hints == [(info.offset + 1 + READ_AHEAD_BYTES, info.nbytes - 1, os.POSIX_FADV_WILLNEED)]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such hint")
def test_a_file_system_without_that_hint_is_read(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    with Checkpoint.open(folder) as checkpoint:
        name = next(iter(checkpoint.tensors))
        expected = checkpoint.read(name)
        monkeypatch.setattr(os, "posix_fadvise", refuse)
        np.testing.assert_array_equal(checkpoint.read(name), expected)
