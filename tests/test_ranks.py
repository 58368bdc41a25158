"""Several processes as torchrun starts them: the numbers of one, whatever is killed, and clear words for wrong use."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn

from fsla import distributed as ranks
from fsla.distributed._watchdog import Positions
from fsla.train import CheckpointError
from fsla.train import _stores as stores
from launch import HERE, finish, torchrun

PROGRAM = "front_program.py"
STEPS = 24
KINDS = "plain,shards,own samples"


def gap(found, expected):
    assert len(found["values"]) == len(expected["values"])
    return float(np.abs(np.subtract(found["values"], expected["values"])).max())


def fitted(folder, *kills, kinds="plain", steps=STEPS, **options):
    out = folder / "told.json"
    folder.mkdir(exist_ok=True)
    torchrun(PROGRAM, "fit", out, folder, kinds, steps, *kills, **options)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("processes", "steps"), [pytest.param(2, 10), pytest.param(4, 200, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_a_model_on_several_ranks_takes_the_steps_of_one(processes, steps, tmp_path):
    """Plain, with DistributedDataParallel, and in shards with differences. Rates that follow from differences see
    their rounding, 1e-11 or so of a product, and pass it on from step to step."""
    torchrun(PROGRAM, "trajectories", tmp_path / "gaps", steps, processes=processes)
    gaps = json.loads((tmp_path / "gaps").read_text())
    assert gaps.pop("moved") > 0.005
    assert len(gaps) == 17
    for name, found in gaps.items():
        assert found < (1e-6 if name.startswith("automatic, differences") else 1e-11), gaps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(folder):
    return fitted(folder)["plain"]


def test_a_killed_rank_changes_nothing(undisturbed, tmp_path):
    """Three kills, in three attempts, at moments from all over the run."""
    draw = random.Random(0)
    last = undisturbed["messages"]
    kills = [f"{draw.randrange(2)}:{draw.randrange(1, last - 1)}" for _ in range(3)]
    found = fitted(tmp_path, ",".join(kills), restarts=3)["plain"]
    assert found["values"] == undisturbed["values"]
    assert found["records"] == undisturbed["records"]
    assert found["steps"] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "shards"])
def test_ten_kills_change_nothing(kind, tmp_path):
    expected = fitted(tmp_path / "undisturbed", kinds=kind, steps=60)[kind]
    draw = random.Random(1)
    resumed = set()
    for number in range(10):
        kill = f"{draw.randrange(2)}:{draw.randrange(1, expected['messages'] - 1)}"
        found = fitted(tmp_path / str(number), kill, kinds=kind, steps=60, restarts=1)[kind]
        assert found["values"] == expected["values"], kill
        assert found["records"] == expected["records"], kill
        resumed.add(found["resumed_from"])
    assert len(resumed) > 3


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Runs of two ranks, after eight steps."""
    folder = tmp_path_factory.mktemp("begun")
    first = fitted(folder, kinds=KINDS, steps=8)
    assert [found["steps"] for found in first.values()] == [8, 8, 8]
    assert len(list((folder / "shards" / "checkpoint-00000008").glob("shard-*"))) == 2
    return folder


def test_a_run_of_two_ranks_goes_on_in_one_process(begun, undisturbed, tmp_path):
    shutil.copytree(begun, tmp_path / "copy")
    out = tmp_path / "told.json"
    done = finish(sys.executable, HERE / PROGRAM, "fit", out, tmp_path / "copy", "plain,own samples", STEPS)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert "ranks that bring their own batches: 2 there, 1 wanted" in told["own samples"]
    assert told["plain"]["resumed_from"] == 8
    assert [record["step"] for record in told["plain"]["records"]] == [5, 8, 10, 15, 20, 24]
    assert gap(told["plain"], undisturbed) < 1e-9


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_three(begun, undisturbed, tmp_path):
    shutil.copytree(begun, tmp_path / "copy")
    found = fitted(tmp_path / "copy", kinds=KINDS, processes=3)
    assert "ranks that bring their own batches: 2 there, 3 wanted" in found.pop("own samples")
    for kind in ("plain", "shards"):
        assert found[kind]["resumed_from"] == 8
        assert gap(found[kind], undisturbed) < 1e-9
        assert [record["step"] for record in found[kind]["records"]] == [5, 8, 10, 15, 20, 24]


WRONG = {
    "settings": "DistributedError: All ranks must have the same model and settings. These differ: hvp_method: "
    '"autograd" on rank 0',
    "data": "DistributedError: All ranks must have the same model and settings",
    "uneven": "DistributedError: With split_batches=False all ranks must bring as many samples. Got 8, 7 by rank.",
    "batches": "DistributedError: All ranks must have the same batches. These differ: inner batch",
    "sampler": "DistributedError: inner_loader must give every rank the same batches",
    "unsplit": "TypeError: A batch that ranks share must be tensors",
    "exact": "ValueError: A model in shards, as fully_shard makes it, must have hvp_method='finite_difference'",
}


def test_wrong_use_is_said_by_rank_0(tmp_path):
    torchrun(PROGRAM, "wrong", tmp_path / "told", *WRONG)
    first, second = (json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1))
    for what, match in WRONG.items():
        assert first[what].startswith(match), first[what]
        assert second[what] == "SystemExit: 1", what


def test_wrong_use_ends_all_with_one_message():
    told = torchrun(PROGRAM, "wrong", "", "uneven", succeeds=False)
    assert told.count("Give the loaders drop_last=True") == 1


def test_a_rank_that_hangs_is_named():
    """The program has a clock of its own, which waits until rank 1 hangs: a busy machine makes no other rank late."""
    told = torchrun(PROGRAM, "wrong", "", "hang", succeeds=False, FSLA_RANK_TIMEOUT="1200")
    assert "fsla: rank 1 (" in told
    assert "did not come within 1200 seconds" in told


def test_the_cleaner_shares_its_networks_out(tmp_path):
    """Bit by bit: what a network learns does not depend on who trains it, or beside which others."""
    torchrun("cleaning_program.py", tmp_path / "gaps")
    for gaps in json.loads((tmp_path / "gaps").read_text()):
        assert set(gaps) == {"dense", "own"}
        for gap, messages in gaps.values():
            assert gap == 0.0
            assert messages > 20


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """What each of three ranks found."""
    folder = tmp_path_factory.mktemp("cases")
    torchrun("cases_program.py", folder, processes=3)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("what", ["a share does not read λ", "a share does not reach ω"])
def test_a_batch_is_judged_as_a_whole(cases, what):
    """Its parts need not reach all that it reaches."""
    assert all(found[what] < 1e-14 for found in cases)


def test_buffers_that_do_not_move_stay_and_those_that_do_are_the_same_on_all_ranks(cases):
    buffers = cases[0]["buffers"]
    assert cases[1]["buffers"] == cases[2]["buffers"] == buffers
    assert any(buffers.pop("norm.running_mean"))
    assert buffers == {"mask": [0.0, -np.inf], "in_bfloat16": [1.296875], "in_float8": [1.25]}


def test_batches_of_other_types_are_cut_and_compared(cases):
    assert len({found["other batches"] for found in cases}) == 1


def test_what_a_callback_draws_on_one_rank_sends_no_rank_apart(cases):
    """Each pass sees a whole batch in three parts that have no sample in common."""
    passes = list(zip(*(found["callback"] for found in cases), strict=True))
    assert len(passes) > 20
    assert all(len({i for part in parts for i in part}) == sum(map(len, parts)) for parts in passes)


def test_ranks_that_draw_their_own_samples_resume_exactly(cases):
    for in_one_go, in_two in (found["own samples"] for found in cases):
        assert in_one_go == in_two


def test_samplers_inside_of_batch_samplers_are_told_the_epoch(cases):
    for first, second, third, fourth in (found["orders"] for found in cases):
        assert not set(first) & set(second)
        assert (first, second) != (third, fourth)


def test_a_rank_without_samples_takes_the_differences_of_the_others(cases):
    for together, alone in (found["reduced"] for found in cases):
        assert together == alone
        assert np.isfinite(together).all()


def test_a_command_says_once_what_is_wrong():
    told = torchrun("command_program.py", "clean", "nowhere.csv", succeeds=False)
    assert told.count("fsla: nowhere.csv must be a file or a folder. There is none.") == 1


def test_positions_tell_who_is_awaited():
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
    reducer = ranks.DataParallelReducer(nn.Linear(1, 1))
    reducer._rank, reducer._world_size, reducer._splits = rank, world_size, True
    return reducer


def test_a_batch_is_cut_by_samples():
    """Tensors, arrays, and lists with an entry for each sample; what says nothing of samples stays as it is."""
    batch = {"x": torch.arange(7), "more": (np.arange(14).reshape(7, 2), list("abcdefg")), "name": "test", "rate": 0.5}
    shares = [reducer_of(rank, 3).local_part(batch, 5) for rank in range(3)]
    parts = [share.data for share in shares]
    assert [len(part["x"]) for part in parts] == [2, 2, 3]
    assert [share.weight for share in shares] == [6 / 7, 6 / 7, 9 / 7]
    assert len({share.seed for share in shares}) == 3  # masks of their own
    assert shares[0].seed == 5
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert np.array_equal(np.concatenate([part["more"][0] for part in parts]), batch["more"][0])
    assert "".join("".join(part["more"][1]) for part in parts) == "abcdefg"
    assert all(part["name"] == "test" and part["rate"] == 0.5 for part in parts)


def test_a_rank_without_samples_passes_one_that_does_not_count():
    shares = [reducer_of(rank, 3).local_part(torch.tensor([4.0]), None) for rank in range(3)]
    assert [share.weight for share in shares] == [0.0, 0.0, 3.0]
    assert all(torch.equal(share.data, torch.tensor([4.0])) for share in shares)


def test_alone_everything_is_the_identity():
    here = ranks.get_group()
    assert (here.rank, here.world_size, here.is_first) == (0, 1, True)
    assert here.gather(3) == [3]
    assert here.broadcast("x") == "x"
    assert here.all_reduce_max([2, True]) == [2, 1]
    here.check_equal({"a": 1}, "things")
    here.wait()
    with pytest.raises(ValueError, match="no"):
        here.raise_if_any_failed(ValueError("no"))
    assert float(here.all_reduce_sum(torch.tensor(2.0))) == 2.0


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
            "Rank 1 of 2 must meet the others at localhost:9, and cannot within 1 seconds",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "9", "FSLA_RANK_TIMEOUT": "soon"},
            "FSLA_RANK_TIMEOUT must be a number of seconds above zero. Got 'soon'.",
        ),
    ],
)
def test_a_missing_rendezvous_is_said(environment, match, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ranks.DistributedError, match=match):
        ranks.get_group()


def test_a_damaged_folder_is_no_checkpoint(undisturbed, folder, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(folder / "plain" / f"checkpoint-{STEPS:08}", path)
    assert isinstance(stores.load(path, ranks.SINGLE_PROCESS)[0], dict)
    shard = next(iter(sorted(path.glob("shard-*"))))
    other = shard.with_name("shard-00009-of-another-run.safetensors")
    shutil.copy(shard, other)
    with pytest.raises(CheckpointError, match=r"shard-00009-of-another-run\.safetensors is of another checkpoint"):
        stores.load(path, ranks.SINGLE_PROCESS)
    other.unlink()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged, or of another checkpoint"):
        stores.load(path, ranks.SINGLE_PROCESS)
    (path / "manifest.fsla").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest\.fsla: it is no file of fsla"):
        stores.load(path, ranks.SINGLE_PROCESS)
    (path / "manifest.fsla").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.fsla: No such file"):
        stores.load(path, ranks.SINGLE_PROCESS)
