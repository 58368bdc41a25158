"""Gzipped idx files: MNIST's images (idx3) and labels (idx1), QMNIST's extended labels (idx2-int)."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_LARGEST = 2**31
"""The most bytes of values that a file may announce. MNIST's images have 47 MB."""
_PIECE = 2**20


class DataError(ValueError):
    """A data file that is missing, damaged or not what it should be; the text is the whole message."""


def read_idx(path: Path) -> npt.NDArray[Any]:
    """Return the array in a gzipped idx file, checked to be whole.

    The header is read first, and never more than one byte beyond what it announces, however much the file unpacks to.
    """
    try:
        with gzip.open(path) as file:
            return _read(path, file)
    except FileNotFoundError:
        raise DataError(f"The data file {path} must exist, and does not.") from None
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} must be a whole gzip file. It is cut short or damaged ({error}). Fetch it again."
        ) from None
    except (gzip.BadGzipFile, OSError) as error:
        raise DataError(f"{path} must be a readable gzip file. It is not ({error}). Fetch it again.") from None


def _read(path: Path, file: gzip.GzipFile) -> npt.NDArray[Any]:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or start[3] == 0:
        raise DataError(f"{path} must hold an idx file. Its first bytes are {start.hex(' ')!r}, which begin none.")
    dtype = np.dtype(_TYPES[start[2]])
    dimensions = start[3]
    sizes = file.read(4 * dimensions)
    if len(sizes) != 4 * dimensions:
        raise DataError(
            f"{path} must hold a header and values. It has {4 + len(sizes)} bytes, and {dimensions} dimensions were "
            "announced. Fetch it again."
        )
    shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
    announced = math.prod(shape) * dtype.itemsize
    named = " x ".join(map(str, shape))
    if announced > _LARGEST:
        raise DataError(
            f"{path} must hold at most {_LARGEST} bytes of values. Its header announces {named}, which take "
            f"{announced} bytes. Fetch it again."
        )
    values = _at_most(file, announced + 1)
    if len(values) != announced:
        came = f"{len(values)} bytes" if len(values) < announced else "more"
        raise DataError(
            f"{path} must hold {named} values. It has {came}, and {announced} bytes of them were announced. "
            "Fetch it again."
        )
    return np.frombuffer(values, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _at_most(file: gzip.GzipFile, size: int) -> bytes:
    """The next bytes of a file, up to a number; takes no more memory than there are bytes."""
    pieces = []
    left = size
    while left and (piece := file.read(min(left, _PIECE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
