"""Manifests: those that break the schema or name files elsewhere are refused."""

import pytest

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import decode
from moe_ft.format.manifest import Manifest
from tests.unit.moe_ft.format.bodies import ESCAPES, Change, body_of, change, seal, small_manifest


def test_manifest_that_does_not_speak_of_windows_is_of_single_snapshots() -> None:
    body = body_of(small_manifest())
    del body["window"]
    assert decode(seal(body), Manifest, "a file").window == 1


def test_unit_of_a_manifest_beyond_its_older_files_is_refused() -> None:
    body = body_of(small_manifest())
    body["older"] = body["files"]
    body["units"]["embedding"]["files"] = [2]
    with pytest.raises(CorruptStateError, match="names a file that is not listed"):
        decode(seal(body), Manifest, "a file")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("created_s", "now"), "form of Manifest.*created_s"),
        (change("surprise", 1), "form of Manifest.*surprise"),
        (change("files.0.index_checksum", ""), "form of Manifest.*index_checksum"),
        (change("files.0.surprise", 1), "form of Manifest.*surprise"),
        (lambda body: body["files"][0].pop("data"), "form of Manifest.*data"),
        (change("units.embedding.files", [1]), "unit embedding names a file that is not listed"),
        (change("units.embedding.files", [-1]), "form of Manifest.*files"),
        (change("window", 0), "form of Manifest.*window"),
        (change("identity.history", []), "belongs to no incarnation"),
    ],
)
def test_manifest_that_breaks_the_schema_is_refused_and_the_field_named(
    spoil: Change, message: str
) -> None:
    body = body_of(small_manifest())
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Manifest, "a file")


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("field", ["index", "data"])
def test_manifest_that_names_a_file_elsewhere_is_refused(field: str, path: str) -> None:
    body = body_of(small_manifest())
    body["files"][0][field] = path
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(body), Manifest, "a file")
