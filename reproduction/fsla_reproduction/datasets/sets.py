"""The data sets: where their files are, and how they are read.

Files are read from `--data-dir` or the folder that FSLA_DATA names, as FOLDER/NAME/FILE; without either, from
the user's cache; and what the cache lacks is downloaded from the data set's public home, with its checksum. `digits`
comes with scikit-learn and needs no file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsla._checks import pick
from fsla_reproduction.datasets.download import Bar, Downloader, DownloadRefused, Limits
from fsla_reproduction.datasets.idx import DataError, read_idx


class File(NamedTuple):
    """A published file.

    Args:
        name: its name.
        digest: its SHA-256. Of QMNIST's images only the MD5 is published, which a forger could match.
    """

    name: str
    digest: str

    @property
    def algorithm(self) -> str:
        """The name of the digest's algorithm, by its length."""
        return "sha256" if len(self.digest) == 64 else "md5"


@dataclass(frozen=True)
class Source:
    """The public home of a data set, and its four files with the checksums of what is served there."""

    home: str
    train_images: File
    train_labels: File
    test_images: File
    test_labels: File

    @property
    def files(self) -> tuple[File, ...]:
        return self.train_images, self.train_labels, self.test_images, self.test_labels


def _classic(home: str, *digests: str) -> Source:
    names = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return Source(home, *(File(f"{name}.gz", m) for name, m in zip(names, digests, strict=True)))


SOURCES = {
    "mnist": _classic(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    "fashion-mnist": _classic(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    "qmnist": Source(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
        File("qmnist-train-images-idx3-ubyte.gz", "ed72d4157d28c017586c42bc6afe6370"),
        File("qmnist-train-labels-idx2-int.gz", "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f"),
        File("qmnist-test-images-idx3-ubyte.gz", "1394631089c404de565df7b7aeaf9412"),
        File("qmnist-test-labels-idx2-int.gz", "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06"),
    ),
}
NAMES = ("digits", *SOURCES)
CLASSES = 10


class Images(NamedTuple):
    """A data set: images as (count, 1, height, width) in [0, 1], labels as whole numbers, and where they came from."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    origin: str


def fingerprint(images: Images) -> str:
    """A checksum of the images and labels, wherever they came from."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (images.train_x, images.train_y, images.test_x, images.test_y):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def folder_of(data_dir: Path | None) -> Path | None:
    """The folder that was asked for: --data-dir, else FSLA_DATA, else none."""
    if data_dir is None and os.environ.get("FSLA_DATA"):
        data_dir = Path(os.environ["FSLA_DATA"])
    return data_dir


def cache() -> Path:
    """The user's cache folder for data."""
    import pooch

    return Path(pooch.os_cache("fsla"))


def load(name: str, data_dir: Path | None = None, *, progress: Bar | None = None) -> Images:
    """Return a data set; downloads it into the cache if no folder was asked for and the cache lacks it."""
    pick(name, dict.fromkeys(NAMES), "data set")
    if name == "digits":
        return _digits()
    folder = folder_of(data_dir)
    if folder is None:
        folder = cache()
        fetch(name, folder, progress=progress)
    paths, origin = _paths(name, folder)
    train_x = _images(paths[0])
    train_y = _labels(paths[1])
    test_x = _images(paths[2])
    test_y = _labels(paths[3])
    for part, images, labels in (("training", train_x, train_y), ("test", test_x, test_y)):
        if not _agree(name, part, len(images), len(labels)):
            raise DataError(
                f"{name} must have one label for each image. Its {part} files in {folder} hold {len(images)} images "
                f"and {len(labels)} labels."
            )
    return Images(
        _scaled(train_x),
        torch.from_numpy(train_y),
        _scaled(test_x),
        torch.from_numpy(test_y[: len(test_x)]),
        origin,
    )


def _scaled(images: npt.NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(images)[:, None].float() / 255


def _agree(name: str, part: str, images: int, labels: int) -> bool:
    """Whether there is a label for each image. QMNIST has more test labels than MNIST has images."""
    return labels >= images if name == "qmnist" and part == "test" else labels == images


def _digits() -> Images:
    """scikit-learn's 1797 images of 8 x 8; every third one is for testing."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    x = torch.from_numpy(data.images).float()[:, None] / 16
    y = torch.from_numpy(data.target).long()
    test = torch.arange(len(y)) % 3 == 2
    return Images(x[~test], y[~test], x[test], y[test], "scikit-learn")


def _images(path: Path) -> npt.NDArray[np.uint8]:
    array = read_idx(path)
    if array.ndim != 3 or array.dtype != np.uint8:
        raise DataError(f"{path} must hold images (idx3, bytes). It holds {array.ndim} dimensions of {array.dtype}.")
    return array


def _labels(path: Path) -> npt.NDArray[np.int64]:
    array = read_idx(path)
    if array.ndim == 2:  # QMNIST's extended labels: column 0 is the class
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise DataError(
            f"{path} must hold labels (idx1, or idx2 with the class first). It holds {array.ndim} dimensions."
        )
    if len(array) and not (int(array.min()) >= 0 and int(array.max()) < CLASSES):
        raise DataError(
            f"{path} must hold labels from 0 to {CLASSES - 1}. It holds labels from {array.min()} to {array.max()}."
        )
    return array.astype(np.int64)


def _paths(name: str, folder: Path) -> tuple[list[Path], str]:
    """The four files of a data set. Where QMNIST's images are missing, MNIST's serve: the same in the same order."""
    paths = [folder / name / f.name for f in SOURCES[name].files]
    origin = "own files"
    if name == "qmnist":
        for i, file in ((0, SOURCES[name].train_images), (2, SOURCES[name].test_images)):
            if not paths[i].exists() and _substitute(folder, file).exists():
                paths[i] = _substitute(folder, file)
                origin = "QMNIST labels, MNIST images"
    missing = [p for p in paths if not p.exists()]
    if missing:
        raise DataError(missing_text(name, missing))
    return paths, origin


def _substitute(folder: Path, file: File) -> Path:
    """MNIST's images in the place of QMNIST's."""
    mnist = SOURCES["mnist"]
    return folder / "mnist" / (mnist.train_images if "train" in file.name else mnist.test_images).name


def missing_text(name: str, missing: list[Path], why: str = "") -> str:
    return (
        f"The data set {name} needs files that are not there{why}. Put them in place, from {SOURCES[name].home}: "
        + ", ".join(str(p) for p in missing)
        + ". Or name a folder that has them, as FOLDER/NAME/FILE, with --data-dir or FSLA_DATA."
    )


def fetch(
    name: str,
    folder: Path,
    *,
    home: str | None = None,
    progress: Bar | None = None,
    tries: int = 3,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Path]:
    """Download what the folder lacks of a data set, with checksums and within limits; return the four paths."""
    import pooch

    source = pick(name, SOURCES, "data set to fetch")
    store = pooch.create(
        path=folder / name,
        base_url=home or source.home,
        registry={f.name: f"{f.algorithm}:{f.digest}" for f in source.files},
        retry_if_failed=tries,
    )
    pooch.get_logger().setLevel("ERROR")
    paths = [folder / name / f.name for f in source.files]
    for file, path in zip(source.files, paths, strict=True):
        if path.exists():
            continue  # whatever the user has put there is used; `fsla data check` tells if it is whole
        try:
            store.fetch(file.name, downloader=Downloader(limits or Limits(), progress=progress, clock=clock))
        except DownloadRefused as error:
            raise DataError(str(error)) from None
        except ValueError as error:  # pooch keeps no file whose checksum is wrong
            raise DataError(f"The download of {file.name} must have the checksum {file.digest}. {error}") from None
        except Exception as error:  # every kind of network trouble
            why = f", and cannot be downloaded ({type(error).__name__})"
            raise DataError(missing_text(name, [p for p in paths if not p.exists()], why)) from None
    return paths


class Check(NamedTuple):
    """One file of a data set: its path and its description; `good` is False if it cannot be used."""

    path: Path
    good: bool
    text: str


def check(name: str, folder: Path) -> list[Check]:
    """Read every file of a data set in a folder and report what it holds."""
    if name == "digits":
        return [Check(Path("scikit-learn"), True, "part of the package")]
    source = SOURCES[name]
    results = []
    for part, image_file, label_file in (
        ("training", source.train_images, source.train_labels),
        ("test", source.test_images, source.test_labels),
    ):
        images, number = _check_file(name, folder, image_file, _images)
        labels, number_of_labels = _check_file(name, folder, label_file, _labels)
        if images.good and labels.good and not _agree(name, part, number, number_of_labels):
            labels = labels._replace(good=False, text=f"{labels.text}; but there are {number} {part} images")
        results += [images, labels]
    return results


def _check_file(name: str, folder: Path, file: File, read: Callable[[Path], npt.NDArray[Any]]) -> tuple[Check, int]:
    """The description of a file, and how many images or labels it holds."""
    path = folder / name / file.name
    stands_in = ""
    if not path.exists() and name == "qmnist" and read is _images:
        path = _substitute(folder, file)
        stands_in = "MNIST's, which stand in; "
    if not path.exists():
        return Check(path, False, f"missing; `fsla data fetch {name}` downloads it"), 0
    try:
        shape = read(path).shape
        same = hashlib.new(file.algorithm, path.read_bytes(), usedforsecurity=False).hexdigest() == file.digest
    except (DataError, OSError) as error:
        return Check(path, False, str(error)), 0
    known = "as published" if same else "readable, but not the published file"
    return Check(path, True, f"{stands_in}{' x '.join(map(str, shape))}; {known}"), shape[0]
