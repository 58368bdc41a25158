"""Rows that wait until they are seen: the numbers of a sweep over all of λ, in one process and in several."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fsla
import lazy_rows_program
from fsla import Batch, LazyRowOptimizer, Point, StepBatches, WeightedLossProblem, algorithms
from fsla._tree import dense, flatten
from fsla.contrib import _shard_files as shard_files
from fsla.contrib import load_shards, reshard, save_shards
from fsla.contrib._decay import Decay, RowTable
from fsla.distributed import BatchShard, DataParallelReducer, IndexRange, ShardedSampler, get_group
from fsla.problems import Sampler
from fsla.steps import EMA, SPIDER, Ball, Box, Schedule, constant
from fsla.train import CheckpointError, load_checkpoint, save_checkpoint
from launch import torchrun
from lazy_rows_program import SAMPLES, gap, weighted
from support import F64, normal


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.sampled_from([0.0, 1e-3, 0.1, 0.5, 0.99, 1.0]) | st.floats(0, 1)), max_size=40
    ),
    st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_decay_equals_loop(steps, block):
    decay = Decay(block=block)
    for k in range(len(steps) + 1):
        D, A = decay.decay_from(torch.arange(k + 1))
        for t in range(k + 1):
            factor, moved = 1.0, 0.0
            for alpha, keep in steps[t:k]:
                moved += alpha * factor
                factor *= keep
            assert abs(float(D[t]) - factor) <= 1e-13 * factor + 1e-280
            assert abs(float(A[t]) - moved) <= 1e-13 * moved + 1e-280
        if k < len(steps):
            decay.append(*steps[k])


def test_decay_over_many_steps_is_stable():
    """κ = .1 for 5000 steps, whose product is 1e-5000, then 1 - 1e-6, then one κ = 0, and 1 again."""
    decay = Decay()
    for k in range(6000):
        decay.append(1.0, 0.1 if k < 5000 else 0.0 if k == 5500 else 1 - 1e-6)
    D, A = decay.decay_from(torch.tensor([0, 4999, 5000, 5501, 6000]))
    stay = 1 - 1e-6
    expected = [
        1 / 0.9,
        1 + 0.1 * (1 - stay**501) / 1e-6,
        (1 - stay**500) / 1e-6 + stay**500,
        (1 - stay**499) / 1e-6,
        0,
    ]
    expected[1] = 1 + 0.1 * expected[2]
    assert torch.allclose(A, torch.tensor(expected, dtype=F64), rtol=1e-9)
    assert D.tolist()[:3] == [0, 0, 0]
    assert abs(float(D[3]) - stay**499) < 1e-12
    assert float(D[4]) == 1
    assert bool((decay._steps[0] == 0).any())
    smallest = decay._steps[0][decay._steps[0] > 0].min()
    assert float(smallest) > 1e-300  # no number that is slow to compute with stays


FALLING = Schedule(10.0, 0.2, 0.2, 0.9, power=0.5)
CASES = {
    "none": algorithms.fsla(constant(1.0, 0.2, 0.2), momentum="none"),
    "average": algorithms.fsla(FALLING, momentum="average"),
    "storm": algorithms.fsla(FALLING),
    "storm, η = 1 for a while": algorithms.fsla(Schedule(10.0, 0.2, 0.2, 5.0, power=0.5)),
    "average, η = .9": algorithms.fsla(constant(1.0, 0.2, 0.2, 0.9), momentum="average"),
    "average, η = .01": algorithms.fsla(constant(1.0, 0.2, 0.2, 0.01), momentum="average"),
    "storm in a box": algorithms.fsla(Schedule(100.0, 0.2, 0.2, 0.9, power=0.5), projection=Box(-0.05, 0.05)),
    "average, v at the new ω": algorithms.fsla(FALLING, momentum="average", adjoint_at="new_params"),
    "soba": algorithms.soba(constant(3.0, 0.2, 0.2)),
    "ma_soba": algorithms.ma_soba(constant(3.0, 0.2, 0.2, 0.1)),
    "ma_soba in a box": algorithms.ma_soba(constant(9.0, 0.2, 0.2, 0.1), projection=Box(-0.05, 0.05)),
}
LONG = ("none", "storm, η = 1 for a while", "average, η = .9", "average, η = .01", "storm in a box")
SHORT = {
    "amigo": algorithms.amigo(constant(3.0, 0.2, 0.2), inner_steps=2, hvp_steps=3),
    "truncated_bp": algorithms.truncated_bp(constant(3.0, 0.2, 0.2), inner_steps=4, unroll_length=2),
    "bp": algorithms.bp(constant(3.0, 0.2, 0.2, 0.1)),
    "cg": algorithms.cg(constant(3.0, 0.2, 0.2, 0.1), hvp_steps=3),
    "fsla_spider": fsla.Alternating(step_sizes=fsla.steps.PeriodicRefresh(FALLING, 7), momentum=SPIDER()),
    "averaged last": fsla.Alternating(step_sizes=FALLING, momentum=EMA(), outer_last=True),
    "average, one step in three": replace(algorithms.fsla(FALLING, momentum="average"), outer_every=3),
    "soba, one step in three": replace(algorithms.soba(constant(3.0, 0.2, 0.2)), outer_every=3),
}


def samples(algorithm, count, mode="independent", size=8, seed=0):
    """Small ranges beside large ones, so that some rows are drawn twice in a batch and others hardly ever."""
    generator = torch.Generator().manual_seed(seed)

    def inner():
        often = torch.randint(6, (size // 2,), generator=generator)
        return torch.cat([often, torch.randint(SAMPLES, (size - size // 2,), generator=generator)])

    def outer():
        return torch.randint(lazy_rows_program.TRUSTED, (8,), generator=generator)

    draw = Sampler(algorithm.batches, inner, outer, mode)
    return [draw() for _ in range(count)]


def both(algorithm, drawn):
    problem, at = weighted()
    state = algorithm.init(problem, at, drawn[0])
    run = LazyRowOptimizer(algorithm, problem, at, drawn[0])
    for batches in drawn[1:]:
        state = algorithm.step(problem, state, batches)
        run.step(batches)
    return state, run


@pytest.mark.parametrize("name", [*CASES, *SHORT])
def test_lazy_rows_equal_full_sweep(name):
    """In every tensor of λ, with three inner batches a step, and rows drawn twice."""
    algorithm = CASES.get(name) or SHORT[name]
    drawn = samples(algorithm, (501 if name in LONG else 201) if name in CASES else 41)
    state, run = both(algorithm, drawn)
    lam, d = run.rows(torch.arange(SAMPLES))
    assert gap(lam, state.lam.value) < 1e-12
    assert gap(d, state.direction) < 1e-12
    assert gap(run.state.omega.value, state.omega.value) < 1e-12
    assert torch.equal(flatten(run.weights()), flatten(lam))
    assert run.step_count == state.step_count
    if name.endswith("box"):
        assert 0.2 < float((flatten(lam).abs() == 0.05).double().mean()) < 0.98


def test_lazy_rows_start_outside_box_is_projected():
    algorithm = algorithms.fsla(constant(0.3, 0.2, 0.2, 0.5), projection=Box(-0.02, 0.02))
    state, run = both(algorithm, samples(algorithm, 30))
    assert gap(run.weights(), state.lam.value) < 1e-13


def test_lazy_rows_float32_use_twelve_bytes_per_weight():
    table = RowTable.init_rows({"w": torch.zeros(1).expand(1000)}, None)
    tensors = [*table.lam.values(), *table.d.values(), table.last]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == 12_000


def test_lazy_rows_accept_wrapped_problem_and_int32(tmp_path):
    problem, at = weighted()
    problem.row_index = lambda i: i.to(torch.int32)
    algorithm = CASES["storm"]
    drawn = samples(algorithm, 20)
    state = algorithm.init(fsla.DampedProblem(problem, 0.1), at, drawn[0])
    run = LazyRowOptimizer(algorithm, problem, at, drawn[0], wrap_problem=lambda p: fsla.DampedProblem(p, 0.1))
    for batches in drawn[1:]:
        state = algorithm.step(fsla.DampedProblem(problem, 0.1), state, batches)
        run.step(batches)
    assert gap(run.weights(), state.lam.value) < 1e-13


@pytest.mark.parametrize("name", ["storm", "ma_soba in a box", "soba"])
def test_lazy_rows_resume_exactly(name, tmp_path):
    algorithm = CASES[name]
    drawn = samples(algorithm, 81)
    problem, at = weighted()
    run = LazyRowOptimizer(algorithm, problem, at, drawn[0])
    for batches in drawn[1:41]:
        run.step(batches)
    save_checkpoint(tmp_path / "run", run.state_dict())
    again, beside = (LazyRowOptimizer(algorithm, problem, at, drawn[0]) for _ in range(2))
    again.load_state_dict(load_checkpoint(tmp_path / "run"))
    beside.load_state_dict(run.state_dict())
    for batches in drawn[41:]:
        a, b, _ = (
            run.step(batches),
            again.step(batches),
            beside.step(batches),
        )  # a copy, which does not write into the other
        assert torch.equal(flatten(a.omega.value), flatten(b.omega.value))
        assert torch.equal(flatten(a.direction), flatten(b.direction))
    assert torch.equal(flatten(run.weights()), flatten(again.weights()))
    assert torch.equal(flatten(run.weights()), flatten(beside.weights()))


def test_lazy_rows_restore_decay_between_blocks():
    a = Decay(block=4)
    for k in range(23):
        if k in (0, 7, 8, 9):
            a = Decay.from_state_dict(a.state_dict(), "cpu")
        a.append(0.5 + k, 0.9)
    b = Decay(block=4)
    for k in range(23):
        b.append(0.5 + k, 0.9)
    t = torch.arange(24)
    assert torch.equal(torch.stack(a.decay_from(t)), torch.stack(b.decay_from(t)))


# ----------------------------------------------------------------------------------------------- what is refused


REFUSED = {
    "a ball": (algorithms.fsla(FALLING, projection=Ball(1.0)), "Projected onto Ball"),
    "a common length": (algorithms.slip(FALLING), "outer update Normalized"),
    "STORM in SOBA's order": (algorithms.fdehbo(FALLING, max_adjoint_norm=1.0), "λ of the step before"),
    "SPIDER in SOBA's order": (algorithms.srba(FALLING), "λ of the step before"),
    "a matrix": (algorithms.rtho(FALLING), "estimator ForwardSensitivity"),
    "another algorithm": (algorithms.f2sa(FALLING), "Got F2sa"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lazy_rows_with_other_algorithm_raise(name):
    algorithm, what = REFUSED[name]
    problem, at = weighted()
    with pytest.raises(ValueError, match=rf"must move each row of λ by itself.*{what}.*or step the"):
        LazyRowOptimizer(algorithm, problem, at, samples(CASES["storm"], 1)[0])


def test_lazy_rows_with_other_problem_raise():
    problem, at = weighted()
    algorithm = CASES["storm"]
    (batches,) = samples(algorithm, 1)
    for other in (fsla.GaussNewtonProblem(problem), fsla.Problem(problem.inner_loss, problem.outer_loss)):
        with pytest.raises(TypeError, match=r"must be a fsla.WeightedLossProblem with row_index"):
            LazyRowOptimizer(algorithm, other, at, batches)
    problem.outer_uses_lam = True
    with pytest.raises(ValueError, match=r"must not read λ, or every row.*Say outer_uses_lam=False"):
        LazyRowOptimizer(algorithm, problem, at, batches)
    whole = WeightedLossProblem(
        problem.per_sample_loss, lambda lam, i: lam["w"][i], problem.outer_loss, outer_uses_lam=False
    )
    with pytest.raises(TypeError, match="without row_index"):
        LazyRowOptimizer(algorithm, whole, at, batches)


@pytest.mark.parametrize("read", [lambda lam: lam["w"].sum(), lambda lam: len(lam), lambda lam: sum(lam.values())])
def test_lazy_rows_detect_outer_loss_reading_lam(read):
    problem, at = weighted()
    outer = problem.outer_loss
    problem.outer_loss = lambda lam, omega, i: outer(lam, omega, i) + 0 * read(lam)
    algorithm = CASES["storm"]
    with pytest.raises(ValueError, match=r"must not read λ. It has read it"):
        LazyRowOptimizer(algorithm, problem, at, samples(algorithm, 1)[0])


def test_lazy_rows_missing_row_raises():
    problem, at = weighted()
    algorithm = CASES["storm"]
    first, second = samples(algorithm, 2)
    with pytest.raises(ValueError, match=r"a row for each of this rank's 101 samples.*\{'w': 101, 'pair': 7\}"):
        LazyRowOptimizer(algorithm, problem, Point({**at.lam, "pair": at.lam["pair"][:7]}, at.omega), first)
    with pytest.raises(ValueError, match="this rank's 25 samples"):
        LazyRowOptimizer(algorithm, problem, at, first, index_range=IndexRange(101, 0, 4))
    run = LazyRowOptimizer(algorithm, problem, at, first)
    with pytest.raises(IndexError, match=r"samples 0 … 100 of 101.*from 1 to 101"):
        run.step(second._replace(mixed_hvp=(Batch(torch.tensor([3, 101])),)))
    with pytest.raises(IndexError, match="must read samples of its own"):
        run.rows(torch.tensor([-1]))


def test_lazy_rows_box_with_sign_changing_rate_raises():
    problem, at = weighted()
    rates = Schedule(1.0, 0.2, 0.2, 1.5, clip_weight=False)
    for projection in (None, Box(-1, 1)):
        algorithm = algorithms.fsla(rates, momentum="average", projection=projection)
        drawn = samples(algorithm, 40)
        if projection is None:  # κ = -1/2 is as exact as any other
            state, run = both(algorithm, drawn)
            assert gap(run.weights(), state.lam.value) < 1e-12
            continue
        with pytest.raises(ValueError, match=r"only if outer_lr ≥ 0 and new_grad_weight ≤ 1.*new_grad_weight = 1.5"):
            LazyRowOptimizer(algorithm, problem, at, drawn[0]).step(drawn[1])


# ------------------------------------------------------------------------------------------- on several processes


def test_index_ranges_cover_all_samples():
    for n, world_size in ((101, 4), (7, 7), (10, 3)):
        parts = IndexRange(n, 0, world_size).full()
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == (0, n)
        assert sum(map(len, parts)) == n
    parts = IndexRange(101, 0, 4).full()
    samplers = [ShardedSampler(part, 9, seed=5) for part in parts]
    whole = ShardedSampler.global_batches(101, 4, 9, seed=5)
    counts = torch.zeros(4)
    for _ in range(4):
        batches = [sampler() for sampler in samplers]
        assert torch.equal(torch.cat([batch.batch for batch in batches]), whole())
        assert {batch.total for batch in batches} == {9}
        for part, batch in zip(parts, batches, strict=True):
            assert all(part.start <= i < part.stop for i in batch.batch.tolist())
        counts += torch.tensor([len(batch.batch) for batch in batches])
    assert counts.tolist() == [9, 9, 9, 9]  # in turn each rank draws one more
    saved = samplers[1].state_dict()
    expected = samplers[1]().batch
    samplers[1].load_state_dict(saved)
    assert torch.equal(samplers[1]().batch, expected)
    with pytest.raises(ValueError, match=r"must own one. Got 3 for 7 ranks"):
        ShardedSampler(IndexRange(3, 0, 7), 9, seed=0)


def test_sharded_sampler_collates_any_batch():
    sampler = ShardedSampler(IndexRange(10, 1, 2), 4, seed=0, collate_fn=lambda i: (i, 2 * i))
    index, double = sampler().batch
    assert torch.equal(2 * index, double)
    index, double = ShardedSampler.global_batches(10, 2, 4, seed=0, collate_fn=lambda i: (i, 2 * i))()
    assert torch.equal(2 * index, double)


@pytest.fixture
def group_of_one(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_batch_shard_is_part_of_mean(group_of_one):
    problem, at = weighted()
    reduced, _ = weighted(DataParallelReducer())
    v = {name: normal(*t.shape, seed=4) for name, t in at.omega.items()}
    batch = torch.tensor([5, 7, 5])
    part, whole = reduced.inner_at(at, Batch(BatchShard(batch, 12))), problem.inner_at(at, Batch(batch))
    h, j = part.products(v)
    expected_h, expected_j = whole.products(v)
    for actual, expected in ((part.grad_omega, whole.grad_omega), (h, expected_h), (dense(j), dense(expected_j))):
        assert gap(actual, {name: t / 4 for name, t in expected.items()}) < 1e-14
    sent = get_group().messages
    assert j["w"].index.tolist() == [5, 7, 5]
    part.mixed_hvp(v)
    assert get_group().messages == sent  # nothing of λ travels
    nothing = reduced.inner_at(at, Batch(BatchShard(batch[:0], 12)))
    assert not any(t.any() for t in nothing.grad_omega.values())
    assert len(nothing.mixed_hvp(v)["w"].index) == 0
    assert get_group().messages == sent + 1
    for total in (2, 0):
        with pytest.raises(ValueError, match=rf"must count the samples of all ranks. Got {total} with 3"):
            reduced.inner_at(at, Batch(BatchShard(batch, total)))


def test_row_index_passes_through_wrappers(group_of_one):
    problem, at = weighted()
    v = {name: normal(*t.shape, seed=4) for name, t in at.omega.items()}
    batch = Batch(torch.tensor([5, 7, 5]))
    reduced = fsla.DampedProblem(weighted(DataParallelReducer())[0], 0.1)
    reduced.inner_at(at, batch)  # settles how products are computed
    before = get_group().messages
    actual_view, expected_view = reduced.inner_at(at, batch), fsla.DampedProblem(problem, 0.1).inner_at(at, batch)
    for actual_product, expected in zip(actual_view.products(v), expected_view.products(v), strict=True):
        assert gap(dense(actual_product), dense(expected)) < 1e-14
    assert get_group().messages == before + 1
    view = reduced.outer_at(at, batch)
    assert gap(view.grad_omega, problem.outer_at(at, batch).grad_omega) < 1e-14
    assert len(view.grad_lam["w"].index) == 0


def test_lazy_rows_absent_from_batch_stay_on_rank(group_of_one):
    """A rank that draws no sample in a step takes part in it all the same."""
    algorithm = CASES["storm"]
    problem, at = weighted(DataParallelReducer())
    first, second, third = samples(algorithm, 3)

    def shards(batches, count):
        slots = ("inner_grad", "hvp", "mixed_hvp")
        slots_of_rank = {slot: (Batch(BatchShard(getattr(batches, slot)[0].data[:count], 8)),) for slot in slots}
        return batches._replace(**slots_of_rank)

    run = LazyRowOptimizer(algorithm, problem, at, shards(first, 8))
    run.step(shards(second, 0))
    assert len(run.state.lam.value["w"]) == 0
    run.step(shards(third, 8))
    assert run.step_count == 2


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two", "four"])
def ran(request, tmp_path_factory):
    """Several processes have run, and saved where they stood after 200 steps."""
    folder = tmp_path_factory.mktemp("ran")
    torchrun("lazy_rows_program.py", folder, 200, processes=request.param)
    return request.param, folder


def test_lazy_rows_on_ranks_equal_one_process(ran):
    """With batches of 9, which do not divide evenly, against a sweep on the batches of all ranks."""
    _, folder = ran
    gaps = json.loads((folder / "gaps").read_text())
    assert set(gaps) == set(lazy_rows_program.ALGORITHMS)
    for name, row in gaps.items():
        assert all(gap < 1e-9 for gap in row["gaps"]), (name, row)
        assert row["messages"] == 2  # ∂_ω G with H v, and ∂_ω F; nothing for the rows of J v


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_load_shards_reshards_exactly(ran):
    world_size, folder = ran
    place = folder / "storm"
    algorithm = lazy_rows_program.ALGORITHMS["storm"]
    problem, at = weighted()
    full_range = IndexRange(SAMPLES)
    parts = IndexRange(SAMPLES, 0, world_size).full()
    with pytest.raises(CheckpointError, match=rf"is of {world_size} ranks, and this one of 1 rank.*reshard"):
        load_shards(place, full_range)
    saved = [load_shards(place, part) for part in parts]
    reshard(place, 1)
    assert files(place) == ["manifest.fsla", "rank-0-of-1/step-200.safetensors"]
    one = load_shards(place, full_range)
    assert one.extra is None
    drawn = samples(algorithm, 20)
    run = LazyRowOptimizer(algorithm, problem, at, drawn[0])
    run.load_state_dict(one.state)
    expected = lazy_rows_program.swept(algorithm, 200, world_size)
    assert gap(run.weights(), expected.lam.value) < 1e-9
    for batches in drawn:  # goes on
        expected = algorithm.step(problem, expected, batches)
        run.step(batches)
    assert gap(run.weights(), expected.lam.value) < 1e-9
    reshard(place, world_size)
    for part, before in zip(parts, saved, strict=True):
        after = load_shards(place, part)
        for name in ("lam", "d"):
            assert torch.equal(flatten(after.state["rows"][name]), flatten(before.state["rows"][name]))
        assert torch.equal(after.state["rows"]["last"], before.state["rows"]["last"])
    with pytest.raises(ValueError, match="Start as many processes as wrote it, or call"):
        run.load_state_dict(load_shards(place, parts[0]).state)


def test_load_shards_of_other_files_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no run of fsla.contrib.save_shards"):
        load_shards(tmp_path, IndexRange(3))
    algorithm = CASES["storm"]
    problem, at = weighted()
    run = LazyRowOptimizer(algorithm, problem, at, samples(algorithm, 1)[0])
    save_shards(tmp_path, run, {"mine": normal(2)})
    assert torch.equal(load_shards(tmp_path, run.index_range).extra["mine"], normal(2))
    with pytest.raises(CheckpointError, match=r"has 101 samples, and this one has 7"):
        load_shards(tmp_path, IndexRange(7))
    with pytest.raises(ValueError, match=r"at most as many ranks. Got 102"):
        reshard(tmp_path, 102)
    save_checkpoint(tmp_path / "rank-0-of-1" / "step-0.safetensors", {"another": 1})
    with pytest.raises(CheckpointError, match="it holds a checkpoint, not the rows of a rank"):
        load_shards(tmp_path, run.index_range)
    (tmp_path / "manifest.fsla").write_text('{"format": "other"}')
    with pytest.raises(CheckpointError, match=r"Cannot read .*manifest\.fsla: it is no file of fsla"):
        load_shards(tmp_path, run.index_range)


def test_save_shards_interrupted_keeps_previous(tmp_path, monkeypatch):
    algorithm = CASES["soba"]
    problem, at = weighted()
    first, second = samples(algorithm, 2)
    run = LazyRowOptimizer(algorithm, problem, at, first)
    save_shards(tmp_path, run)
    before = run.weights()
    run.step(second)

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_files, "_publish", killed)  # all files are there, and none is named yet
    with pytest.raises(KeyboardInterrupt):
        save_shards(tmp_path, run)
    again = LazyRowOptimizer(algorithm, problem, at, first)
    again.load_state_dict(load_shards(tmp_path, run.index_range).state)
    assert again.step_count == 0
    assert torch.equal(flatten(again.weights()), flatten(before))


def test_save_shards_again_replaces_first(tmp_path):
    algorithm = CASES["soba"]
    problem, at = weighted()
    drawn = samples(algorithm, 3)
    run = LazyRowOptimizer(algorithm, problem, at, drawn[0])
    for batches in drawn:
        save_shards(tmp_path, run)
        run.step(batches)
    assert files(tmp_path) == ["manifest.fsla", "rank-0-of-1/step-2.safetensors"]


def test_lazy_rows_accept_full_batches():
    algorithm = CASES["none"]
    batches = StepBatches.shared(torch.arange(SAMPLES), torch.arange(10))
    state, run = both(algorithm, [batches] * 5)
    assert gap(run.weights(), state.lam.value) < 1e-15
