"""Memory of a vLLM server: beside the training of a run, asleep, and as a deployment.

A server is told the share of a GPU that it may take. Weights, its own buffers and at least one
whole sequence of keys and values have to fit into that; what is left holds more of them. Asleep (at
vLLM's level 1) it gives all back but its context, and keeps its weights in the machine's memory.
The bytes of its context and buffers are read from its documentation, not measured here.
"""

from dataclasses import dataclass

from engine.sizing.layers import FITS, LoadedModel, overhead_bytes

# Beside the trainer a server may take what is free but for this.
TRAINER_RESERVE = 3_000_000_000
# Of the server itself: context, captured graphs, activations of its largest batch.
AWAKE_BYTES = 3_500_000_000
ASLEEP_BYTES = 2_000_000_000  # of the GPU while it sleeps: its context and what is not pooled
LEAST_ROWS = 8  # whole sequences that must fit, or our own sampler is used
MOST_ROWS = 1024  # sequences under way at once; with more its graphs only grow
USUAL_ROWS = 256  # answers at once of a deployment
ALONE_SHARE = 0.9  # of a GPU that a server without a trainer may take
_DEPLOYED_SEQUENCES = 4  # whole ones that a deployment has room for, where there is so much memory


@dataclass(frozen=True)
class ServerPlan:
    """A server that samples for a run.

    Attributes:
        bytes: of the GPU that it may take awake.
        rows: sequences under way at once.
        why_not: why it cannot run, in words; "" if it can.
        gpus_of_model: over how many GPUs each copy of the model is cut.
    """

    bytes: float
    rows: int
    why_not: str = ""
    gpus_of_model: int = 1


def beside_training(
    loaded: LoadedModel, memory: float, held: float, length: float, ram: float
) -> ServerPlan:
    """The server that samples for a run on the same GPU.

    Args:
        memory: bytes of the GPU that the run may use, of which the trainer holds `held` bytes
            (weights, adapter and its context) while the server is awake.
        length: tokens of the longest sequence, prompt and completion together.
        ram: bytes of the machine's memory, which holds the weights while the server sleeps; 0 if
            that is not known.
    """
    granted = memory - held - TRAINER_RESERVE
    weights = server_weights(loaded)
    needed = weights + AWAKE_BYTES
    row_bytes = max(1.0, length * loaded.cache_token_bytes)
    least = needed + LEAST_ROWS * row_bytes
    why_not = _asleep_too_large(weights, ram)
    if least > min(granted, FITS * memory - held):
        why_not = (
            f"vLLM holds the weights once more and needs {_gb(least)} GB for {LEAST_ROWS} "
            f"sequences of {length:.0f} tokens; training leaves {_gb(max(0.0, granted))} of "
            f"{_gb(memory)} GB"
        )
    return ServerPlan(granted, _rows_in(granted - needed, row_bytes), why_not)


def _asleep_too_large(weights: float, ram: float) -> str:
    """Why a server with so many bytes of weights cannot sleep in the machine's memory of `ram`
    bytes, in words; "" if it can, or if `ram` is 0, not known."""
    if not ram or weights <= 0.5 * ram:
        return ""
    return f"asleep it keeps {_gb(weights)} GB of weights in the machine's memory of {_gb(ram)} GB"


def _rows_in(memory: float, row_bytes: float) -> int:
    """How many sequences of `row_bytes` bytes of keys and values a server holds in `memory` bytes,
    which may be negative; no more than `MOST_ROWS`."""
    return int(min(MOST_ROWS, max(0.0, memory) / row_bytes))


def alone(loaded: LoadedModel, memory: float, gpus: int, length: float) -> ServerPlan:
    """The server that samples for a run on GPUs of its own: as many copies of the model as there is
    room for, each cut over the fewest GPUs on which it fits with `LEAST_ROWS` sequences.

    Args:
        memory: bytes of each of the `gpus`.
        length: tokens of the longest sequence, prompt and completion together.
    """
    granted = ALONE_SHARE * memory
    row_bytes = max(1.0, length * loaded.cache_token_bytes)
    weights = server_weights(loaded)
    gpus_per_copy = _gpus_per_copy(gpus, loaded.model.kv_heads)
    for cut in gpus_per_copy:
        room = granted - AWAKE_BYTES - weights / cut  # of each GPU, for keys and values
        rows = _rows_in(room * cut, row_bytes)
        if rows >= LEAST_ROWS:
            return ServerPlan(granted, rows, gpus_of_model=cut)
    most = gpus_per_copy[-1]
    why_not = (
        f"vLLM needs {_gb(weights / most + AWAKE_BYTES)} GB and {LEAST_ROWS} "
        f"sequences of {length:.0f} tokens on each GPU, of which it may take {_gb(granted)}"
    )
    return ServerPlan(granted, 0, why_not, gpus_of_model=most)


def _gpus_per_copy(gpus: int, kv_heads: int) -> list[int]:
    """Over how many GPUs one copy of a model can be cut where there are `gpus`, in ascending order:
    vLLM cuts it by its heads, and knows no copies on unequal numbers of GPUs."""
    return [cut for cut in range(1, gpus + 1) if gpus % cut == 0 and kv_heads % cut == 0]


def trainer_bytes(loaded: LoadedModel, adapter_bytes: float, others: float = 0.0) -> float:
    """Bytes of a GPU that a trainer holds while it samples: weights, adapters, its context, and the
    weights of other models (`others`, of a teacher)."""
    model_bytes = loaded.weights + adapter_bytes + others
    return model_bytes + overhead_bytes("cuda", model_bytes)


def server_weights(loaded: LoadedModel) -> float:
    """Bytes of the weights as a server holds them: never in 4 bits."""
    return float(loaded.model.params * loaded.width)


def deployed_bytes(
    loaded: LoadedModel, length: int, memory: float, adapters: int = 4, rank: int = 64
) -> tuple[float, float]:
    """Bytes that a deployment takes of a GPU of `memory` bytes: (at least, at most).

    At least: weights, slots for adapters, buffers, and one whole sequence of `length` tokens. At
    most: with several sequences, but no more than its largest share of the GPU.
    """
    slot_bytes = loaded.model.adapter_params(rank, loaded.model.targets) * loaded.width
    fixed = server_weights(loaded) + adapters * slot_bytes + AWAKE_BYTES
    sequence = length * loaded.cache_token_bytes
    # 10 % for what vLLM counts against its share beside these.
    least = 1.1 * fixed + sequence
    wished = 1.1 * fixed + _DEPLOYED_SEQUENCES * sequence
    return least, max(least, min(wished, ALONE_SHARE * memory))


def _gb(count: float) -> str:
    """Bytes in GB with one digit, such as "8.1"."""
    return f"{count / 1e9:.1f}"
