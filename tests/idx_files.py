"""Small idx files for tests."""

import gzip
import struct

import numpy as np


def header(code, *shape):
    return struct.pack(">HBB", 0, code, len(shape)) + struct.pack(f">{len(shape)}I", *shape)


def idx_bytes(array):
    return header({np.dtype("u1"): 8, np.dtype(">i4"): 12}[array.dtype], *array.shape) + array.tobytes()


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array), mtime=0))


def images(n, seed=0, side=28):
    return np.random.default_rng(seed).integers(0, 256, (n, side, side)).astype("u1")


def labels(n):
    return (np.arange(n) % 10).astype("u1")
