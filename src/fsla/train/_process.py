"""Signals that ask a run to end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any


class Signals:
    """Notes SIGTERM and SIGINT inside of its block, so that a run can end at a good place.

    A second signal has the effect that it had outside of the block. Where it is `patient`, none has: the ranks of
    torchrun are signalled twice if all processes are, once by torchrun, which ends them itself when they take too long.
    Outside of the main thread signals are left alone.
    """

    NOTED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, patient: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._patient = patient
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self.NOTED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        child = os.getpid() != self._process  # such as a loader's worker, that was forked in the block
        if child or not self._patient:
            self.__exit__()
        if child:
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number)


def leave(received: signal.Signals, step: int, saved_at: Path | None, stack: ExitStack, *, says: bool) -> None:
    """End the process as the signal asked, after the bar has ended."""
    stack.close()
    where = "" if saved_at is None else f", and is saved in {saved_at}"
    if says:
        print(
            f"fsla: the run was ended by {received.name} after step {step}{where}. Call fit again with this folder to "
            "go on.",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit(128 + received)
