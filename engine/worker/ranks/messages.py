"""The messages between ranks (processes of a run): orders of rank 0, and the answers of the others.

They are sent as pickles over a pair of connected sockets that a rank inherits when it is started.
No other process has an end of the pair, so nobody else can write what is unpickled here. Tensors
are sent in another way (collective.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.hints import Hint
from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import SamplingParams
from engine.worker.ranks.collective import Meeting
from engine.worker.ranks.parts import Part

# --- orders of rank 0 -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Order to connect to the other ranks for collective calls (calls that all ranks make
    together)."""

    meeting: Meeting


@dataclass(frozen=True)
class TakeState:
    """Order to receive the policy's weights and the optimizer's moments from rank 0. `has_moments`
    says for each parameter whether it was ever updated."""

    has_moments: list[bool]


@dataclass(frozen=True)
class Begin:
    """Order to begin a new batch, of which this rank computes `part`."""

    part: Part


@dataclass(frozen=True)
class Run:
    """Order to do one pass over the batch that was begun.

    Attributes:
        token_limit: the most tokens that go through the model at once.
        first: whether this is the first pass over the batch.
        seed: seed of the random numbers that the pass draws (dropout).
    """

    token_limit: int
    first: bool
    seed: int


@dataclass(frozen=True)
class Step:
    """Order to sum the gradients over all ranks and do the optimizer step."""

    learning_rate: float
    max_grad_norm: float


@dataclass(frozen=True)
class Load:
    """Order to sample from now on with the adapter that `what` names: "policy" (the policy's own),
    "handed on" (one whose weights rank 0 sends now), or "base" (none)."""

    what: str


@dataclass(frozen=True)
class Generate:
    """Order to sample one completion for each of the prompts."""

    prompts: Sequence[list[int]]
    params: SamplingParams


@dataclass(frozen=True)
class Accompany:
    """Order to do empty passes together with the other ranks, which hold parts of each other's
    layers (lockstep.py), until all ranks are idle. It has no answer."""


@dataclass(frozen=True)
class ReleaseMemory:
    """Order to release memory that the sampler does not need until its next call."""


@dataclass(frozen=True)
class Fingerprint:
    """Order to answer with the SHA-256 of the policy's weights."""


@dataclass(frozen=True)
class End:
    """Order to end: the run is over."""


# --- answers of the others ------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """A sign of life while a long order is carried out."""


@dataclass(frozen=True)
class Ended:
    """Answer to `Generate`, sent for each completion: number `index` has ended."""

    index: int
    completion: Completion


@dataclass(frozen=True)
class Done:
    """Answer that an order has been carried out; `result` depends on the order."""

    result: Any = None


@dataclass(frozen=True)
class OutOfMemory:
    """Answer that memory ran out in a pass. The gradients of that pass must not be used."""

    message: str


@dataclass(frozen=True)
class Failed:
    """Answer that the rank cannot go on. The first fields are those of a failure record.
    `is_consequence` says that a collective call failed because of another rank."""

    kind: str
    message: str
    evidence: str
    hint: Hint
    is_consequence: bool = False
