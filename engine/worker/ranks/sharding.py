"""Loads a base model that is too large for one device: its layers are cut over the ranks
(processes) that train (FSDP2).

Each rank keeps a part of every layer's frozen weights. A layer is gathered from all ranks just
before it is computed, forward and again backward (`fully_shard` of torch.distributed.fsdp, arXiv
2304.11277). Frozen weights have no gradients, so none are scattered. Adapters are added afterwards,
whole on every rank, and their gradients are summed as on unsharded ranks (collective.py).
Embeddings, head and last norm, which are outside the layers, are whole on every rank too.

Rank 0 reads the files into the machine's memory, and sends the weights to the others layer by
layer.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from engine.records.run_config import RunConfig, TrainConfig
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import Job
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.policy import (
    Base,
    empty_transformers,
    load_base_with,
    load_transformers,
)
from engine.worker.ranks import collective
from engine.worker.ranks.leader import Ranks, own_rank, rank_count, store_of, training_ranks

WHY = "its layers are sharded over several ranks"


def load_in_step(
    job: Job[RunConfig], path: Path, device: torch.device, precision: str, ranks: Ranks | None
) -> Base:
    """Connect this process with the others of the run and load the base in `path` together with
    them, each a part of every layer. Every process (rank) that trains calls this.

    Args:
        precision: number format of the weights: "auto", "float32" or "bfloat16".
        ranks: rank 0's view of the others; None on another rank.
    """
    if ranks is not None:
        ranks.join_at_once()
    else:
        training = training_ranks(job.config, rank_count())
        meeting = collective.Meeting(store_of(job), training, training)
        with collective.errors_translated():
            collective.join(meeting, own_rank(), device, collective.LOADING_PATIENCE)
    base = load_sharded_base(path, device, precision, own_rank())
    if isinstance(job.config, TrainConfig) and job.config.settings.gradient_checkpointing:
        # Every rank must switch this on before its first pass: a backward pass gathers a layer from
        # all ranks whenever an activation needs gradients.
        assert isinstance(base.network, HubNetwork)
        base.network.enable_checkpointing()
    return base


def load_sharded_base(path: Path, device: torch.device, precision: str, rank: int) -> Base:
    """Load the base model in the folder `path` in the number format `precision`, sharded over all
    ranks of the process group. All ranks must call this at the same time.

    Raises:
        WorkerFailure: kind config, if the folder holds no model that can be loaded, or one without
            a list of layers.
    """
    model: Any
    if rank == 0:  # the only one that reads the weights
        model, _tokenizer = load_transformers(path, torch.device("cpu"), precision, runs_on=device)
    else:
        model = empty_transformers(path, precision, device)
    shard(model, device)
    return load_base_with(path, lambda vocab: HubNetwork(model, vocab, WHY))


def shard(model: Any, device: torch.device) -> None:
    """Copy the weights of rank 0's model to the model of every rank, on its device, and cut the
    layers over the ranks. Raises WorkerFailure (config) if the model has no list of layers."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise WorkerFailure(
            "config",
            "This model cannot be sharded: its decoder has no list of layers.",
            evidence=type(decoder).__name__,
            hint="Train it on a GPU that holds it, or in 4 bits (quantization nf4).",
        )
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))  # all ranks, in one row
    for layer in layers:
        _broadcast_module(layer, device)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    in_layers = {id(parameter) for parameter in layers.parameters()}
    # Embeddings, head and last norm stay whole on every rank.
    _broadcast_module(model, device, leave_out=in_layers)
    outside = {parameter for parameter in decoder.parameters() if id(parameter) not in in_layers}
    # FSDP needs a root module that gathers the next layer while one is computed. The root itself
    # has no weights to shard.
    fully_shard(decoder, mesh=mesh, ignored_params=outside)


Owners = list[tuple[torch.nn.Module, str]]


def _broadcast_module(
    module: torch.nn.Module, device: torch.device, leave_out: AbstractSet[int] = frozenset()
) -> None:
    """Copy the tensors in rank 0's `module` to the same module of every rank, on its device.

    Args:
        leave_out: ids of parameters that are not copied, because they have been already.
    """
    tensors_with_owners = _tensors_with_owners(module, leave_out)
    tensors = [tensor for tensor, _owners in tensors_with_owners]
    shapes_and_types = _shapes_of_rank_0(module, tensors)
    for (tensor, owners), (shape, dtype) in zip(tensors_with_owners, shapes_and_types, strict=True):
        values = torch.empty(shape, dtype=dtype, device=device)
        if not tensor.is_meta:  # on rank 0; another rank's tensors may have no memory yet
            values.copy_(tensor)
        distributed.broadcast(values, src=0)  # overwrites the values of every rank but 0
        if isinstance(tensor, torch.nn.Parameter):
            values = torch.nn.Parameter(values, requires_grad=False)
        for owner, name in owners:
            setattr(owner, name, values)


def _shapes_of_rank_0(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Size, torch.dtype]]:
    """Return the shape and dtype of each tensor of rank 0's module, which rank 0 sends to all
    ranks. `tensors` are those of this rank. Raises WorkerFailure (internal) if rank 0 has another
    number of tensors."""
    sent: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in tensors]]
    # On every rank but 0 this replaces the list's content by rank 0's.
    distributed.broadcast_object_list(sent, src=0)
    (shapes_and_types,) = sent
    if len(shapes_and_types) != len(tensors):
        raise WorkerFailure(
            "internal",
            "A rank has built another model than rank 0.",
            evidence=f"{len(tensors)} and {len(shapes_and_types)} tensors in "
            f"{type(module).__name__}",
        )
    return shapes_and_types


def _tensors_with_owners(
    module: torch.nn.Module, leave_out: AbstractSet[int]
) -> list[tuple[torch.Tensor, Owners]]:
    """List every tensor in `module` and its submodules once, with all places that hold it, each as
    (module, name of the attribute): parameters, buffers, and plain attributes. The order is the
    same on every rank. Tensors whose id is in `leave_out` are skipped."""
    owners: dict[int, tuple[torch.Tensor, Owners]] = {}
    for part in module.modules():
        attributes = {**part._parameters, **part._buffers, **vars(part)}
        for name, tensor in attributes.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in leave_out:
                _, places = owners.setdefault(id(tensor), (tensor, []))
                places.append((part, name))
    return list(owners.values())
