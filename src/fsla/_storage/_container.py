"""The format of every single file that fsla writes: tensors and JSON, with every byte under a digest.

A file is a safetensors file. Its header begins with an entry of fixed size and is followed by the tensors::

    length of the header (8 bytes), {"__metadata__": {"format": "fsla-0001", "digest": "<64 digits>", "fsla": version,
    "kind": …, "run": …}, name: {"dtype": …, "shape": …, "data_offsets": …}, …}, bytes of the tensors

The digest is BLAKE2b of all bytes but its own digits. The JSON is one more tensor of bytes, because a header has at
most 100 MB. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fsla._storage._files import FileError, open_regular, publish_file
from fsla._storage._json_values import Plain
from fsla._version import __version__

FORMAT = "fsla-0001"
_KNOWN = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})  # not on Windows
LIMIT = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if _KNOWN else 2**40
"""The most bytes that a file may have: as many as the machine's memory."""
_JSON = "json"
_HEAD = re.compile(
    rb'.{8}\{"__metadata__":\{"format":"(fsla-\d{4})","digest":"([0-9a-f]{64})","fsla":"([^"]{1,40})"', re.DOTALL
)
_BEFORE = 8 + len('{"__metadata__":{"format":"fsla-0001","digest":"')
"""Where the digest is."""
_AFTER = _BEFORE + 64


class Content(NamedTuple):
    """What a file holds."""

    tensors: dict[str, Tensor]
    json: Plain
    run_id: str | None
    """What all files of a run have in common; drawn at random."""
    digest: str
    """What no other file has."""


def new_run_id() -> str:
    """Draw a run id. No random state moves."""
    return os.urandom(16).hex()


def write(path: Path, kind: str, tensors: Mapping[str, Tensor], content: Plain, run_id: str | None = None) -> str:
    """Write a file, whole or not at all, and return its digest.

    Args:
        path: the file, in a folder that exists.
        kind: what the file is, in words: `read` refuses any other kind.
        tensors: dense tensors by name.
        content: JSON with finite numbers.
        run_id: the run that the file is of.

    Raises:
        FileError: if the path names a link or anything else but a regular file.
        OSError: if the file cannot be written; what was there stays.
    """
    data = to_bytes(kind, tensors, content, run_id)
    publish_file(path, data)
    return data[_BEFORE:_AFTER].decode()


def read(path: Path, kind: str, limit: int = LIMIT) -> Content:
    """Return what a file of this kind holds.

    Raises:
        FileError: if it is no whole, undamaged file of this kind with at most `limit` bytes.
    """
    try:
        with open(open_regular(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_head(path, file.read(512))
            if size > limit:
                raise unreadable(path, f"it has {size} bytes, more than the limit of {limit}")
            file.seek(0)
            data = file.read(size + 1)
    except (OSError, MemoryError) as error:
        raise unreadable(path, getattr(error, "strerror", None) or "it does not fit into memory") from None
    return from_bytes(path, kind, data)


def read_digest(path: Path) -> str:
    """Return the digest in a file's head, unchecked."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        return _check_head(path, file.read(512))[2].decode()


def read_run_id(path: Path) -> str | None:
    """Return the run id in a file's header, unchecked."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        match = re.search(rb',"run":"([0-9a-f]{32})"\}', file.read(1024))
    return None if match is None else match[1].decode()


def to_bytes(kind: str, tensors: Mapping[str, Tensor], content: Plain, run_id: str | None = None) -> bytes:
    """Return the bytes of a file; see `write`."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    about = {"fsla": __version__, "kind": kind} | ({} if run_id is None else {"run": run_id})
    return _sealed(about, tensors, text)


def from_bytes(path: Path, kind: str, data: bytes) -> Content:
    """Return what the bytes of a file hold; `path` is for messages. Raise a FileError as `read` does."""
    head = _check_head(path, data[:512])
    digest = head[2].decode()
    if digest != _digest(memoryview(data)):
        raise unreadable(path, "it is damaged: its digest is of other bytes")
    if head[1].decode() != FORMAT:
        version = head[3].decode(errors="replace")
        raise unreadable(
            path, f"fsla {version} wrote it in format {head[1].decode()}, and this is fsla {__version__} with {FORMAT}"
        )
    try:
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if about.get("kind") != kind:
            raise unreadable(path, f"it holds {about.get('kind')}, not {kind}")
        tensors = load(data)
        content: Plain = json.loads(tensors.pop(_JSON).numpy().tobytes(), parse_constant=_finite, parse_float=_finite)
    except FileError:
        raise
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        raise unreadable(path, f"it is malformed: {error or type(error).__name__}") from None
    return Content(tensors, content, about.get("run"), digest)


def unreadable(path: Path, why: str) -> FileError:
    """Return the refusal of a file."""
    return FileError(f"Cannot read {path}: {why}. Remove it, or name another file.")


def _sealed(about: Mapping[str, str], tensors: Mapping[str, Tensor], text: bytes, version: str = FORMAT) -> bytes:
    """Return the bytes of a file with a fitting digest around any text in the place of its JSON."""
    dense = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    data = save(dense | {_JSON: torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)})
    begin = 8 + int.from_bytes(data[:8], "little")
    metadata = {"__metadata__": {"format": version, "digest": "0" * 64, **about}}
    header = json.dumps(metadata | json.loads(data[8:begin]), separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    rest = memoryview(data)[begin:]
    digest = _digest(start, rest).encode()
    return b"".join([start[:_BEFORE], digest, start[_AFTER:], rest])


def _check_head(path: Path, head: bytes) -> re.Match[bytes]:
    match = _HEAD.match(head)
    if match is None:
        raise unreadable(path, "it is no file of fsla, or is damaged")
    return match


def _digest(start: bytes | memoryview, *more: bytes | memoryview) -> str:
    """Return the digest of the bytes of a file, but those that hold it."""
    total = hashlib.blake2b(start[:_BEFORE], digest_size=32)
    for part in (start[_AFTER:], *more):
        total.update(part)
    return total.hexdigest()


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"its JSON holds {number}")
    return float(number)
