"""Contents of data sets and tokenizers are known wherever they lie, and other ones by the same name are."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from megatron.fault_tolerance.seams import contents
from moe_ft.errors import ConfigError
from moe_ft.format.identity import CONTENTS, differing_settings

SENTENCE = "The same text again and again, so that an index has many documents.\n"


def data_set(prefix: Path, text: str = SENTENCE * 9000) -> str:
    """Write a data set whose two files are both larger than what is read of them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    (prefix.parent / "source.txt").write_text(text)
    write_dataset(TextSource(paths=(str(prefix.parent / "source.txt"),)), prefix)
    return str(prefix)


def settings(**flags: Any) -> dict[str, Any]:
    """Return the fingerprint of a new process."""
    contents.content_of.cache_clear()
    return contents.add_files(argparse.Namespace(**flags), {}, {})["fingerprint"]


@pytest.mark.parametrize("flag", ["data_path", "train_data_path", "valid_data_path"])
def test_blend_may_be_moved_and_no_data_set_of_it_exchanged(flag: str, tmp_path: Path) -> None:
    first, second = data_set(tmp_path / "a/text"), data_set(tmp_path / "b/text", SENTENCE * 400)
    before = settings(**{flag: ["0.3", first, "0.7", second]})
    for name in ("a", "b"):
        shutil.move(tmp_path / name, tmp_path / f"{name}_moved")
    shutil.move(tmp_path / "b_moved/text.idx", tmp_path / "b_moved/renamed.idx")
    shutil.move(tmp_path / "b_moved/text.bin", tmp_path / "b_moved/renamed.bin")
    moved = [str(tmp_path / "a_moved/text"), str(tmp_path / "b_moved/renamed")]
    assert differing_settings(settings(**{flag: ["0.3", moved[0], "0.7", moved[1]]}), before) == []
    option = "--" + flag.replace("_", "-")
    weights = settings(**{flag: ["0.3", moved[0], "0.6", moved[1]]})
    assert differing_settings(weights, before) == [f"{option} 0.7 there, 0.6 now"]
    data_set(tmp_path / "a_moved/text", SENTENCE * 9001)
    ((line),) = differing_settings(settings(**{flag: ["0.3", moved[0], "0.7", moved[1]]}), before)
    num_bytes = len(SENTENCE)
    assert line.startswith(f"{option} text: 38 documents, {num_bytes * 9000 + 38} tokens of uint16")
    assert f"there, text: 38 documents, {num_bytes * 9001 + 38} tokens of uint16" in line
    shorter = differing_settings(settings(**{flag: [moved[0]]}), before)
    assert shorter[0] == f"{option}: 4 words there, 1 now"


def test_other_tokens_in_files_of_the_same_sizes_are_found(tmp_path: Path) -> None:
    prefix = data_set(tmp_path / "text")
    before = settings(data_path=[prefix])
    tokens = np.fromfile(f"{prefix}.bin", np.uint16)
    (tokens[::-1]).tofile(f"{prefix}.bin")
    ((line),) = differing_settings(settings(data_path=[prefix]), before)
    assert line.count("38 documents") == 2


def test_lists_of_data_sets_are_read_in_both_forms(tmp_path: Path) -> None:
    prefix, path = data_set(tmp_path / "text", SENTENCE), tmp_path / "list"
    path.write_text(f"0.5 {prefix}\n0.5 s3://bucket/a/far")
    found = settings(data_args_path=str(path))
    # The first as versions wrote it that knew no contents.
    assert found["--data-args-path"] == ["0.5", "text", "0.5", "s3", "far"]
    assert [word.partition(": ")[0] for word in found[CONTENTS]["--data-args-path"]] == [
        *("0.5", "text", "0.5", "far")
    ]
    path.write_text(f'{{"train": ["1.0", "{prefix}"], "valid": ["{prefix}"]}}')
    splits = settings(per_split_data_args_path=str(path))[CONTENTS]["--per-split-data-args-path"]
    known = "text: 1 documents, 69 tokens of uint16"
    assert [word.partition(", sample")[0] for word in splits] == [
        *("train", "1.0", known, "valid", known)
    ]


def test_list_that_cannot_be_read_is_refused_with_flag_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-args-path=.*none cannot be read.* Name a file"):
        settings(data_args_path=str(tmp_path / "none"))
    assert settings(data_args_path=None) == {"--data-args-path": None, CONTENTS: {}}


def test_path_that_cannot_be_read_here_is_compared_by_name_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.idx").write_bytes(b"short")
    paths = ["s3://bucket/text", "msc://profile/text", "/nowhere/text", str(tmp_path / "broken")]
    found = settings(data_path=[*paths[:3]], tokenizer_model=paths[3])
    assert found[CONTENTS] == {
        "--data-path": ["text", "text", "text"],
        "--tokenizer-model": ["broken"],
    }
    line = "by name alone where they cannot be read: s3://bucket/text, msc://profile/text"
    assert line in capsys.readouterr().err
    known = settings(data_path=[data_set(tmp_path / "text", SENTENCE)])
    assert differing_settings(known, settings(data_path=["s3://bucket/text"])) == []


def test_tokenizer_is_known_by_its_files_and_not_by_the_weights_beside_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "vocab.json", "model.safetensors"):
        (folder / name).write_text(name)
    shutil.copytree(folder, tmp_path / "copy")
    before = settings(tokenizer_model=str(folder), vocab_file=str(folder / "vocab.json"))
    (tmp_path / "copy/model.safetensors").write_text("trained further")
    (tmp_path / "copy/vocab.json").rename(tmp_path / "other.json")
    (tmp_path / "copy/vocab.json").write_text("vocab.json")
    names = {"tokenizer_model": tmp_path / "copy", "vocab_file": tmp_path / "other.json"}
    flags = {name: str(path) for name, path in names.items()}
    assert differing_settings(settings(**flags), before) == []
    (tmp_path / "copy/tokenizer.json").write_text("tokenizer.JSON")
    ((line),) = differing_settings(settings(**flags), before)
    assert line.startswith("--tokenizer-model model: 24 bytes, sha256 ")


def test_content_of_other_files_counts_only_for_iterations_that_run_again(tmp_path: Path) -> None:
    path = tmp_path / "overlap.yaml"
    path.write_text("qkv_fprop: {}")
    found = contents.add_files(argparse.Namespace(tp_comm_overlap_cfg=str(path)), {}, {})
    assert found["fingerprint"] == {CONTENTS: {}}
    (word,) = found["replay_settings"][CONTENTS]["--tp-comm-overlap-cfg"]
    assert word.startswith("overlap.yaml: 13 bytes, sha256 ")
