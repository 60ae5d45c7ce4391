"""Memory of what serves a model: of a vLLM server beside the training of a run, asleep, and as a
deployment; and of a deployment by our own sampler.

A vLLM server is told the share of a GPU that it may take. Into that must fit the weights, its own
buffers, and keys and values of at least one whole sequence; more keys and values fill the rest.
Asleep (at vLLM's level 1) it gives all back except its context, and keeps its weights in the
machine's memory. The bytes of its context and buffers are read from its documentation, not measured
here.
"""

from dataclasses import dataclass

from engine.models.sizing.layers import FITS, LoadedModel, overhead_bytes

# Beside a trainer, a server may take the free memory except so many bytes.
TRAINER_RESERVE = 3_000_000_000
# Memory of the server itself: context, captured graphs, activations of its largest batch.
AWAKE_BYTES = 3_500_000_000
ASLEEP_BYTES = 2_000_000_000  # GPU memory of a sleeping server: its context and what is not pooled
LEAST_ROWS = 8  # if fewer whole sequences fit, our own sampler is used
MOST_ROWS = 1024  # sequences under way at once; with more, only its graphs would grow
USUAL_ROWS = 256  # answers at once of a deployment
ALONE_SHARE = 0.9  # share of a GPU that a server without a trainer may take
# Bytes that a serving process holds beside the weights: libraries, activations, caches.
OVERHEAD = {
    ("torch", "cpu"): 700_000_000,
    ("torch", "cuda"): 2_500_000_000,
    ("vllm", "cpu"): 4_500_000_000,
}
_WEIGHT_BYTES = {"cpu": 4, "cuda": 2}  # per parameter: float32 and bfloat16
_WEIGHT_MARGIN = 1.1  # 10 % are added to what the weights themselves take
_DEPLOYED_SEQUENCES = 4  # whole sequences that a deployment has room for, if memory allows it


def plain_bytes(params: float, engine: str, device_kind: str) -> int:
    """Return the bytes of memory that a deployment takes if it reserves none for keys and values.

    Args:
        params: parameters of the model.
        engine: "torch" (our own sampler), or on a CPU also "vllm".
        device_kind: "cpu" or "cuda".
    """
    weights = int(params * _WEIGHT_BYTES[device_kind] * _WEIGHT_MARGIN)
    return weights + OVERHEAD[engine, device_kind]


@dataclass(frozen=True)
class ServerPlan:
    """A server that samples for a run.

    Attributes:
        bytes: GPU memory that it may take while awake.
        rows: sequences under way at once.
        why_not: why it cannot run, in words; "" if it can.
        gpus_of_model: number of GPUs that each copy of the model is cut over.
    """

    bytes: float
    rows: int
    why_not: str = ""
    gpus_of_model: int = 1


def server_beside_training(
    loaded: LoadedModel, memory: float, trainer_held: float, length: float, ram: float
) -> ServerPlan:
    """Plan the server that samples for a run on the GPU that also trains.

    Args:
        memory: bytes of the GPU that the run may use.
        trainer_held: bytes of these that the trainer takes while the server is awake (weights,
            adapter and its context).
        length: tokens of the longest sequence, prompt and completion together.
        ram: bytes of the machine's memory, which holds the weights while the server sleeps; 0 if
            that is not known.
    """
    granted = memory - trainer_held - TRAINER_RESERVE  # bytes that the server may take
    weights = weight_bytes(loaded)
    fixed = weights + AWAKE_BYTES
    row_bytes = max(1.0, length * loaded.cache_token_bytes)  # keys and values of one sequence
    least = fixed + LEAST_ROWS * row_bytes
    why_not = _asleep_too_large(weights, ram)
    # Trainer and server together may also take no more than FITS of the GPU.
    if least > min(granted, FITS * memory - trainer_held):
        why_not = (
            f"vLLM holds the weights once more and needs {_gb(least)} GB for {LEAST_ROWS} "
            f"sequences of {length:.0f} tokens; training leaves {_gb(max(0.0, granted))} of "
            f"{_gb(memory)} GB"
        )
    return ServerPlan(granted, _rows_in(granted - fixed, row_bytes), why_not)


def _asleep_too_large(weights: float, ram: float) -> str:
    """Say why a server with `weights` bytes cannot sleep in the machine's memory of `ram` bytes; ""
    if it can, or if `ram` is 0 (not known)."""
    if not ram or weights <= 0.5 * ram:
        return ""
    return f"asleep it keeps {_gb(weights)} GB of weights in the machine's memory of {_gb(ram)} GB"


def _rows_in(memory: float, row_bytes: float) -> int:
    """Count the sequences, each with `row_bytes` bytes of keys and values, that a server holds in
    `memory` bytes (which may be negative); at most `MOST_ROWS`."""
    return int(min(MOST_ROWS, max(0.0, memory) / row_bytes))


def server_on_own_gpus(loaded: LoadedModel, memory: float, gpus: int, length: float) -> ServerPlan:
    """Plan the server that samples for a run on GPUs of its own: as many copies of the model as
    fit, each cut over the fewest GPUs on which it fits together with `LEAST_ROWS` sequences.

    Args:
        memory: bytes of each of the `gpus`.
        length: tokens of the longest sequence, prompt and completion together.
    """
    granted = ALONE_SHARE * memory  # bytes of each GPU that the server may take
    row_bytes = max(1.0, length * loaded.cache_token_bytes)  # keys and values of one sequence
    weights = weight_bytes(loaded)
    gpu_counts = _gpus_per_copy(gpus, loaded.model.kv_heads)
    for gpus_of_copy in gpu_counts:  # over how many GPUs each copy is cut
        room = granted - AWAKE_BYTES - weights / gpus_of_copy  # of each GPU, for keys and values
        rows = _rows_in(room * gpus_of_copy, row_bytes)
        if rows >= LEAST_ROWS:
            return ServerPlan(granted, rows, gpus_of_model=gpus_of_copy)
    most_gpus = gpu_counts[-1]
    why_not = (
        f"vLLM needs {_gb(weights / most_gpus + AWAKE_BYTES)} GB and {LEAST_ROWS} "
        f"sequences of {length:.0f} tokens on each GPU, of which it may take {_gb(granted)}"
    )
    return ServerPlan(granted, 0, why_not, gpus_of_model=most_gpus)


def _gpus_per_copy(gpus: int, kv_heads: int) -> list[int]:
    """List the numbers of GPUs that one copy of a model can be cut over, in ascending order. vLLM
    cuts a model by its heads, and gives every copy the same number of GPUs. So the number must
    divide both `gpus` and `kv_heads`."""
    counts = range(1, gpus + 1)
    return [count for count in counts if gpus % count == 0 and kv_heads % count == 0]


def trainer_bytes(loaded: LoadedModel, adapter_bytes: float, other_weights: float = 0.0) -> float:
    """Estimate the bytes of a GPU that a trainer holds while the server samples: weights, adapters
    (`adapter_bytes`), its context, and `other_weights`, the bytes of other models' weights, such as
    a teacher's."""
    model_bytes = loaded.weights + adapter_bytes + other_weights
    return model_bytes + overhead_bytes("cuda", model_bytes)


def weight_bytes(loaded: LoadedModel) -> float:
    """Return the bytes of the model's weights as a server holds them, which is never in 4 bits."""
    return float(loaded.model.params * loaded.width)


def deployed_bytes(
    loaded: LoadedModel, length: int, memory: float, adapters: int = 4, rank: int = 64
) -> tuple[float, float]:
    """Estimate the bytes that a deployment takes of a GPU of `memory` bytes: (at least, at most).

    The least is for weights, slots for adapters, buffers, and one whole sequence. The most is for
    several sequences, but no more than its largest share of the GPU.

    Args:
        length: tokens of a sequence, prompt and completion together.
        adapters: number of LoRA adapters that can be loaded at once.
        rank: the highest rank of such an adapter.
    """
    slot_bytes = loaded.model.adapter_params(rank, loaded.model.targets) * loaded.width
    fixed = weight_bytes(loaded) + adapters * slot_bytes + AWAKE_BYTES
    sequence_bytes = length * loaded.cache_token_bytes
    # 10 % more, for other memory that vLLM counts against its share.
    least = 1.1 * fixed + sequence_bytes
    wished = 1.1 * fixed + _DEPLOYED_SEQUENCES * sequence_bytes
    return least, max(least, min(wished, ALONE_SHARE * memory))


def _gb(count: float) -> str:
    """Write bytes as GB with one digit, such as "8.1"."""
    return f"{count / 1e9:.1f}"
