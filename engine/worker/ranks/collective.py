"""Sends tensors between the ranks (processes) of a run: by gloo on CPUs, by nccl on GPUs.

All ranks are on this machine. They find each other through a file in a private folder, and their
sockets listen on the loopback interface alone. All ranks make every call at the same time, right
after rank 0 has told the others to. No rank waits longer than PATIENCE for one that does not come.
"""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from engine.worker.core import switched_off
from engine.worker.core.failures import out_of_memory
from engine.worker.network.adapter import Adapter
from engine.worker.update.optimizer import AdamW

PATIENCE = timedelta(minutes=5)
LOADING_PATIENCE = timedelta(hours=2)  # while rank 0 reads a large model from its disk
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Meeting:
    """How the ranks of a run find each other.

    Attributes:
        store: path of a file in a folder that only this user can read.
        count: how many ranks there are.
        training: how many of them train; these come first. If others sample beside them, each of
            the two kinds has collective calls of its own.
    """

    store: str
    count: int
    training: int


@dataclass(frozen=True)
class _Groups:
    """The ranks that make a collective call together; None stands for all ranks.

    Attributes:
        training: the ranks that train.
        sampling: rank 0 and the ranks that sample.
    """

    training: Any = None
    sampling: Any = None


_groups = _Groups()


class Disconnected(RuntimeError):
    """Raised if a collective call failed because another rank is gone or did not come in time."""


@contextmanager
def errors_translated() -> Iterator[None]:
    """Context manager that translates torch's errors of a collective call, one that all processes
    of the run make at the same time. If memory ran out, the error is passed on unchanged.

    Raises:
        OSError: if the file by which ranks find each other cannot be written (disk full or
            read-only).
        Disconnected: if the call fails for any other reason.
    """
    try:
        yield
    except RuntimeError as error:  # what torch raises for all backends
        if out_of_memory(error):
            raise
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            if os.strerror(code) in str(error):
                raise OSError(code, str(error)) from error
        raise Disconnected(str(error)) from error


def join(
    meeting: Meeting,
    rank: int,
    device: torch.device,
    patience: timedelta = PATIENCE,
    backend: str = "",
) -> None:
    """Connect this process to the other ranks (processes) of its run. Returns when all are
    connected.

    Args:
        meeting: how the ranks find each other.
        rank: the number of this process, from 0.
        device: what this process computes on.
        patience: how long a call waits for a rank that does not come.
        backend: the library that sends the tensors, "nccl" or "gloo"; "" chooses by the device and
            by what works on this machine.
    """
    global _groups
    on_gpu = device.type == "cuda"
    # Both libraries then listen on the loopback interface alone.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    distributed.init_process_group(
        backend or backend_of(device),
        store=distributed.FileStore(meeting.store, meeting.count),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=meeting.count,
        timeout=patience,
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    _groups = _Groups()
    if meeting.training < meeting.count:
        # torch demands that every rank creates all groups in the same order, even those that it
        # does not belong to.
        samplers = range(meeting.training, meeting.count)
        _groups = _Groups(
            distributed.new_group(list(range(meeting.training)), timeout=patience),
            distributed.new_group([0, *samplers], timeout=patience),
        )


def lockstep_group() -> "distributed.ProcessGroup":
    """Make a group of all ranks (processes of the run) for collective calls on the CPU. Such a call
    waits up to a day for a slow rank."""
    group = distributed.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, distributed.ProcessGroup)
    return group


def backend_of(device: torch.device) -> str:
    """Choose the library that sends tensors between ranks on such a device: nccl between GPUs, if
    its trial on this machine passed; else gloo, which copies through the machine's memory."""
    return "nccl" if device.type == "cuda" and not switched_off.is_off("collectives") else "gloo"


def leave(*, broken: bool = False) -> None:
    """Close the connections of this process to the other ranks, if there are any. `broken` says
    that another rank is gone, so that nothing can be waited for."""
    if not distributed.is_initialized():
        return
    abort = getattr(distributed.distributed_c10d, "_abort_process_group", None)
    # nccl's usual end would wait for the rank that is gone.
    if broken and abort is not None and distributed.get_backend() == "nccl":
        abort()
    else:
        distributed.destroy_process_group()


@torch.no_grad()
def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace the gradients on every rank that trains by their sum over these ranks. The sums are
    bit for bit the same on each rank. A parameter that has no gradient on any rank stays without
    one."""
    if len(parameters) == 1 and parameters[0].grad is not None:  # our own adapter: one buffer
        distributed.all_reduce(parameters[0].grad, group=_groups.training)
        return
    flat = _flat_gradients(parameters)
    distributed.all_reduce(flat, group=_groups.training)
    # For each parameter, the number of ranks on which it has a gradient.
    ranks_with_gradient = flat[-len(parameters) :].tolist()
    start = 0
    for parameter, rank_count in zip(parameters, ranks_with_gradient, strict=True):
        size = parameter.numel()
        if rank_count > 0:
            parameter.grad = flat[start : start + size].view_as(parameter).clone()
        start += size


def _flat_gradients(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Concatenate all gradients (zeros for a missing one), and then one number per parameter: 1 if
    it has a gradient here, else 0. Returns a vector of length (elements of all parameters +
    parameters)."""
    pieces: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        pieces.append(gradient.flatten())
    has_gradient = [float(parameter.grad is not None) for parameter in parameters]
    pieces.append(torch.tensor(has_gradient, device=parameters[0].device))
    return torch.cat(pieces)


@torch.no_grad()
def broadcast_weights(adapter: Adapter) -> None:
    """Copy the weights of rank 0's adapter to the adapter of every rank that samples."""
    _broadcast_weights(adapter, _groups.sampling)


@torch.no_grad()
def broadcast_state(adapter: Adapter, optimizer: AdamW, has_moments: Sequence[bool]) -> None:
    """Copy the weights and the optimizer's moments of rank 0 to every rank that trains.

    Args:
        has_moments: for each parameter whether rank 0 has moments for it.
    """
    group = _groups.training
    _broadcast_weights(adapter, group)
    for parameter, has_state in zip(adapter.parameters(), has_moments, strict=True):
        if has_state:
            state = optimizer.state_of(parameter)
            for name in sorted(state):  # a state read from a checkpoint has another order
                distributed.broadcast(state[name], src=0, group=group)
        else:
            optimizer.state.pop(parameter, None)


def _broadcast_weights(adapter: Adapter, group: "distributed.ProcessGroup | None") -> None:
    """Copy the weights of rank 0's adapter to the adapter of every rank in the group."""
    for parameter in adapter.parameters():
        distributed.broadcast(parameter.detach(), src=0, group=group)
    # `broadcast` does not raise the tensors' version counters. Samplers compare these counters to
    # notice new weights.
    torch.autograd.graph.increment_version(adapter.parameters())
