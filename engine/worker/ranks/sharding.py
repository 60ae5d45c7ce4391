"""A base too large for one device: its layers cut over the ranks that train (FSDP2).

Each rank keeps a part of every layer's frozen weights, and a layer is gathered from all ranks just
before it is computed, forward and again backward (`fully_shard` of torch.distributed.fsdp, arXiv
2304.11277). Frozen weights have no gradients, so none are scattered; adapters are added afterwards,
whole on every rank, and their gradients are added up as on unsharded ranks (collective.py). What is
outside the layers, embeddings, head and last norm, is whole on every rank too.

Rank 0 reads the files into the machine's memory; to the others the weights go layer by layer.
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
    """Connect this rank with the others and load the base with them; every rank that trains calls
    this. `ranks` are those of rank 0, None on another."""
    if ranks is not None:
        ranks.join_at_once()
    else:
        training = training_ranks(job.config, rank_count())
        meeting = collective.Meeting(store_of(job), training, training)
        with collective.together():
            collective.join(meeting, own_rank(), device, collective.LOADING_PATIENCE)
    base = load_sharded_base(path, device, precision, own_rank())
    if isinstance(job.config, TrainConfig) and job.config.settings.gradient_checkpointing:
        # By all at once: a pass back gathers the layers of whatever asks for gradients.
        assert isinstance(base.network, HubNetwork)
        base.network.enable_checkpointing()
    return base


def load_sharded_base(path: Path, device: torch.device, precision: str, rank: int) -> Base:
    """Load the base model in the folder `path`, sharded over all ranks of the process group, which
    call this at once.

    Raises:
        WorkerFailure: kind config, when the folder holds no model that can be loaded, or one
            without a list of layers.
    """
    if rank == 0:
        model: Any = load_transformers(path, torch.device("cpu"), precision, runs_on=device)[0]
    else:
        model = empty_transformers(path, precision, device)
    shard(model, device)
    return load_base_with(path, lambda vocab: HubNetwork(model, vocab, WHY))


def shard(model: Any, device: torch.device) -> None:
    """Give the model of every rank the weights of rank 0's, on its device, and cut the layers over
    the ranks. Raises WorkerFailure (config) for a model without a list of layers."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise WorkerFailure(
            "config",
            "This model cannot be sharded: its decoder has no list of layers.",
            evidence=type(decoder).__name__,
            hint="Train it on a GPU that holds it, or in 4 bits (quantization nf4).",
        )
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in layers:
        _hand_on_module(layer, device)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    in_layers = {id(parameter) for parameter in layers.parameters()}
    _hand_on_module(model, device, leave_out=in_layers)
    outside = {p for p in decoder.parameters() if id(p) not in in_layers}
    # The root, which gathers the next layer while one is computed; it holds no weights itself.
    fully_shard(decoder, mesh=mesh, ignored_params=outside)


Owners = list[tuple[torch.nn.Module, str]]


def _hand_on_module(
    module: torch.nn.Module, device: torch.device, leave_out: AbstractSet[int] = frozenset()
) -> None:
    """Put the values of rank 0's tensors in `module` into every rank's, on its device.

    Args:
        leave_out: ids of parameters that are there already.
    """
    places = _tensors(module, leave_out)
    shapes_and_types = _of_rank_0(module, [tensor for tensor, _ in places])
    for (tensor, owners), (shape, dtype) in zip(places, shapes_and_types, strict=True):
        values = torch.empty(shape, dtype=dtype, device=device)
        if not tensor.is_meta:
            values.copy_(tensor)
        distributed.broadcast(values, src=0)
        if isinstance(tensor, torch.nn.Parameter):
            values = torch.nn.Parameter(values, requires_grad=False)
        for owner, name in owners:
            setattr(owner, name, values)


def _of_rank_0(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each of the module's tensors on rank 0, which sends them to all ranks;
    `tensors` are those of this rank. Raises WorkerFailure (internal) where rank 0 has another
    number of them."""
    sent: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in tensors]]
    distributed.broadcast_object_list(sent, src=0)  # replaces what is in the list
    (shapes_and_types,) = sent
    if len(shapes_and_types) != len(tensors):
        raise WorkerFailure(
            "internal",
            "A rank has built another model than rank 0.",
            evidence=f"{len(tensors)} and {len(shapes_and_types)} tensors in "
            f"{type(module).__name__}",
        )
    return shapes_and_types


def _tensors(
    module: torch.nn.Module, leave_out: AbstractSet[int]
) -> list[tuple[torch.Tensor, Owners]]:
    """Every tensor that the modules in `module` hold, each once, with all places that hold it:
    parameters, buffers, and tensors that are plain attributes. In the same order on every rank."""
    owners: dict[int, tuple[torch.Tensor, Owners]] = {}
    for part in module.modules():
        held = {**part._parameters, **part._buffers, **vars(part)}
        for name, tensor in held.items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in leave_out:
                owners.setdefault(id(tensor), (tensor, []))[1].append((part, name))
    return list(owners.values())
