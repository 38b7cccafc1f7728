"""Sources that cannot be converted: one line names the file, the value and the rule, before any work."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_ft.cli import main
from moe_ft.convert.conversion import open_model
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.test_config_file import CONFIG
from tests.unit.moe_ft.convert.test_megatron_checkpoint import TENSORS, save
from tests.unit.moe_ft.convert.test_torch_metadata import Payload, saved

_REFUSED = 2  # exit code
NAMES = {f"t{number}": [16, 8] for number in range(4)}
PIPE = "must be a regular file, but is a named pipe"
INDEXES: list[tuple[Any, str]] = [
    (["a"], "has a weight_map that is a list"),
    ({"a": 5}, "names the file 5, but may only name files of its own folder"),
    ({"a": "/etc/passwd"}, "names the file '/etc/passwd', but may only name files"),
    ({"a": "../../etc/hostname"}, "names the file '../../etc/hostname', but may only"),
    ({"a": "pipe"}, "pipe must be a regular file, but is a named pipe"),
    ({"a": "link"}, "link is a link to /etc/hostname, but must stay"),
    ({"t0": "gone"}, "gone cannot be read"),
]
FILES: list[tuple[str, Any, str]] = [
    (
        "config.json",
        {**CONFIG, "num_hidden_layers": 10**8},
        "config.json has num_hidden_layers=100000000, and it must be at most 4",
    ),
    ("config.json", b"[" * 200_000, "config.json is no JSON: maximum recursion"),
    ("model.safetensors.index.json", os.mkfifo, PIPE),
    ("generation_config.json", os.mkfifo, PIPE),
    ("model.safetensors", os.mkfifo, PIPE),
    ("model.safetensors", struct.pack("<Q", 1 << 60), f"its header has {1 << 60} bytes"),
    ("model.safetensors", b"\x09" + b"\0" * 7 + b"[" * 9, "model.safetensors cannot be read"),
]
# Each with how the message shows it.
TRACKERS = [
    (b"", "''"),
    (b"latest", "'latest'"),
    (b"-5", "'-5'"),
    (b"../../etc", "'../../etc'"),
    (b"\xff\xfe", "'\ufffd\ufffd'"),
    (b"9" * 400, f"'{'9' * 59}"),
]


def write(path: Path, content: Any) -> None:
    """Write a file, or make what is no file."""
    path.unlink(missing_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return a folder with a small model, whose tensors have other names than they should."""
    folder = tmp_path / "model"
    folder.mkdir()
    each = 16 * 8 * 4
    tensors = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [each * at, each * (at + 1)]}
        for at, (name, shape) in enumerate(NAMES.items())
    }
    header = json.dumps(tensors).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(each * len(NAMES))
    write(folder / "model.safetensors", content)
    write(folder / "config.json", CONFIG)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/etc/hostname")
    return folder


def refusal(capsys: pytest.CaptureFixture[str], source: Path | str, *flags: str) -> str:
    """Convert; return the one line that says why that cannot be."""
    out = Path(str(source).replace("://", "_") + "_out")
    assert main(["convert", str(source), str(out), "--to", "torch_dist", *flags]) == _REFUSED
    assert not list(out.parent.glob(f"{out.name}*"))
    line = capsys.readouterr().err.strip()
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


Capture = pytest.CaptureFixture[str]


def test_model_with_sizes_that_can_be_is_read_up_to_its_tensors(
    release: Path, capsys: Capture
) -> None:
    assert "lacks model.embed_tokens.weight" in refusal(capsys, release)


@pytest.mark.parametrize(("names", "rule"), INDEXES)
def test_file_that_an_index_names_is_in_the_folder(
    names: Any, rule: str, release: Path, capsys: Capture
) -> None:
    write(release / "model.safetensors.index.json", {"weight_map": names})
    assert rule in refusal(capsys, release)


@pytest.mark.parametrize(("name", "content", "rule"), FILES)
def test_file_of_a_model_that_is_something_else_is_refused(
    name: str, content: Any, rule: str, release: Path, capsys: Capture
) -> None:
    write(release / name, content)
    line = refusal(capsys, release)
    assert name in line and rule in line


@pytest.mark.parametrize(("content", "shown"), TRACKERS)
def test_tracker_that_names_no_checkpoint_is_refused(
    content: bytes, shown: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = save(tmp_path / "megatron", TENSORS)
    (folder / "latest_checkpointed_iteration.txt").write_bytes(content)
    rule = f"iteration.txt holds {shown}, and must hold the number of an iteration, or release"
    assert rule in refusal(capsys, folder)


@pytest.mark.parametrize("url", ["", " ", "file://"])
def test_source_without_a_name_is_refused(url: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["convert", url, str(tmp_path / "out"), "--to", "hf"]) == _REFUSED
    assert f"SRC='{url}' is empty" in capsys.readouterr().err


def with_code(folder: Path, name: str) -> Path:
    """Put what makes a folder where it is unpickled into a checkpoint of Megatron; return that folder."""
    ran = folder / "ran"
    where = save(folder, TENSORS) / "iter_0000003"
    content = Metadata({}, storage_data=Payload(ran))
    write(where / name, pickle.dumps(content) if name == ".metadata" else saved(Payload(ran)))
    return ran


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_checkpoint_with_code_is_refused_by_name_and_not_run(
    name: str, flags: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    ran = with_code(tmp_path / "megatron", name)
    line = refusal(capsys, tmp_path / "megatron", *flags)
    assert f"iter_0000003/{name} names posix.mkdir, and may name only" in line
    assert not ran.exists()


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_checkpoint_with_code_at_a_url_is_refused_too(name: str, tmp_path: Path) -> None:
    ran = with_code(tmp_path / "megatron", name)
    url = f"memory://{tmp_path.name}_{name}"
    fsspec.filesystem("memory").put(f"{tmp_path}/megatron/", f"{url}/", recursive=True)
    with pytest.raises(ConfigError, match=rf"{name} names posix\.mkdir"):
        open_model(url)
    assert not ran.exists()


def _tensor(
    size: tuple[int, ...], *sizes: tuple[int, ...], length: int, name: str = ""
) -> Metadata:
    """Return the metadata of one tensor whose pieces have some sizes."""
    chunks = [
        ChunkStorageMetadata(torch.Size((number, *(0 for _ in each[1:]))), torch.Size(each))
        for number, each in enumerate(sizes)
    ]
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    info = _StorageInfo(name or "__0_0.distcp", 0, length)
    return Metadata(
        {key: TensorStorageMetadata(TensorProperties(), torch.Size(size), chunks)},
        storage_data={MetadataIndex(key, each.offsets): info for each in chunks},
    )


HUGE = (10**6, 10**6, 2, 2)
METADATA: list[tuple[Callable[[], Metadata], str]] = [
    (lambda: _tensor(HUGE, HUGE, length=64), r"has \d+ bytes, and .metadata says that decoder"),
    (
        lambda: _tensor((1, 1, 2, 2), (1, 1, 2, 2), length=1 << 60),
        r"has \d+ bytes, and .metadata says",
    ),
    (lambda: _tensor(HUGE, (1, 1, 2, 2), length=64), "and its pieces have 4 elements"),
    (
        lambda: _tensor((1, 1, 2, 2), (1, 1, 2, 2), length=64, name="/etc/passwd"),
        "names the file '/etc/passwd', but may only name files of its own folder",
    ),
    (lambda: Metadata({}, storage_data=5), "iter_0000003 cannot be read: AttributeError"),
]


@pytest.mark.parametrize(("make", "rule"), METADATA)
def test_metadata_that_promises_more_than_there_is_is_refused(
    make: Callable[[], Metadata], rule: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "megatron", TENSORS)
    path = folder / "iter_0000003/.metadata"
    whole = pickle.loads(path.read_bytes())
    made = make()
    if isinstance(made.storage_data, dict):
        common = {key: each for key, each in whole.storage_data.items() if "common" in key.fqn}
        made.storage_data.update(common)
    write(path, pickle.dumps(made))
    with pytest.raises((ConfigError, OSError), match=rule):
        open_model(str(folder))
