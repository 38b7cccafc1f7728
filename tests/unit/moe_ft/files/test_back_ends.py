"""Back ends of storage: who opens a URL, with which settings, and what several requests at a time leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from moto import mock_aws

from moe_ft.files.back_ends import call_ahead, piece_bytes
from moe_ft.files.object_store import ObjectStore as Client
from moe_ft.files.object_store import _Credentials, _settings_of_s3, open_store
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore

MIB = 1 << 20


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return a folder for files of botocore, which alone say what it knows."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield tmp_path


def test_credentials_that_were_renewed_in_their_file_are_found(alone: Path) -> None:
    credentials = _Credentials({"profile": "own"})
    for key in ("old", "new"):
        text = f"[own]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"
        (alone / "credentials").write_text(text)
        assert credentials()["access_key_id"] == key


def test_credentials_that_are_nowhere_are_missed(alone: Path) -> None:
    with pytest.raises(OSError, match="no credentials"):
        _Credentials({})()


def test_profile_says_endpoint_region_and_addressing_style(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "own")
    text = "[profile own]\nregion = eu-west-9\nendpoint_url = https://host:9000\n"
    (alone / "config").write_text(f"{text}s3 =\n  addressing_style = virtual\n")
    config = _settings_of_s3("bucket", {})["config"]
    assert config["endpoint"] == "https://bucket.host:9000"
    assert config["region"] == "eu-west-9"
    assert config["virtual_hosted_style_request"]


@mock_aws
def test_bucket_of_amazon_is_looked_for_in_its_own_region(alone: Path) -> None:
    import boto3

    own = boto3.client("s3", "eu-west-1", aws_access_key_id="a", aws_secret_access_key="b")
    own.create_bucket(
        Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    config = _settings_of_s3("bucket", {"key": "a", "secret": "b"})["config"]
    assert config["region"] == "eu-west-1"
    assert config["endpoint"] == "https://s3.eu-west-1.amazonaws.com"


@pytest.mark.parametrize(
    ("protocol", "conf", "is_ours"),
    [
        ("s3", {}, True),
        ("s3a", {"s3": {"key": "a", "secret": "b", "client_kwargs": {"region_name": "x"}}}, True),
        ("s3", {"s3": {"config_kwargs": {"s3": {"addressing_style": "path"}}}}, True),
        ("s3", {"s3": {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}}, False),
        ("s3", {"s3": {"client_kwargs": {"verify": False}}}, False),
        ("gs", {}, True),
        ("gcs", {"gs": {"token": "cloud"}}, False),
        ("abfs", {"az": {"connection_string": "x"}}, False),
        ("msc", {}, False),
        ("hdfs", {}, False),
    ],
)
def test_options_and_protocols_without_a_counterpart_are_left_to_packages_of_fsspec(
    alone: Path, protocol: str, conf: dict[str, dict[str, object]], is_ours: bool
) -> None:
    conf = {**conf, "s3a": {"endpoint_url": "http://127.0.0.1:9"}}
    assert isinstance(open_store(protocol, "bucket/a", conf), Client) is is_ours


def test_reason_of_a_server_is_one_line(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.files.object_store.TRIES_S", 1.0)
    storage = Storage(f"{s3.bucket()}/run")
    with s3.failing("SlowDown", "PUT"), pytest.raises(OSError) as failed:
        storage.write_atomically("iter_0000001/manifest.json", b"{}")
    text = str(failed.value)
    assert text.startswith(f"{storage.url}: write iter_0000001/manifest.json: ")
    assert "503 Service Unavailable" in text and "SlowDown" in text
    assert "\n" not in text and len(text) < 700


def test_file_whose_pieces_cannot_be_made_leaves_no_object(s3: ObjectStore) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(20 * MIB))
        raise ValueError("no more")

    storage = Storage(f"{s3.bucket()}/run")
    with pytest.raises(OSError, match="no more"):
        storage.write("iter_0000001/file", pieces())
    assert not storage.exists("iter_0000001/file")


def test_ranges_are_read_ahead_in_order_and_an_error_ends_them(s3: ObjectStore) -> None:
    storage = Storage(f"{s3.bucket()}/run")
    storage.write_atomically("file", bytes(range(100)))
    spans = [("file", start, 1) for start in range(100)]
    assert b"".join(storage.read_each(spans)) == bytes(range(100))
    spans[50] = ("missing", 0, 1)
    found = storage.read_each(spans)
    assert [next(found) for _ in range(50)] == [bytes([each]) for each in range(50)]
    with pytest.raises(FileNotFoundError):
        next(found)


def test_back_end_that_takes_one_request_is_asked_when_the_last_one_is_answered() -> None:
    called: list[int] = []

    def read(number: int) -> bytes:
        called.append(number)
        return bytes([number])

    found = call_ahead(object(), (lambda number=number: read(number) for number in range(3)))
    assert next(found) == b"\0"
    assert called == [0]
    assert piece_bytes(object(), 64 * MIB) == 16 * MIB
