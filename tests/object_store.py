"""A real S3 server on this machine, with the faults of object stores: moto, and a layer that injects them.

Requests are those that obstore makes over HTTP. An object appears when its upload is complete, as on S3.
"""

import faulthandler
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import fsspec
import pytest
import requests
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from moe_ft.files import storage
from moe_ft.files.progress import call_within

_XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
CODES = {
    "SlowDown": "503 Slow Down",
    "InternalError": "500 Internal Server Error",
    "ExpiredToken": "400 Bad Request",
    "AccessDenied": "403 Forbidden",
}
CUT = "cut"  # the connection ends in the middle of the request
_MORE_PATIENCE = 6  # times a user's: client and server share one process, and its core may be busy


@dataclass
class Fault:
    """A fault of some requests.

    Attributes:
        code: of the answer, or CUT.
        methods: of HTTP.
        part: of the path or query.
        left: how many requests it still strikes.
        struck: how many it has.
    """

    code: str
    methods: tuple[str, ...] = ("GET", "HEAD", "PUT", "POST", "DELETE")
    part: str = ""
    left: int = 1 << 30
    struck: int = 0

    def strikes(self, environ: dict[str, Any]) -> bool:
        place = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        is_hit = environ["REQUEST_METHOD"] in self.methods and self.part in place and self.left > 0
        self.left -= is_hit
        self.struck += is_hit
        return is_hit


class ObjectStore:
    """The server. Tests use buckets of their own, one after another."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._unlisted: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_QuietHandler
        )
        self.endpoint = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        for fault in self.faults:
            if fault.strikes(environ):
                return self._fail(fault, environ, start_response)
        is_list = environ["REQUEST_METHOD"] == "GET" and "list-type" in environ["QUERY_STRING"]
        if is_list and self._unlisted:
            return self._cut_list(environ, start_response)
        found: Iterable[bytes] = self._app(environ, start_response)
        return found

    def _cut_list(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer a request for a list without what is not listed yet."""
        started: list[Any] = []
        # A single key, which is asked for to see whether a folder is there, may be one that is cut out.
        query = re.sub(r"max-keys=\d+", "max-keys=1000", environ["QUERY_STRING"])
        environ = {**environ, "QUERY_STRING": query}
        answer = self._app(environ, lambda status, headers, *_: started.extend((status, headers)))
        text = b"".join(answer).decode()
        for kind, name in (("Contents", "Key"), ("CommonPrefixes", "Prefix")):
            for entry in re.findall(rf"<{kind}>.*?</{kind}>", text, re.DOTALL):
                named = re.search(rf"<{name}>(.*?)</{name}>", entry, re.DOTALL)
                if named is not None and any(part in unquote(named[1]) for part in self._unlisted):
                    text = text.replace(entry, "")
        num_left = text.count("<Contents>") + text.count("<CommonPrefixes>")
        text = re.sub(r"<KeyCount>\d+<", f"<KeyCount>{num_left}<", text)
        status, headers = started
        others = [each for each in headers if each[0].lower() != "content-length"]
        start_response(status, [*others, ("Content-Length", str(len(text.encode())))])
        return [text.encode()]

    @contextmanager
    def listing_late(self, part: str) -> Iterator[None]:
        """Leave out objects from all lists whose names have some part; they can be read."""
        self._unlisted.append(part)
        try:
            yield
        finally:
            self._unlisted.remove(part)

    def _fail(
        self, fault: Fault, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if fault.code == CUT:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("the connection is cut on purpose")
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = _XML.format(code=fault.code).encode()
        start_response(CODES[fault.code], [("Content-Type", "application/xml")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def bucket(self) -> str:
        """Make a bucket; return its URL."""
        name = f"bucket-{uuid4().hex[:12]}"
        requests.put(f"{self.endpoint}/{name}", timeout=30).raise_for_status()
        return f"s3://{name}"

    @contextmanager
    def failing(
        self, code: str, *methods: str, part: str = "", times: int = 1 << 30
    ) -> Iterator[Fault]:
        fault = Fault(code, methods or Fault.methods, part, times)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _QuietHandler(WSGIRequestHandler):
    def log(self, *args: Any) -> None:
        """Print nothing."""


ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",  # of botocore, where tests wait for the last one
}


def _call_within[Result](act: Callable[[], Result], patience_s: float, what: str) -> Result:
    """Wait longer than a user would; if even that is too short, print what all threads are doing."""
    try:
        return call_within(act, patience_s * (_MORE_PATIENCE if "s3://" in what else 1), what)
    except TimeoutError:
        if "s3://" in what:
            faulthandler.dump_traceback()
        raise


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a server, to which s3:// URLs lead in this process and its children."""
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.endpoint}.items():
            patch.setenv(name, value)
        # Tests of other things may replace the environment of this process.
        own = {"key": "key", "secret": "secret", "endpoint_url": store.endpoint}
        patch.setitem(fsspec.config.conf, "s3", own)
        patch.setattr(storage, "call_within", _call_within)
        yield store
    store.close()
