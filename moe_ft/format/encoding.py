"""Files of JSON with a checksum: the envelope that all indexes and manifests share.

Reading validates types, names and paths, and the checksum over the body finds every flipped byte. There is no
pickle. The bodies are defined in format/index.py and format/manifest.py. Values that JSON lacks, such as NaN
and tuples, are converted here too.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import xxhash

from moe_ft.errors import CorruptStateError, FormatVersionError
from moe_ft.format.identity import Identity
from moe_ft.processes import num_cores_of_rank

FORMAT = "moe_ft/1"
_BEGIN = b'{"format":"%s",' % FORMAT.encode()  # of the bodies that `encode` writes
Checksum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_ENVELOPE = re.compile(rb'\{"xxh3_64":"([0-9a-f]{16})","body":')


class Body(msgspec.Struct, frozen=True):
    """The content of a file, apart from its checksum."""

    format: str
    identity: Identity

    def check(self, where: str) -> None:
        """Raise CorruptStateError if a rule that the schema cannot express is broken."""
        if not self.identity.history:
            raise CorruptStateError(f"{where} belongs to no incarnation")


_DECODERS: dict[type[Body], msgspec.json.Decoder[Any]] = {}


def decodable[B: Body](kind: type[B]) -> type[B]:
    """Build the decoder of a class of bodies, while its module is imported; a decorator.

    Decoders are never built later: where several threads need the same types at once, msgspec shows one
    thread what another has built only in part, and the process dies of SIGSEGV.
    """
    _DECODERS[kind] = msgspec.json.Decoder(kind)
    return kind


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-64 checksum of some bytes, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def check_content(what: str, content: bytes | memoryview, expected: str) -> None:
    """Raise CorruptStateError, which begins with what it is, unless bytes have their checksum."""
    check_found(what, checksum(content), expected)


def check_found(what: str, found: str, expected: str) -> None:
    """Raise CorruptStateError, which begins with what it is, unless a checksum is the expected one."""
    if found != expected:
        raise CorruptStateError(f"{what} does not match its checksum")


def encode(body: Body) -> bytes:
    """Return the file's content: a JSON object that holds the body and the checksum of its bytes."""
    encoded = msgspec.json.encode(body)
    return b'{"xxh3_64":"%s","body":%s}\n' % (checksum(encoded).encode(), encoded)


def decode[B: Body](content: bytes, kind: type[B], where: str) -> B:
    """Check the content of a file that `encode` made, and return its body.

    Args:
        kind: a class that is `decodable`.
        where: path of the file, for messages.

    Raises:
        CorruptStateError: if the checksum, the schema, the format or a path in it is wrong.
    """
    match = _ENVELOPE.match(content)
    if match is None or not content.endswith(b"}\n"):
        raise CorruptStateError(f"{where} is not a complete file of moe_ft")
    body = memoryview(content)[match.end() : -2]
    if checksum(body) != match[1].decode():
        raise CorruptStateError(f"{where} is corrupt: its checksum does not match its content")
    if body[: len(_BEGIN)] != _BEGIN:  # else all of a large body is read for it
        _check_format(body, where)
    try:
        decoded: B = _DECODERS[kind].decode(body)
    except (ValueError, RecursionError) as error:  # of deeply nested lists
        raise CorruptStateError(
            f"{where} does not have the form of {kind.__name__}: {error}"
        ) from error
    decoded.check(where)
    return decoded


class _AnyFormat(msgspec.Struct):
    format: str = ""


_ANY_FORMAT = msgspec.json.Decoder(_AnyFormat)


def _check_format(body: memoryview, where: str) -> None:
    """Raise FormatVersionError for a file of another format, whose schema is not known here."""
    try:
        found = _ANY_FORMAT.decode(body).format
    except (ValueError, RecursionError):
        return  # decoding with the schema says what is wrong
    if found and found != FORMAT:
        raise FormatVersionError(f"{where} has format '{found}', this version reads {FORMAT}")


def check_path(path: str, where: str) -> None:
    """Raise CorruptStateError for a path that is absolute or leaves its directory."""
    parts = [each for each in path.split("/") if each not in ("", ".")]
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "\0" in path:
        raise CorruptStateError(f"{where} names '{path}', which leaves its directory")


def finite_or_name(value: Any) -> Any:
    """Return a value, but "nan", "inf" or "-inf" for a float that is not finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def convert_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return nested mappings and sequences as dicts and lists, with each leaf converted."""
    if isinstance(value, Mapping):
        return {str(key): convert_leaves(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [convert_leaves(item, convert) for item in value]
    return convert(value)


_MOST_THREADS = 4
_LEAST_BYTES = 16 << 20  # below, starting threads takes longer than what they save


def checksums(contents: Sequence[memoryview]) -> list[str]:
    """Return the checksum of each content, in their order.

    Several threads compute them: one has 10 to 35 GB/s, and a GPU copies 50. The largest begins first:
    threads have no part in the work of another one.
    """
    num_free_cores = num_cores_of_rank() - 1  # beside that of the training thread
    num_threads = min(num_free_cores, _MOST_THREADS, len(contents))
    if num_threads < 2 or sum(map(len, contents)) < _LEAST_BYTES:
        return [*map(checksum, contents)]
    order = sorted(range(len(contents)), key=lambda place: -len(contents[place]))
    try:
        with ThreadPoolExecutor(num_threads, "moe_ft-checksum") as pool:
            found = dict(
                zip(order, pool.map(checksum, map(contents.__getitem__, order)), strict=True)
            )
    except RuntimeError:  # there are too many threads, or the interpreter ends
        return [*map(checksum, contents)]
    return [found[place] for place in range(len(contents))]
