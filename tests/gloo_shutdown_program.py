"""Started by torchrun: ends right after a message, with a group that is held to the end."""

import torch
import torch.distributed as dist

from fsla import distributed as distributed


def send():
    dist.broadcast(torch.ones(200_000), 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    process_group = dist.group.WORLD
    distributed.get_group()
    for _ in range(50):
        send()
    dist.destroy_process_group()
