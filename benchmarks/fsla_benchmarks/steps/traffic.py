"""What ranks send each other in a step, counted on paper, and how well many GPUs would do by that count.

A message is an all-reduce of the results of a pass: derivatives, a number for each of their tensors and for each rank,
and the value of the loss. With a ring every rank sends 2 (W-1)/W times its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Replication = Literal["plain", "replicas", "shards"]
"""A plain module, DistributedDataParallel, fully_shard."""


class Sent(NamedTuple):
    """Of one rank in one step."""

    messages: int
    numbers: int


@dataclass(frozen=True)
class Sizes:
    """How many numbers, in how many tensors, ω and λ have, and how many ranks there are."""

    omega: int
    lam: int
    world: int
    omega_tensors: int = 1
    lam_tensors: int = 1


def module_step(of: Sizes, algorithm: str, momentum: str, hvp_method: str, *, outer_uses_lam: bool) -> Sent:
    """A step on a plain module, which finds out on each batch whether F reads λ."""
    messages = list(_messages(of, algorithm, momentum, hvp_method, outer_uses_lam, finds_out=True))
    numbers = sum(size + tensors for message in messages for size, tensors in message)
    return Sent(len(messages), numbers + len(messages) * (of.world + 1))


def core(of: Sizes, algorithm: str, momentum: str, *, outer_uses_lam: bool) -> Sent:
    """A step on a function, which knows whether F reads λ; where λ has rows for the samples, `of.lam` is those of a
    batch."""
    messages = list(_messages(of, algorithm, momentum, "autograd", outer_uses_lam, finds_out=False))
    numbers = sum(size for message in messages for size, _ in message)
    return Sent(len(messages), numbers + len(messages))


Derivative = tuple[int, int]
"""Its numbers, and its tensors."""


def _messages(
    of: Sizes, algorithm: str, momentum: str, hvp_method: str, outer_uses_lam: bool, *, finds_out: bool
) -> Iterator[list[Derivative]]:
    """The derivatives that each pass sends."""
    by_omega = (of.omega, of.omega_tensors)
    by_lam = (of.lam, of.lam_tensors)
    points = 2 if momentum == "storm" else 1
    at_both_ends = 2 if hvp_method == "finite_difference" else 1
    if algorithm == "soba":
        yield from [[by_omega, by_lam]] * 2 if at_both_ends == 2 else [[by_omega, by_omega, by_lam]]
    else:
        yield from [[by_omega]] * 2 if at_both_ends == 2 else [[by_omega, by_omega]]
    yield [by_omega, by_lam] if outer_uses_lam or finds_out else [by_omega]
    if algorithm == "soba":
        return
    yield from [[by_lam]] * at_both_ends * points
    if outer_uses_lam:
        yield from [[by_lam]] * points
    elif finds_out and momentum == "storm":
        yield [by_lam]  # F on a batch that it was not seen on before.


@dataclass(frozen=True)
class Machine:
    """What the prediction assumes: FLOP a second of one GPU on this model, and bytes a second."""

    flops: float
    inside: float = 450e9
    between: float = 50e9
    gpus: int = 8
    """Of one machine."""

    def bytes_per_second(self, world: int) -> float:
        return self.inside if world <= self.gpus else self.between


class Predicted(NamedTuple):
    """Seconds of a step on one GPU that had all of it and on each of W, and the first over the second."""

    seconds_alone: float
    seconds_all: float
    efficiency: float


def predicted(
    machine: Machine, replication: Replication, parameters: float, tokens: float, world: int, algorithm: str
) -> Predicted:
    """Weak scaling: as many tokens a GPU, whatever W is, in each batch; float32 messages, few outer parameters.

    A pass forward takes 2 FLOP for each parameter and token, one back 4. The messages of a plain module wait for the
    pass, those of the others are sent during it; a part of a pass then takes what is longer, work or messages.
    """
    forward = 2 * parameters * tokens / machine.flops
    back = 2 * forward
    ring = (world - 1) / world * 4 * parameters / machine.bytes_per_second(world)
    seconds_alone = 3 * (forward + back)
    if replication == "plain":
        whole = forward + back + 2 * ring
    elif replication == "replicas":
        whole = forward + max(back, 2 * ring)
    else:
        whole = max(forward, ring) + max(back, 2 * ring)
    seconds_all = 3 * whole
    if algorithm == "fsla":  # J v: two passes in which λ alone requires a derivative
        seconds_alone += 2 * (forward if replication != "shards" else forward + back)
        seconds_all += 2 * (forward if replication != "shards" else whole)
    return Predicted(seconds_alone, seconds_all, seconds_alone / seconds_all)


_CASES: tuple[tuple[str, Replication, float, int, float], ...] = (
    ("98 M, 4096 tokens a GPU", "plain", 98e6, 4096, 1.1e14),
    ("98 M, 4096 tokens a GPU", "replicas", 98e6, 4096, 1.1e14),
    ("98 M, 32768 tokens a GPU", "plain", 98e6, 32768, 1.1e14),
    ("7 B, 4096 tokens a GPU", "shards", 7e9, 4096, 4e14),
    ("7 B, 16384 tokens a GPU", "shards", 7e9, 16384, 4e14),
)


def predictions() -> Iterator[str]:
    """A table for 8 and for 64 GPUs."""
    for name, replication, parameters, tokens, flops in _CASES:
        for algorithm in ("soba", "fsla"):
            both = [predicted(Machine(flops), replication, parameters, tokens, world, algorithm) for world in (8, 64)]
            shown = "  ".join(f"{1e3 * p.seconds_all:6.0f} ms {100 * p.efficiency:4.0f} %" for p in both)
            yield f"{name:25} {replication:9} {algorithm:5} {1e3 * both[0].seconds_alone:6.0f} ms alone  {shown}"
