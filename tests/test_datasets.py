"""idx files, data sets, label noise, the task, endless batches."""

import gzip
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsla.problems import cycle
from fsla_reproduction.datasets import DataError, TaskSpec, corrupt, fingerprint, load, long_tail, make_task, sets
from fsla_reproduction.datasets.idx import read_idx
from idx_files import header, idx_bytes, images, labels, write


@pytest.fixture
def folder(tmp_path):
    """A small MNIST and QMNIST (labels only, as idx2-int with eight columns)."""
    source = sets.SOURCES["mnist"]
    for file, array in zip(source.files, (images(60), labels(60), images(20, 1), labels(20)), strict=True):
        write(tmp_path / "mnist" / file.name, array)
    extended = np.zeros((60, 8), ">i4")
    extended[:, 0] = labels(60)
    extended[:, 1] = 70000
    write(tmp_path / "qmnist" / sets.SOURCES["qmnist"].train_labels.name, extended)
    write(
        tmp_path / "qmnist" / sets.SOURCES["qmnist"].test_labels.name, np.concatenate([extended[:20]] * 2).astype(">i4")
    )
    return tmp_path


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from(["u1", ">i4"]))
@settings(max_examples=30, deadline=None)
def test_read_idx_round_trip(tmp_path_factory, shape, dtype):
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    path = tmp_path_factory.mktemp("idx") / "x.gz"
    write(path, array)
    actual = read_idx(path)
    assert actual.shape == array.shape
    assert (actual == array).all()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda raw: gzip.compress(raw)[:-20], "whole gzip file. It is cut short"),
        (lambda raw: gzip.compress(raw)[:200] + b"\0\0\0\0" + gzip.compress(raw)[204:], "gzip file"),
        (lambda raw: raw, "readable gzip file"),
        (lambda raw: gzip.compress(raw[:-1]), "were announced. Fetch it again"),
        (lambda raw: gzip.compress(raw + b"x"), "were announced"),
        (lambda raw: gzip.compress(raw[:9]), "announced"),
        (lambda raw: gzip.compress(b"PK" + raw), "must hold an idx file"),
        (lambda raw: gzip.compress(b""), "must hold an idx file"),
    ],
)
def test_read_idx_of_damaged_file_raises(tmp_path, damage, text):
    path = tmp_path / "x.gz"
    path.write_bytes(damage(idx_bytes(images(5))))
    with pytest.raises(DataError, match=text) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_read_idx_unpacks_announced_size_only(tmp_path):
    """64 MB of zeros after a header that announces 20 values: a small file that unpacks to a large one."""
    path = tmp_path / "x.gz"
    with gzip.open(path, "wb") as file:
        file.write(header(8, 5, 2, 2))
        for _ in range(64):
            file.write(bytes(2**20))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"5 x 2 x 2 values. It has more, and 20 bytes of them were announced"):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_read_idx_with_huge_header_raises(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(header(14, 2**31, 2**31) + bytes(100)))
    with pytest.raises(DataError, match=r"at most 2147483648 bytes of values. Its header announces 2147483648 x"):
        read_idx(path)


def test_load_mnist_reads_files(folder):
    data = load("mnist", folder)
    assert data.train_x.shape == (60, 1, 28, 28)
    assert data.test_y.tolist() == labels(20).tolist()
    assert torch.equal(data.train_x[:, 0], torch.from_numpy(images(60)).float() / 255)


def test_load_qmnist_uses_mnist_images(folder):
    data = load("qmnist", folder)
    assert data.train_y.tolist() == labels(60).tolist()
    assert len(data.test_y) == len(data.test_x) == 20
    assert data.origin == "QMNIST labels, MNIST images"


def test_data_dir_from_environment(folder, monkeypatch):
    monkeypatch.setenv("FSLA_DATA", str(folder))
    assert len(load("mnist").train_y) == 60


def test_load_with_missing_files_lists_paths(tmp_path):
    with pytest.raises(
        DataError, match=r"fashion-mnist needs files.*train-images-idx3-ubyte.gz.*--data-dir or FSLA_DATA"
    ):
        load("fashion-mnist", tmp_path)


def test_load_of_swapped_files_raises(folder):
    name = sets.SOURCES["mnist"]
    write(folder / "mnist" / name.train_labels.name, np.full(60, 10, "u1"))
    with pytest.raises(DataError, match=r"labels from 0 to 9. It holds labels from 10 to 10"):
        load("mnist", folder)
    write(folder / "mnist" / name.train_labels.name, labels(59))
    with pytest.raises(DataError, match="60 images and 59 labels"):
        load("mnist", folder)
    write(folder / "mnist" / name.train_labels.name, images(60))
    with pytest.raises(DataError, match="must hold labels"):
        load("mnist", folder)
    write(folder / "mnist" / name.train_images.name, labels(60))
    with pytest.raises(DataError, match="must hold images"):
        load("mnist", folder)


def test_load_of_unknown_dataset_raises():
    with pytest.raises(ValueError, match=r"'minst'.*Did you mean 'mnist'"):
        load("minst")


def test_load_digits_needs_no_files():
    data = load("digits")
    assert len(data.train_y) + len(data.test_y) == 1797
    assert data.train_x.shape[1:] == (1, 8, 8)
    assert 0 <= data.train_x.min() < data.train_x.max() <= 1


def test_check_reports_problem_of_each_file(folder):
    (folder / "mnist" / sets.SOURCES["mnist"].test_labels.name).write_bytes(b"junk")
    results = sets.check("mnist", folder)
    assert [c.good for c in results] == [True, True, True, False]
    assert "60 x 28 x 28; readable, but not the published file" in results[0].text
    qmnist = sets.check("qmnist", folder)
    assert [c.good for c in qmnist] == [True, True, True, True]
    assert "MNIST's, which stand in" in qmnist[0].text
    assert "`fsla data fetch fashion-mnist` downloads it" in sets.check("fashion-mnist", folder)[0].text
    assert sets.check("digits", folder)[0].good


def test_check_compares_numbers_of_labels_and_images(folder):
    write(folder / "mnist" / sets.SOURCES["mnist"].train_labels.name, labels(59))
    results = sets.check("mnist", folder)
    assert [c.good for c in results] == [True, False, True, True]
    assert results[1].text.startswith("59; ")
    assert "there are 60 training images" in results[1].text
    extended = np.zeros((19, 8), ">i4")
    write(folder / "qmnist" / sets.SOURCES["qmnist"].test_labels.name, extended)
    assert [c.good for c in sets.check("qmnist", folder)] == [True, True, True, False]
    with pytest.raises(DataError, match="20 images and 19 labels"):
        load("qmnist", folder)


def test_fingerprint_ignores_path(folder):
    source = sets.SOURCES["mnist"]
    arrays = (images(60), labels(60), images(20, 1), labels(20))
    for file, array in zip(source.files, arrays, strict=True):
        write(folder / "again" / "mnist" / file.name, array)
    first = fingerprint(load("mnist", folder))
    assert first == fingerprint(load("mnist", folder / "again"))
    for file, array in zip(source.files, arrays, strict=True):
        changed = array.copy()
        changed[7] = (changed[7] + 1) % 10
        write(folder / "again" / "mnist" / file.name, changed)
        assert fingerprint(load("mnist", folder / "again")) != first
        write(folder / "again" / "mnist" / file.name, array)
    assert first == fingerprint(load("mnist", folder / "again"))


CASES = st.tuples(st.sampled_from(["uniform", "wrong", "pair"]), st.floats(0, 1), st.integers(0, 10**6))


@given(CASES)
@settings(max_examples=50, deadline=None)
def test_corrupt_flips_requested_share(case):
    kind, rate, seed = case
    true = torch.arange(500) % 10
    noise = corrupt(true, 10, kind, rate, torch.Generator().manual_seed(seed))
    again = corrupt(true, 10, kind, rate, torch.Generator().manual_seed(seed))
    assert torch.equal(noise.labels, again.labels)
    assert torch.equal(noise.changed, noise.labels != true)  # the exact mask
    assert noise.labels.min() >= 0
    assert noise.labels.max() < 10
    number = int(noise.changed.sum())
    if kind == "uniform":
        assert number <= round(rate * 500)
    else:
        assert number == round(rate * 500)
    if kind == "pair":
        assert torch.equal(noise.labels[noise.changed], (true[noise.changed] + 1) % 10)


def test_corrupt_uniform_keeps_a_tenth():
    true = torch.zeros(20_000, dtype=torch.long)
    noise = corrupt(true, 10, "uniform", 0.8, torch.Generator().manual_seed(0))
    assert float(noise.changed.double().mean()) == pytest.approx(0.72, abs=0.01)
    counts = torch.bincount(noise.labels[noise.changed], minlength=10)[1:]
    assert counts.min() > 0.9 * counts.double().mean()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.arange(10), 10, "uniform", 1.2), "between 0 and 1. Got 1.2: of 10 samples, 12 would be corrupted"),
        ((torch.arange(10), 10, "uniform", -0.1), "between 0 and 1"),
        ((torch.arange(10), 10, "unform", 0.1), "Did you mean 'uniform'"),
        ((torch.arange(10), 9, "uniform", 0.1), "between 0 and 8. Got 0 to 9"),
    ],
)
def test_corrupt_invalid_noise_raises(args, text):
    with pytest.raises(ValueError, match=text):
        corrupt(*args, torch.Generator())


def test_long_tail_falls_geometrically():
    true = torch.arange(10_000) % 10
    index = long_tail(true, 10, 20.0, torch.Generator().manual_seed(0))
    counts = torch.bincount(true[index], minlength=10)
    assert counts[0] / counts[9] == pytest.approx(20, rel=0.05)
    assert (counts[:-1] >= counts[1:]).all()
    assert len(index) == len(set(index.tolist()))


def test_make_task_depends_on_seed(folder):
    spec = TaskSpec("mnist", n_train=30, n_valid=20, seed=3)
    one, two = make_task(spec, data_dir=folder), make_task(spec, data_dir=folder)
    for a, b in zip(one, two, strict=True):
        assert a == b if not isinstance(a, torch.Tensor) else torch.equal(a, b)
    assert torch.equal(one.changed, one.train_y != one.true_y)
    assert float(one.train_x.mean()) == pytest.approx(0, abs=1e-5)
    assert float(one.train_x.std()) == pytest.approx(1, abs=1e-5)
    other = make_task(TaskSpec("mnist", n_train=30, n_valid=20, seed=4), data_dir=folder)
    assert not torch.equal(one.train_x, other.train_x)
    train, valid = ({tuple(x.flatten().tolist()) for x in xs} for xs in (one.train_x, one.valid_x))
    assert not train & valid


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n_train": 50, "n_valid": 11}, r"must fit into mnist's 60 training images. Got 50 \+ 11"),
        ({"n_train": 0}, "'n_train' of TaskSpec must be at least 1"),
        ({"rate": 1.5}, "between 0 and 1"),
        ({"inputs": "raw"}, "scaling of the inputs"),
    ],
)
def test_task_spec_invalid_value_raises(folder, changes, text):
    with pytest.raises(ValueError, match=text):
        make_task(TaskSpec("mnist", **({"n_train": 10, "n_valid": 10} | changes)), data_dir=folder)


def test_cycle_repeats_loader():
    batches = cycle([1, 2, 3])
    assert [next(batches) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_cycle_reshuffles_loader():
    data = torch.arange(20)
    generator = torch.Generator().manual_seed(0)
    batches = cycle(torch.utils.data.DataLoader(data, batch_size=5, shuffle=True, generator=generator))
    rounds = [torch.cat([next(batches) for _ in range(4)]) for _ in range(3)]
    for epoch in rounds:
        assert torch.equal(epoch.sort().values, data)
    assert not torch.equal(rounds[0], rounds[1])
    assert not torch.equal(rounds[1], rounds[2])


def test_cycle_of_empty_loader_raises():
    with pytest.raises(ValueError, match=r"at least one batch each time round. The list is empty"):
        next(cycle([]))


def test_cycle_of_iterator_raises():
    batches = cycle(x for x in (1, 2))
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match=r"The generator gave its batches once and has ended. Pass a DataLoader"):
        next(batches)
