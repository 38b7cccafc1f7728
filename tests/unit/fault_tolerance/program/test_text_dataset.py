"""Text becomes a dataset that holds the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.fault_tolerance.program.text_dataset import (
    END_OF_DOCUMENT_BYTE,
    TextSource,
    find_files,
    prepare_cached,
    split_documents,
    write_dataset,
)
from moe_ft.errors import ConfigError


def write_texts(folder: Path, texts: dict[str, str]) -> TextSource:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return TextSource(paths=(str(folder),))


def read_back(prefix: Path) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    documents = [np.asarray(dataset[index]) for index in range(len(dataset))]
    assert all(document[-1] == END_OF_DOCUMENT_BYTE for document in documents)
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def test_documents_hold_the_files_bytes_in_order_of_their_names(tmp_path: Path) -> None:
    texts = {"b.txt": "second: ä€😀", "a.txt": "first", "sub/c.txt": "third"}
    summary = write_dataset(write_texts(tmp_path / "in", texts), tmp_path / "out" / "text")
    assert read_back(tmp_path / "out" / "text") == ["first", "second: ä€😀", "third"]
    num_bytes = sum(len(text.encode()) for text in texts.values())
    assert (summary.num_documents, summary.num_tokens) == (3, num_bytes + 3)


@given(st.text(alphabet="ab\n", max_size=200))
def test_pieces_of_a_long_text_join_to_the_text(text: str) -> None:
    long_text = text * 400
    pieces = list(split_documents(long_text))
    assert "".join(pieces) == long_text
    assert all(len(piece) <= 16384 for piece in pieces)


def test_long_text_is_cut_at_line_ends() -> None:
    pieces = list(split_documents("a line of text\n" * 5000))
    assert len(pieces) > 1
    assert all(piece.endswith("\n") for piece in pieces)


def test_what_is_no_text_is_left_out_and_counted(tmp_path: Path) -> None:
    source = write_texts(
        tmp_path / "in", {"a.txt": "text", "empty.txt": " \n", ".hidden": "secret"}
    )
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "in" / "nul.txt").write_bytes(b"a\0b")
    summary = write_dataset(source, tmp_path / "text")
    assert (summary.num_documents, summary.num_skipped_files) == (1, 3)


def test_failed_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "picture").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"none of its files \(1\) holds UTF-8 text"):
        write_dataset(TextSource(paths=(str(tmp_path / "in"),)), tmp_path / "out" / "text")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("name", "message"), [("missing", "does not exist"), ("empty", "holds no file")]
)
def test_path_without_files_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"{name} {message}"):
        find_files([str(tmp_path / name)])


def test_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", {"a.txt": "text"})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out cannot be written"):
        write_dataset(source, tmp_path / "file" / "out")


def test_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", {"a.txt": "text"})
    source = TextSource(paths=source.paths, tokenizer=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="tokenizer .*none (cannot be loaded|needs the package)"):
        write_dataset(source, tmp_path / "text")


def test_cache_is_used_until_the_text_changes(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", {"a.txt": "text"})
    first = prepare_cached(source, str(tmp_path / "cache"))
    written = Path(f"{first}.bin").stat().st_mtime_ns
    assert prepare_cached(source, str(tmp_path / "cache")) == first
    assert Path(f"{first}.bin").stat().st_mtime_ns == written
    write_texts(tmp_path / "in", {"a.txt": "other text"})
    second = prepare_cached(source, str(tmp_path / "cache"))
    assert second != first
    assert read_back(second) == ["other text"]


def test_half_prepared_cache_is_prepared_again(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", {"a.txt": "text"})
    prefix = prepare_cached(source, str(tmp_path / "cache"))
    prefix.with_suffix(".json").unlink()  # written last: a killed preparation has none
    Path(f"{prefix}.bin").write_bytes(b"half")
    assert read_back(prepare_cached(source, str(tmp_path / "cache"))) == ["text"]
    assert json.loads(prefix.with_suffix(".json").read_text())["num_documents"] == 1


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", {"a.txt": "text"})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--data-cache-path .*file cannot be written"):
        prepare_cached(source, str(tmp_path / "file"))
