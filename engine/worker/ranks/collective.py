"""Tensors between the ranks of a run: gloo on CPUs, nccl on GPUs.

All ranks are on this machine: they find each other through a file in a private folder, and their
sockets listen on the loopback interface alone. Every call is made by all ranks at once, right after
rank 0 told the others to; none waits longer than PATIENCE for one that does not come.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed

from engine.worker.network.adapter import Adapter
from engine.worker.update.optimizer import AdamW

PATIENCE = timedelta(minutes=5)
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def join(store: str, rank: int, count: int, device: torch.device) -> None:
    """Connect this process to the other ranks of its run; returns when all are there.

    Args:
        store: path of the file, in a folder of this user alone, by which they find each other.
        count: how many ranks there are.
    """
    on_gpu = device.type == "cuda"
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=distributed.FileStore(store, count),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=count,
        timeout=PATIENCE,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )


def leave(*, broken: bool = False) -> None:
    """Close the connections of this process; nothing where there are none. `broken`: another rank
    is gone, and nothing may be waited for."""
    if not distributed.is_initialized():
        return
    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
    if broken and abort is not None and distributed.get_backend() == "nccl":
        abort()
    else:
        distributed.destroy_process_group()


@torch.no_grad()
def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace the gradients on every rank by their sum over all ranks, bit for bit the same on
    each. A parameter without a gradient on any rank is left without one."""
    if len(parameters) == 1 and parameters[0].grad is not None:  # our own adapter: one buffer
        distributed.all_reduce(parameters[0].grad)
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    has_gradient = torch.tensor(
        [float(p.grad is not None) for p in parameters], device=parameters[0].device
    )
    flat = torch.cat([*(gradient.flatten() for gradient in gradients), has_gradient])
    distributed.all_reduce(flat)
    counts = flat[-len(parameters) :].tolist()
    place = 0
    for parameter, count in zip(parameters, counts, strict=True):
        size = parameter.numel()
        if count > 0:
            parameter.grad = flat[place : place + size].view_as(parameter).clone()
        place += size


@torch.no_grad()
def hand_on(adapter: Adapter) -> None:
    """Give the adapter of every rank the weights of rank 0's."""
    for parameter in adapter.parameters():
        distributed.broadcast(parameter.detach(), src=0)
    # The call does not raise autograd's version counters, by which samplers notice new weights.
    torch.autograd.graph.increment_version(adapter.parameters())


@torch.no_grad()
def hand_on_state(adapter: Adapter, optimizer: AdamW, has_moments: Sequence[bool]) -> None:
    """Give adapter and optimizer of every rank the weights and moments of rank 0's.

    Args:
        has_moments: for each parameter whether rank 0 has moments for it.
    """
    hand_on(adapter)
    for parameter, has_state in zip(adapter.parameters(), has_moments, strict=True):
        if has_state:
            state = optimizer.state_of(parameter)
            for name in sorted(state):  # a state read from a checkpoint has another order
                distributed.broadcast(state[name], src=0)
        else:
            optimizer.state.pop(parameter, None)
