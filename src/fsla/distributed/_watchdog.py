"""A rank that does not come: every rank publishes how far it is, and the watchdog names the one that all wait for.

A thread of each process writes, now and then, how many messages it has begun, into the store at which the ranks met,
and reads what the others wrote. Where nobody has begun one for a while, the others wait for those that began the
fewest, or for those that write nothing any more. They are named, and after the timeout the process ends: torchrun then
ends the rest, or starts all anew (--max-restarts).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

TIMEOUT = "FSLA_RANK_TIMEOUT"
"""In the environment: seconds after which a rank that all others wait for is reported, and the run ended."""
BEATS = 8
"""How often a rank writes within the timeout."""
FAILED = 70
WAIT_S = 30.0
"""For a look at the store that is under way as a process ends; it takes milliseconds unless the store is gone."""


def start(rank: int, world: int, seconds: float, messages: Callable[[], int]) -> Store | None:
    """Watch the ranks until this process ends, and return their store; where that is unknown, nothing is watched.

    Args:
        messages: how many this rank has begun.
    """
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if not address or not port:
        return None
    try:
        shared_store = store(address, int(port), hosted=False, timeout=timedelta(seconds=min(seconds, 30.0)))
    except (dist.DistError, RuntimeError, ValueError):
        return None
    watch = _Watch(rank, world, seconds, messages, PrefixStore("watch", shared_store))
    thread = threading.Thread(target=watch.run, name="fsla rank watch", daemon=True)
    thread.start()
    atexit.register(_end, watch, thread)
    return shared_store


def _end(watch: _Watch, thread: threading.Thread) -> None:
    """End the watch before Python ends: a thread that is in the store's code by then would abort the process. The
    others need not wait for one that has done its part."""
    watch.ended.set()
    thread.join(WAIT_S)
    watch.leave()


def store(address: str, port: int, *, hosted: bool, timeout: timedelta) -> Store:
    """The store at which ranks meet. What an attempt wrote that failed is out of sight of the next one.

    Args:
        hosted: whether this process offers it, where torchrun does not.
    """
    hosts = hosted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    tcp = TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=timeout, multi_tenant=hosts)
    return PrefixStore(f"fsla/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", tcp)


class Positions:
    """Last report of each rank, and how long the run has stalled."""

    def __init__(self, world: int, now: float) -> None:
        self._seen: list[dict[str, Any] | None] = [None] * world
        self._changed = [now] * world
        self._moved = now

    def observe(self, rank: int, report: dict[str, Any], now: float) -> None:
        before = self._seen[rank]
        if before is None or before["beat"] != report["beat"]:
            self._changed[rank] = now
        if before is None or before["messages"] != report["messages"]:
            self._moved = now
        self._seen[rank] = report

    def stalled_s(self, now: float) -> float:
        return now - self._moved

    def missing(self, now: float, silence: float) -> list[int]:
        """The ranks that the others wait for; none where all are alike. Those that have ended are not awaited."""
        known = [(rank, report) for rank, report in enumerate(self._seen) if report and not report.get("left")]
        silent = [rank for rank, _ in known if now - self._changed[rank] > silence]
        if silent:
            return silent
        fewest = min((report["messages"] for _, report in known), default=0)
        behind = [rank for rank, report in known if report["messages"] == fewest]
        return behind if len(behind) < len(known) else []

    def name(self, rank: int) -> str:
        report = self._seen[rank]
        return f"rank {rank} ({'' if report is None else report['name']})"


class _Watch:
    def __init__(self, rank: int, world: int, seconds: float, messages: Callable[[], int], store: Store) -> None:
        self._rank = rank
        self._world = world
        self._seconds = seconds
        self._messages = messages
        self._store = store
        self._name = f"{socket.gethostname()}, process {os.getpid()}"
        self._beat = 0
        self._warned = False
        self._positions = Positions(world, monotonic())
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self._seconds / BEATS):
            try:
                self._report()
                self._read()
            except (dist.DistError, RuntimeError, ValueError):
                return  # the store is gone: the run ends
            self._check(monotonic())

    def leave(self) -> None:
        """Publish that this rank has ended."""
        with suppress(dist.DistError, RuntimeError, ValueError):  # the store is gone: so are they
            self._report(left=True)

    def _report(self, *, left: bool = False) -> None:
        self._beat += 1
        report = {"name": self._name, "messages": self._messages(), "beat": self._beat, "left": left}
        self._store.set(str(self._rank), json.dumps(report))

    def _read(self) -> None:
        for rank in range(self._world):
            if self._store.check([str(rank)]):
                self._positions.observe(rank, json.loads(self._store.get(str(rank))), monotonic())

    def _check(self, now: float) -> None:
        stalled = self._positions.stalled_s(now)
        missing = self._positions.missing(now, self._seconds / 2)
        if stalled < self._seconds / 2 or not missing:
            self._warned = False
            return
        others = [rank for rank in range(self._world) if rank not in missing]
        names = " and ".join(self._positions.name(rank) for rank in missing)
        reports = bool(others) and self._rank == others[0]
        limit = self._seconds if others and self._rank in others else 1.5 * self._seconds  # who is awaited ends later
        if stalled >= limit:
            if reports:
                _print(
                    f"{names} made no progress for {self._seconds:g} seconds, and all other ranks wait. The run ends; "
                    "with a folder, rerun the same command to resume from its last checkpoint. If a step may take as "
                    f"long, set {TIMEOUT} to more seconds."
                )
            os._exit(FAILED)
        if reports and not self._warned:
            _print(f"all ranks have waited for {stalled:.0f} seconds for {names}.")
            self._warned = True


def _print(text: str) -> None:
    print(f"fsla: {text}", file=sys.stderr, flush=True)
