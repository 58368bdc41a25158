"""The benchmark of images: its sets, drawn from files of the published formats."""

import gzip
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fsla.data import _network_learners
from fsla.data._network_learners import Recipe
from fsla_benchmarks.data import images
from fsla_benchmarks.steps.results import FOLDER

ROOT = Path(__file__).parents[1]


def write_idx(path, array):
    """Write an array of bytes as a gzipped idx file."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


@pytest.fixture
def digits_folder(tmp_path):
    """Return a folder with digits in the form of MNIST."""
    data = load_digits()
    pixels, labels = np.pad(data.images * 15, ((0, 0), (3, 3), (3, 3))), data.target
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, rows in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels[rows])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels[rows])
    return tmp_path


def test_draw_replaces_share_of_labels_and_hides_those_of_checked_rows(digits_folder):
    """Checked rows have their true label and no vote; of the others about the stated share is wrong."""
    problem, labels = images.draw("mnist", digits_folder, 1000, 100, 0.4, 0, 50)
    data = problem.data
    assert data.features.images.shape == (1000, 14, 14, 1)
    assert len(problem.test) == len(problem.test_labels) == 50
    assert np.array_equal(data.checked_labels, problem.gold[:100])
    assert data.votes.row.min() == 100
    assert np.array_equal(data.votes.label, labels[100:])
    assert 0.35 < problem.wrong_votes.mean() < 0.45


@pytest.fixture
def cifar_folder(tmp_path):
    """Return a folder with images of one colour in the form of CIFAR-10N: 30 to train on and 10 to test."""
    folder = tmp_path / "cifar10n"
    folder.mkdir()
    arrays = {}
    for part, count in (("train", 30), ("test", 10)):
        encoded = []
        for index in range(count):
            buffer = io.BytesIO()
            Image.new("RGB", (32, 32), (8 * index, 0, 255 - 8 * index)).save(buffer, "JPEG", quality=95)
            encoded.append(np.frombuffer(buffer.getvalue(), np.uint8))
        arrays[part] = np.concatenate(encoded)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, encoded)])
    np.savez(folder / "images.npz", **arrays)
    clean = np.arange(30) % 10
    np.savez(folder / "labels.npz", clean=clean, random1=(clean + 1) % 10, test=np.arange(10))
    return tmp_path


def test_draw_of_cifar10n_takes_labels_that_people_gave(cifar_folder):
    """The files hold JPEG bytes one after the other; label and image must stay together."""
    problem, labels = images.draw("cifar10n", cifar_folder, 20, 5, 0.0, 0, 10)
    number = problem.data.features.images[..., 0].mean((1, 2)).round() / 8
    assert np.array_equal(number.round().astype(int) % 10, problem.gold)
    assert np.array_equal(labels, (problem.gold + 1) % 10)


def test_packed_folder_is_smaller_and_draws_the_same(cifar_folder, tmp_path, monkeypatch, capsys):
    """A machine with a GPU gets the rows of the stated seeds alone, and must measure the same."""
    small = tmp_path / "small"
    command = ["images", "--rows", "8", "--seeds", "3,4", "--data-dir", str(cifar_folder), "--pack", str(small)]
    monkeypatch.setattr(sys, "argv", command)
    images.main()
    assert capsys.readouterr().out.strip() == str(small / "cifar10n")
    for seed in (3, 4):
        (whole, labels), (packed, same) = (
            images.draw("cifar10n", folder, 8, 2, 0.0, seed, 10) for folder in (cifar_folder, small)
        )
        assert np.array_equal(whole.data.features.images, packed.data.features.images)
        assert np.array_equal(whole.test.images, packed.test.images)
        assert np.array_equal(labels, same)
    sizes = [(folder / "cifar10n" / "images.npz").stat().st_size for folder in (cifar_folder, small)]
    assert sizes[1] < sizes[0]


def test_parties_share_network_and_schedule(digits_folder, monkeypatch):
    """A user's own way is only a fair comparison with the same network, trained as long on the same rows."""
    problem, labels = images.draw("mnist", digits_folder, 300, 100, 0.4, 0, 50)
    trained = []

    def train(network, inputs, mass, task, recipe, **options):
        trained.append((network.options, len(inputs), float(mass.sum()), recipe))
        network.eval()

    for module in (_network_learners, images):
        monkeypatch.setattr(module, "train_network", train)
    outcome = images.measure(problem, labels, 0, device="cpu")
    assert set(images.PARTIES) < set(outcome)
    assert len({json.dumps(options) for options, *_ in trained}) == 1
    recipes = [recipe for *_, recipe in trained if recipe is not images.FINE_TUNING]
    assert len(trained) == len(recipes) + 1
    shorter = [recipe for recipe in recipes if recipe != Recipe()]
    assert len(shorter) == 5, "one trunk of the product for each fold"
    assert all(recipe.steps < Recipe().steps for recipe in shorter)
    everything = [mass for *_, mass, recipe in trained if recipe is not images.FINE_TUNING]
    assert everything.count(300.0) == 2 + images.NUM_AVERAGED


def test_page_has_the_table_of_its_results():
    """Figures of a page come from files of results; a table that is older than its file says what is not so."""
    page = (ROOT / "docs" / "benchmarks" / "data-quality.md").read_text(encoding="utf-8")
    for file in sorted(FOLDER.glob("images-*.json")):
        lines = images.write_table(json.loads(file.read_text(encoding="utf-8")))
        assert "\n".join([f"<!-- table {file.name} -->", "", *lines, ""]) in page


@pytest.mark.slow
def test_command_prints_share_of_gap_that_is_closed(digits_folder, monkeypatch, capsys):
    """The line must hold what the target names: accuracies with given and true labels, and by the product."""
    command = ["images", "--set", "mnist", "--rows", "800", "--checked", "150", "--data-dir", str(digits_folder)]
    command += ["--parties", "given,true,product"]
    monkeypatch.setattr(sys, "argv", command)
    images.main()
    line = json.loads(capsys.readouterr().out)
    assert line["given"]["accuracy"] < line["product"]["accuracy"]
    assert line["product"]["gap_closed"] > 0
