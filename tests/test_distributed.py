"""Several processes as torchrun starts them: the numbers of one, whatever is killed, and clear words for wrong use."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fsla import distributed as distributed
from fsla.distributed._watchdog import Positions
from fsla.train import CheckpointError
from fsla.train import _stores as stores
from launch import TESTS, finish, torchrun

PROGRAM = "fit_program.py"
STEPS = 24
KINDS = "plain,shards,own samples"


def gap(actual, expected):
    assert len(actual["values"]) == len(expected["values"])
    return float(np.abs(np.subtract(actual["values"], expected["values"])).max())


def fitted(folder, *kills, kinds="plain", steps=STEPS, **options):
    out = folder / "summary.json"
    folder.mkdir(exist_ok=True)
    torchrun(PROGRAM, "fit", out, folder, kinds, steps, *kills, **options)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("processes", "steps"), [pytest.param(2, 10), pytest.param(4, 200, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_fit_on_ranks_equals_one_process(processes, steps, tmp_path):
    """Plain, with DistributedDataParallel, and in shards with differences. Rates that follow from differences see
    their rounding, 1e-11 or so of a product, and pass it on from step to step."""
    torchrun(PROGRAM, "trajectories", tmp_path / "gaps", steps, processes=processes)
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert gaps.pop("moved") > 0.005
    assert len(gaps) == 17
    for name, gap_of_case in gaps.items():
        assert gap_of_case < (1e-6 if name.startswith("automatic, differences") else 1e-11), gaps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(folder):
    return fitted(folder)["plain"]


def test_fit_resumes_exactly_after_killed_rank(undisturbed, tmp_path):
    """Three kills, in three attempts, at moments from all over the run."""
    draw = random.Random(0)
    last = undisturbed["messages"]
    kills = [f"{draw.randrange(2)}:{draw.randrange(1, last - 1)}" for _ in range(3)]
    actual = fitted(tmp_path, ",".join(kills), restarts=3)["plain"]
    assert actual["values"] == undisturbed["values"]
    assert actual["records"] == undisturbed["records"]
    assert actual["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_fit_resumes_exactly_after_ten_killed_ranks(kind, tmp_path):
    expected = fitted(tmp_path / "undisturbed", kinds=kind, steps=60)[kind]
    draw = random.Random(1)
    resumed = set()
    for number in range(10):
        kill = f"{draw.randrange(2)}:{draw.randrange(1, expected['messages'] - 1)}"
        actual = fitted(tmp_path / str(number), kill, kinds=kind, steps=60, restarts=1)[kind]
        assert actual["values"] == expected["values"], kill
        assert actual["records"] == expected["records"], kill
        resumed.add(actual["resumed_from"])
    assert len(resumed) > 3


@pytest.fixture(scope="module")
def started_runs(tmp_path_factory):
    """Runs of two ranks, after eight steps."""
    folder = tmp_path_factory.mktemp("started")
    first = fitted(folder, kinds=KINDS, steps=8)
    assert [result["steps"] for result in first.values()] == [8, 8, 8]
    assert len(list((folder / "shards" / "checkpoint-00000008").glob("shard-*"))) == 2
    return folder


def test_fit_of_two_ranks_resumes_in_one_process(started_runs, undisturbed, tmp_path):
    shutil.copytree(started_runs, tmp_path / "copy")
    out = tmp_path / "summary.json"
    done = finish(sys.executable, TESTS / PROGRAM, "fit", out, tmp_path / "copy", "plain,own samples", STEPS)
    assert done.returncode == 0, done.stderr
    summaries = json.loads(out.read_text())
    assert "ranks that bring their own batches: 2 there, 1 wanted" in summaries["own samples"]
    assert summaries["plain"]["resumed_from"] == 8
    assert [record["step"] for record in summaries["plain"]["records"]] == [5, 8, 10, 15, 20, 24]
    assert gap(summaries["plain"], undisturbed) < 1e-9


@pytest.mark.slow
def test_fit_of_two_ranks_resumes_with_three(started_runs, undisturbed, tmp_path):
    shutil.copytree(started_runs, tmp_path / "copy")
    actual = fitted(tmp_path / "copy", kinds=KINDS, processes=3)
    assert "ranks that bring their own batches: 2 there, 3 wanted" in actual.pop("own samples")
    for kind in ("plain", "shards"):
        assert actual[kind]["resumed_from"] == 8
        assert gap(actual[kind], undisturbed) < 1e-9
        assert [record["step"] for record in actual[kind]["records"]] == [5, 8, 10, 15, 20, 24]


WRONG = {
    "settings": 'DistributedError: Ranks differ in their model and settings: hvp_method: "autograd" on rank 0',
    "data": "DistributedError: Ranks differ in their model and settings",
    "uneven": "DistributedError: With split_batches=False all ranks must bring as many samples. Got 8, 7 by rank.",
    "batches": "DistributedError: Ranks differ in their batches: inner batch",
    "sampler": "DistributedError: inner_loader must give every rank the same batches",
    "unsplit": "TypeError: A batch that ranks share must be tensors",
    "exact": "ValueError: A model in shards, as fully_shard makes it, must have hvp_method='finite_difference'",
}


def test_wrong_use_on_ranks_is_reported_by_rank_0(tmp_path):
    torchrun(PROGRAM, "wrong", tmp_path / "messages", *WRONG)
    first, second = (json.loads((tmp_path / f"messages{rank}").read_text()) for rank in (0, 1))
    for what, match in WRONG.items():
        assert first[what].startswith(match), first[what]
        assert second[what] == "SystemExit: 1", what


def test_wrong_use_on_ranks_ends_all_with_one_message():
    output = torchrun(PROGRAM, "wrong", "", "uneven", succeeds=False)
    assert output.count("Give the loaders drop_last=True") == 1


def test_watchdog_names_hanging_rank():
    """The program has another clock, which waits until rank 1 hangs: a busy machine makes no other rank late."""
    output = torchrun(PROGRAM, "wrong", "", "hang", succeeds=False, FSLA_RANK_TIMEOUT="1200")
    assert "fsla: rank 1 (" in output
    assert "made no progress for 1200 seconds" in output


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The results of each of three ranks."""
    folder = tmp_path_factory.mktemp("cases")
    torchrun("cases_program.py", folder, processes=3)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("what", ["a share does not read λ", "a share does not reach ω"])
def test_batch_check_covers_all_ranks(cases, what):
    """Its parts need not reach all that it reaches."""
    assert all(result[what] < 1e-14 for result in cases)


def test_buffers_on_ranks_agree(cases):
    buffers = cases[0]["buffers"]
    assert cases[1]["buffers"] == cases[2]["buffers"] == buffers
    assert any(buffers.pop("norm.running_mean"))
    assert buffers == {"mask": [0.0, -np.inf], "in_bfloat16": [1.296875], "in_float8": [1.25]}


def test_batches_of_any_type_are_partitioned(cases):
    assert len({result["other batches"] for result in cases}) == 1


def test_callback_random_draws_keep_ranks_equal(cases):
    """Each pass sees a whole batch in three parts that have no sample in common."""
    passes = list(zip(*(result["callback"] for result in cases), strict=True))
    assert len(passes) > 20
    assert all(len({i for part in parts for i in part}) == sum(map(len, parts)) for parts in passes)


def test_fit_with_samplers_per_rank_resumes_exactly(cases):
    for in_one_go, in_two in (result["own samples"] for result in cases):
        assert in_one_go == in_two


def test_fit_sets_epoch_of_nested_sampler(cases):
    for first, second, third, fourth in (result["orders"] for result in cases):
        assert not set(first) & set(second)
        assert (first, second) != (third, fourth)


def test_rank_without_samples_receives_finite_differences(cases):
    for all_ranks, single in (result["reduced"] for result in cases):
        assert all_ranks == single
        assert np.isfinite(all_ranks).all()


def test_command_on_ranks_reports_error_once():
    output = torchrun("command_program.py", "clean", "nowhere.csv", succeeds=False)
    assert output.count("fsla: Cannot read nowhere.csv: no such file or folder.") == 1


def test_watchdog_derives_late_ranks_from_positions():
    seen = Positions(3, now=0.0)
    for rank, messages in enumerate((7, 5, 7)):
        seen.observe(rank, {"name": f"host{rank}, process 1", "messages": messages, "beat": 1}, now=1.0)
    assert seen.stalled_s(11.0) == 10.0
    assert seen.missing(2.0, silence=5.0) == [1]
    assert seen.name(1) == "rank 1 (host1, process 1)"
    for rank in (0, 1):
        seen.observe(rank, {"name": "", "messages": 7, "beat": 2}, now=8.0)
    assert seen.missing(9.0, silence=5.0) == [2]  # it writes nothing any more
    seen.observe(2, {"name": "", "messages": 7, "beat": 2}, now=9.0)
    assert seen.missing(9.0, silence=5.0) == []
    for rank in (1, 2):
        seen.observe(rank, {"name": "", "messages": 7, "beat": 3, "left": True}, now=10.0)
    seen.observe(0, {"name": "", "messages": 9, "beat": 30}, now=99.0)
    assert seen.missing(100.0, silence=5.0) == []  # they have ended, and rank 0 works on


def reducer_of(rank, world_size):
    """The reducer of one of several ranks, which do not exist."""
    reducer = distributed.DataParallelReducer(nn.Linear(1, 1))
    reducer._rank, reducer._world_size, reducer._splits = rank, world_size, True
    return reducer


def test_partition_cuts_batch_by_samples():
    """Tensors, arrays, and lists with an entry for each sample; what has no samples stays the same."""
    batch = {"x": torch.arange(7), "more": (np.arange(14).reshape(7, 2), list("abcdefg")), "name": "test", "rate": 0.5}
    shards = [reducer_of(rank, 3).local_part(batch, 5) for rank in range(3)]
    parts = [shard.data for shard in shards]
    assert [len(part["x"]) for part in parts] == [2, 2, 3]
    assert [shard.weight for shard in shards] == [6 / 7, 6 / 7, 9 / 7]
    assert len({shard.seed for shard in shards}) == 3  # masks of their own
    assert shards[0].seed == 5
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert np.array_equal(np.concatenate([part["more"][0] for part in parts]), batch["more"][0])
    assert "".join("".join(part["more"][1]) for part in parts) == "abcdefg"
    assert all(part["name"] == "test" and part["rate"] == 0.5 for part in parts)


def test_partition_empty_rank_passes_zero_weight_sample():
    shards = [reducer_of(rank, 3).local_part(torch.tensor([4.0]), None) for rank in range(3)]
    assert [shard.weight for shard in shards] == [0.0, 0.0, 3.0]
    assert all(torch.equal(shard.data, torch.tensor([4.0])) for shard in shards)


def test_process_group_of_one_is_identity():
    group = distributed.get_group()
    assert (group.rank, group.world_size, group.is_first) == (0, 1, True)
    assert group.gather(3) == [3]
    assert group.broadcast("x") == "x"
    assert group.all_reduce_max([2, True]) == [2, 1]
    group.check_equal({"a": 1}, "things")
    group.wait()
    with pytest.raises(ValueError, match="no"):
        group.raise_if_any_failed(ValueError("no"))
    assert float(group.all_reduce_sum(torch.tensor(2.0))) == 2.0


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        (
            {"WORLD_SIZE": "2"},
            "they cannot meet without RANK, MASTER_ADDR, MASTER_PORT. Start the program with torchrun",
        ),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK, from 0, must be below"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "9", "FSLA_RANK_TIMEOUT": "1"},
            "Rank 1 of 2 cannot meet the others at localhost:9 within 1 seconds",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "9", "FSLA_RANK_TIMEOUT": "soon"},
            "FSLA_RANK_TIMEOUT must be a number of seconds above zero. Got 'soon'.",
        ),
    ],
)
def test_missing_rendezvous_raises(environment, match, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(distributed.DistributedError, match=match):
        distributed.get_group()


def test_checkpoint_folder_damaged_raises(undisturbed, folder, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(folder / "plain" / f"checkpoint-{STEPS:08}", path)
    assert isinstance(stores.load(path, distributed.SINGLE_PROCESS)[0], dict)
    shard = next(iter(sorted(path.glob("shard-*"))))
    other = shard.with_name("shard-00009-of-another-run.safetensors")
    shutil.copy(shard, other)
    with pytest.raises(CheckpointError, match=r"shard-00009-of-another-run\.safetensors is of another checkpoint"):
        stores.load(path, distributed.SINGLE_PROCESS)
    other.unlink()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged, or of another checkpoint"):
        stores.load(path, distributed.SINGLE_PROCESS)
    (path / "manifest.fsla").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest\.fsla: it is no file of fsla"):
        stores.load(path, distributed.SINGLE_PROCESS)
    (path / "manifest.fsla").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.fsla: No such file"):
        stores.load(path, distributed.SINGLE_PROCESS)
