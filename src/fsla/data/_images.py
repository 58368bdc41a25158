"""Images of any size and colour as equal arrays of bytes."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fsla._storage._files import open_regular
from fsla.data._dataset import Array

MAX_PIXELS = 64 * 1024 * 1024
"""Pixels of the largest image that is decoded."""
LARGEST = 64
"""Images that all have one size are brought to another only above this many pixels a side."""
SIDE = 32
"""Pixels a side that other images are brought to."""
DENSE = 256
"""Largest number of pixel values among the dense features."""


class ImageForm(NamedTuple):
    """What images are brought to."""

    height: int
    width: int
    channels: int


def inside(folder: Path, cell: str, row: int) -> Path:
    """Return the path of an image that a table names.

    Raises:
        ValueError: if it leaves the folder of the table, by a link too.
    """
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, cell))
    if not cell.strip() or os.path.commonpath([root, path]) != root:
        what = f"names {cell!r}, which is outside {folder}" if cell.strip() else "names no image"
        raise ValueError(f"Row {row + 1} {what}. Put the images into the folder of the table, and name relative paths.")
    return Path(root) / cell


def image_form(items: Sequence[Any], size: int | None) -> ImageForm:
    """Return the form for a data set: one size for all, grey only if all are grey."""
    forms = set()
    for item in items:
        with _open(item) as image:
            forms.add((image.height, image.width, 1 if _is_grey(image) else 3))
    sizes = {form[:2] for form in forms}
    height, width = sizes.pop() if len(sizes) == 1 else (SIDE, SIDE)
    if max(height, width) > LARGEST:
        height = width = SIDE
    if size is not None:
        height = width = size
    return ImageForm(height, width, max(form[2] for form in forms))


def load_images(items: Sequence[Any], form: ImageForm) -> Array:
    """Return images x height x width x channels, uint8."""
    pixels = np.empty((len(items), *form), dtype=np.uint8)
    for i, item in enumerate(items):
        with _open(item) as image:
            plain = _plain(image, form.channels, _name(item))
            if (plain.height, plain.width) != form[:2]:
                plain = plain.resize((form.width, form.height), resample=2)
            pixels[i] = np.asarray(plain).reshape(form)
    return pixels


def thumbnail(item: Any, side: int = 256) -> bytes:
    """Return an image as PNG, at most `side` pixels a side."""
    buffer = io.BytesIO()
    with _open(item) as image:
        small = _plain(image, 1 if _is_grey(image) else 3, _name(item))
    small.thumbnail((side, side))
    small.save(buffer, format="PNG")
    return buffer.getvalue()


def pixel_features(images: Array) -> Array:
    """Return pixels between 0 and 1, averaged over squares until there are few enough."""
    pixels = images.astype(np.float64) / 255
    while pixels[0].size > DENSE and min(pixels.shape[1:3]) > 1:
        h, w = pixels.shape[1] // 2 * 2, pixels.shape[2] // 2 * 2
        pixels = pixels[:, :h, :w].reshape(len(pixels), h // 2, 2, w // 2, 2, -1).mean(axis=(2, 4))
    return pixels.reshape(len(pixels), -1)


@contextmanager
def _open(item: Any) -> Iterator[Any]:
    """Open an image, whose pixels are not decoded yet, for the block."""
    from PIL import Image

    with ExitStack() as stack:
        if isinstance(item, str | Path):
            try:
                file = stack.enter_context(open(open_regular(Path(item), os.O_RDONLY), "rb"))
            except OSError as error:
                reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
                raise ValueError(f"Cannot read the image {_name(item)}: {reason}.") from error
            image: Any = _decoded(file, item)
        elif isinstance(item, bytes):
            image = _decoded(io.BytesIO(item), item)
        elif isinstance(item, np.ndarray):
            image = Image.fromarray(_as_bytes(item))
        elif hasattr(item, "convert"):
            image = item.copy()
        else:
            raise ValueError(f"Cannot use {type(item).__name__} as an image. Name the path of an image.")
        stack.enter_context(image)
        if image.width * image.height > MAX_PIXELS:
            size = f"{image.width} x {image.height}"
            raise ValueError(
                f"Cannot read the image {_name(item)}: {size} pixels are more than {MAX_PIXELS}. Shrink it."
            )
        yield image


def _decoded(file: Any, item: Any) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is the limit
            return Image.open(file)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else str(error)
        raise ValueError(f"Cannot read the image {_name(item)}: {reason}.") from error


def _as_bytes(array: Array) -> Array:
    """Return an array of one image as bytes."""
    values = array if array.dtype == np.uint8 else np.clip(array * (255 if array.max(initial=0) <= 1 else 1), 0, 255)
    pixels: Array = values.astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] not in (3, 4):
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] in (1, 3, 4) else pixels
        pixels = pixels[:, :, 0] if pixels.shape[2] in (1, 2) else pixels
    return pixels


def _is_grey(image: Any) -> bool:
    return image.mode in ("1", "L", "LA", "I", "F") or image.mode.startswith("I;16")


def _plain(image: Any, channels: int, name: str) -> Any:
    """Return an image upright, on white where it is transparent, grey or in colour."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I") or image.mode == "F":  # 16 bits and more
            values = np.asarray(image, dtype=np.float64)
            top = values.max(initial=0)
            values = values / (257 if 255 < top <= 65535 else max(top, 255) / 255)
            image = Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
        if "A" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"Cannot read the image {name}: {error}.") from error


def _name(item: Any) -> str:
    return str(item) if isinstance(item, str | Path) else getattr(item, "filename", "") or "in the table"
