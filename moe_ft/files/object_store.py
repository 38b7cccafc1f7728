"""Object stores of S3, Google and Azure through obstore, as a file system of fsspec.

obstore makes requests on threads of its own that need no lock of the interpreter: several parts of an object
go up at a time, and what fails is tried again for a time that is known. S3 has the endpoint, region,
addressing style and credentials that botocore finds; Google and Azure have those that obstore finds.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, override

import obstore
from obstore.fsspec import FsspecStore

from moe_ft.files.back_ends import NUM_AT_A_TIME, PART_BYTES, cut, give_own_random

# For all tries of a request. Shorter than a rank's patience, so that it learns the reason.
TRIES_S = 20.0
_REQUEST_S = 20.0  # for one of them
_MOST_PARTS = 9_000  # S3 takes 10,000
_LIFETIME_S = 330.0  # of credentials: obstore asks again 300 s before their end, so every 30 s
_OTHERS = ("gs", "gcs", "abfs", "abfss", "az")
# Options in the configuration of fsspec, with those in them, that have a counterpart.
_OF_S3: Mapping[str, Any] = {
    **dict.fromkeys(("key", "secret", "token", "endpoint_url", "profile", "anon")),
    "client_kwargs": dict.fromkeys(("endpoint_url", "region_name")),
    "config_kwargs": {"s3": {"addressing_style": None}},
}


class ObjectStore(FsspecStore):  # type: ignore[misc]
    """Buckets, as obstore has them for fsspec, and what that leaves out."""

    cachable = False

    @override
    async def _pipe_file(
        self, path: str, value: Any, mode: str = "overwrite", **options: Any
    ) -> Any:
        bucket, key = self._split_path(path)
        store = self._construct_store(bucket)
        return await obstore.put_async(store, key, value, mode=mode, chunk_size=PART_BYTES)

    def pipe_pieces(self, path: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Write a large object, several parts at a time; nobody sees it before all of it is there."""
        bucket, key = self._split_path(path)
        store = self._construct_store(bucket)
        size = max(PART_BYTES, -(-num_bytes // _MOST_PARTS))
        parts = cut(pieces, size)
        obstore.put(store, key, parts, chunk_size=size, max_concurrency=NUM_AT_A_TIME)


def open_store(protocol: str, place: str, conf: Mapping[str, Any]) -> ObjectStore | None:
    """Return the store of a bucket and a path in it; None if that is for a package of fsspec.

    Args:
        conf: the configuration of fsspec, by protocol.
    """
    if "//" in place:
        return None
    options = {**conf.get("s3a", {}), **conf.get("s3", {})}
    if protocol in ("s3", "s3a") and find_spec("botocore") and _are_known(options, _OF_S3):
        return ObjectStore(protocol, **_settings_of_s3(place.partition("/")[0], options))
    if protocol in _OTHERS and not any(conf.get(each) for each in _OTHERS):
        return ObjectStore({"gcs": "gs"}.get(protocol, protocol), **_settings())
    return None


def _are_known(options: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    return all(
        name in known and (known[name] is None or _are_known(value or {}, known[name]))
        for name, value in options.items()
    )


def _settings(bundle: str | None = None) -> dict[str, Any]:
    """Return when a request is given up, and whose signature of a server's certificate is right too."""
    client: dict[str, Any] = {"allow_http": True, "timeout": timedelta(seconds=_REQUEST_S)}
    if bundle:
        client["root_certificate"] = Path(bundle).read_bytes()
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)}
    retries = {"retry_timeout": timedelta(seconds=TRIES_S), "backoff": {**backoff, "base": 2}}
    return {"client_options": client, "retry_config": retries}


def _session(options: Mapping[str, Any]) -> Any:
    import botocore.session

    give_own_random()
    session = botocore.session.Session(profile=options.get("profile"))
    if options.get("key"):
        session.set_credentials(options["key"], options["secret"], options.get("token"))
    return session


def _settings_of_s3(bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the endpoint, region, addressing style and credentials that botocore finds, and `_settings`."""
    from botocore.config import Config

    session = _session(options)
    given = {"endpoint_url": options.get("endpoint_url"), **(options.get("client_kwargs") or {})}
    given["config"] = Config(**(options.get("config_kwargs") or {}))
    client = session.create_client("s3", **given)
    if ".amazonaws.com" in client.meta.endpoint_url:
        client = session.create_client("s3", **{**given, "region_name": _region(client, bucket)})
    endpoint = client.meta.endpoint_url
    is_virtual = (client.meta.config.s3 or {}).get("addressing_style") == "virtual"
    config = {
        "endpoint": endpoint.replace("://", f"://{bucket}.", 1) if is_virtual else endpoint,
        "region": client.meta.region_name or "us-east-1",
        "virtual_hosted_style_request": is_virtual,
        "unsigned_payload": endpoint.startswith("https"),  # TLS protects it
        "disable_bulk_delete": True,  # which not every store knows
        "skip_signature": bool(options.get("anon")),
    }
    provider = None if options.get("anon") else _Credentials(options)
    settings = _settings(session.get_config_variable("ca_bundle"))
    return {**settings, "config": config, "credential_provider": provider}


def _region(client: Any, bucket: str) -> str | None:
    """Return the region of a bucket of Amazon, which it names also where it refuses a request."""
    from botocore.exceptions import ClientError

    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    found: str | None = headers.get("x-amz-bucket-region", client.meta.region_name)
    return found


class _Credentials:
    """Credentials as botocore finds them. Called by obstore, before those that it has are too old."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._found: Any = None

    def __call__(self) -> Any:
        # Some renew themselves. Others may have expired, and a file may have new ones by now.
        if not hasattr(self._found, "refresh_needed"):
            self._found = _session(self._options).get_credentials()
        if self._found is None:
            raise OSError("botocore finds no credentials")
        found = self._found.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_LIFETIME_S),
        }
