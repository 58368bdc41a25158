"""Which ranks this process is one of: torchrun sets it in the environment."""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fsla.distributed import _watchdog as watch
from fsla.distributed._gloo_shutdown import wait_for_gloo_threads
from fsla.distributed._group import DistributedError, ProcessGroup

USUAL_TIMEOUT = 300.0
REPORT_S = 2.0
"""How long another rank waits for rank 0 to say what went wrong."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SINGLE_PROCESS = ProcessGroup()
_joined: ProcessGroup | None = None
_by_itself: ContextVar[bool] = ContextVar("by_itself", default=False)


@contextmanager
def single_process() -> Iterator[None]:
    """Let a rank work alone: inside, `get_group` returns this process only.

    Examples:
        >>> with fsla.distributed.single_process():
        ...     fsla.distributed.get_group().world_size
        1
    """
    token = _by_itself.set(True)
    try:
        yield
    finally:
        _by_itself.reset(token)


def get_group() -> ProcessGroup:
    """Return the processes of this run.

    These are the ones of torch.distributed if it is set up, else the ones that torchrun started, else this process
    alone.

    Raises:
        DistributedError: if the ranks cannot meet, or run different code.

    Examples:
        >>> fsla.distributed.get_group().is_first
        True
    """
    global _joined
    if _by_itself.get():
        return SINGLE_PROCESS
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        if _joined is None or (_joined.rank, _joined.world_size) != (rank, world):
            _joined = _watched(ProcessGroup(rank, world))
        return _joined
    if os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return SINGLE_PROCESS
    _connect()
    return get_group()


def get_device() -> torch.device:
    """Return the device of this rank: its own GPU if there is one, else the CPU.

    Raises:
        DistributedError: if the machine has fewer GPUs than processes.

    Examples:
        >>> device = fsla.distributed.get_device()
        >>> device.type in ("cpu", "cuda")
        True
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise DistributedError(
            f"Each process of a machine must have a GPU of its own. This is number {local} (from 0) of a machine with "
            f"{torch.cuda.device_count()}. Start fewer with --nproc-per-node, or set CUDA_VISIBLE_DEVICES='' to use "
            "CPUs."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def raise_on_first(error: Exception) -> NoReturn:
    """Raise an error on the rank that reports it, and end the other ranks.

    Args:
        error: the error.

    Examples:
        >>> try:
        ...     fsla.distributed.raise_on_first(ValueError("bad batch"))
        ... except ValueError as error:
        ...     print(error)
        bad batch
    """
    if should_report(str(error)):
        raise error
    raise SystemExit(1)


def should_report(text: str) -> bool:
    """Return whether this rank reports an error: rank 0 does, and another rank if rank 0 does not.

    Args:
        text: text of the error.

    Examples:
        >>> fsla.distributed.should_report("bad batch")
        True
    """
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1")
    if world in ("", "1") or not rank.isdigit():
        return True
    try:
        store = watch.store(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), hosted=False, timeout=timedelta(seconds=REPORT_S)
        )
        key = f"said/{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
        if rank == "0":
            store.set(key, text)
            return True
        store.wait([key], timedelta(seconds=REPORT_S))
    except (KeyError, ValueError, RuntimeError):  # torch's errors of the network are the last of these
        return True
    return False


def timeout_s() -> float:
    text = os.environ.get(watch.TIMEOUT, "")
    try:
        seconds = float(text) if text else USUAL_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise DistributedError(f"{watch.TIMEOUT} must be a number of seconds above zero. Got {text!r}.")
    return seconds


def _connect() -> None:
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        raise DistributedError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that this is one of several processes, and they cannot meet "
            f"without {', '.join(missing)}. Start the program with torchrun --nproc-per-node N, which sets them, or "
            "unset WORLD_SIZE to run it alone."
        )
    rank, world, local = os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("LOCAL_RANK", "0")
    if not (rank.isdigit() and world.isdigit() and local.isdigit() and int(rank) < int(world)):
        raise DistributedError(
            f"RANK, from 0, must be below WORLD_SIZE. Got RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local}. Start "
            "the program with torchrun, which sets them."
        )
    device = get_device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    timeout = timedelta(seconds=timeout_s())
    try:
        store = watch.store(address, int(port), hosted=rank == "0", timeout=timeout)
        dist.init_process_group(
            backend,
            store=store,
            rank=int(rank),
            world_size=int(world),
            timeout=2 * timeout,  # the watch comes first
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise DistributedError(
            f"Rank {rank} of {world} cannot meet the others at {address}:{port} within "
            f"{timeout.total_seconds():g} seconds ({str(error).splitlines()[0]}). Check that all of them were started, "
            "and that this machine reaches that address."
        ) from None
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _watched(group: ProcessGroup) -> ProcessGroup:
    if group.world_size > 1:
        atexit.register(wait_for_gloo_threads)
        store = watch.start(group.rank, group.world_size, timeout_s(), lambda: group.messages)
        (missing,) = group.all_reduce_max([store is None])
        group.store = None if missing else store
        group.check_equal(_code(), "code")
    return group


def _code() -> dict[str, str]:
    """What runs here, in short: this package, torch, and the program that was started."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    program = Path(sys.argv[0])
    started = program.read_bytes() if program.is_file() else b""
    return {
        "fsla": digest.hexdigest(),
        "torch": torch.__version__,
        "program": f"{program.name} {hashlib.blake2b(started, digest_size=8).hexdigest()}",
    }
