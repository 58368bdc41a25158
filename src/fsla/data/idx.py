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


class DataError(ValueError):
    """A data file that is missing, damaged or not what it should be; the text is the whole message."""


def read_idx(path: Path) -> npt.NDArray[Any]:
    """Returns the array in a gzipped idx file, checked to be whole."""
    try:
        with gzip.open(path) as file:
            raw = file.read()
    except FileNotFoundError:
        raise DataError(f"The data file {path} must exist, and does not.") from None
    except (EOFError, zlib.error) as error:
        raise DataError(
            f"{path} must be a whole gzip file. It is cut short or damaged ({error}). Fetch it again."
        ) from None
    except (gzip.BadGzipFile, OSError) as error:
        raise DataError(f"{path} must be a readable gzip file. It is not ({error}). Fetch it again.") from None
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or raw[3] == 0:
        raise DataError(f"{path} must hold an idx file. Its first bytes are {raw[:4].hex(' ')!r}, which begin none.")
    dtype, dimensions = np.dtype(_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(raw[4:start], ">u4")) if len(raw) >= start else ()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(shape) != dimensions or len(raw) != expected:
        raise DataError(
            f"{path} must hold {' x '.join(map(str, shape)) or 'a header and'} values. It has {len(raw)} bytes, and "
            f"{expected} were announced. Fetch it again."
        )
    return np.frombuffer(raw, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
