"""What ranks tell each other: orders of rank 0, and what the others answer.

They travel as pickles over a pair of connected sockets that a rank inherits when it is started. No
other process has an end of it, so nobody else can write what is unpickled here. Tensors do not
travel here (collective.py).
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
    """Connect to the other ranks for collective calls."""

    meeting: Meeting


@dataclass(frozen=True)
class TakeState:
    """Receive weights and moments of the policy from rank 0. `has_moments`: for each parameter
    whether it was ever updated."""

    has_moments: list[bool]


@dataclass(frozen=True)
class Begin:
    """A new batch, of which this rank computes `part`."""

    part: Part


@dataclass(frozen=True)
class Run:
    """One pass over the batch that was begun.

    Attributes:
        token_limit: the most tokens that go through the model at once.
        first: whether it is the first pass over this batch.
        seed: of the random numbers that the pass draws (dropout).
    """

    token_limit: int
    first: bool
    seed: int


@dataclass(frozen=True)
class Step:
    """Add the gradients up over all ranks, and do the optimizer step."""

    learning_rate: float
    max_grad_norm: float


@dataclass(frozen=True)
class Load:
    """Sample from now on with the policy's adapter, with one whose weights rank 0 hands on now, or
    with none: "policy", "handed on" or "base"."""

    what: str


@dataclass(frozen=True)
class Generate:
    """Sample one completion for each of the prompts."""

    prompts: Sequence[list[int]]
    params: SamplingParams


@dataclass(frozen=True)
class Accompany:
    """Do the passes of other ranks, which hold parts of each other's layers (lockstep.py), until
    all are idle. No answer."""


@dataclass(frozen=True)
class ReleaseMemory:
    """Release memory that the sampler does not need until the next call."""


@dataclass(frozen=True)
class Fingerprint:
    """Answer with the SHA-256 of the policy's weights."""


@dataclass(frozen=True)
class End:
    """The run is over."""


# --- answers of the others ------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """A sign of life from within a long order."""


@dataclass(frozen=True)
class Ended:
    """Completion number `index` of a `Generate` has ended."""

    index: int
    completion: Completion


@dataclass(frozen=True)
class Done:
    """An order is carried out; `result` is what came of it."""

    result: Any = None


@dataclass(frozen=True)
class OutOfMemory:
    """Memory ran out in a pass, whose gradients count no more."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The rank cannot go on. The first fields are those of a failure record; `is_consequence` says
    that a collective call failed, for which another rank is to blame."""

    kind: str
    message: str
    evidence: str
    hint: Hint
    is_consequence: bool = False
