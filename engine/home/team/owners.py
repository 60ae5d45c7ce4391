"""For whom a home is opened, and what owners let others see."""

from dataclasses import dataclass
from typing import Literal

PRIORITIES = ("low", "normal", "high")  # the order in which queued runs start follows them
EVERYONE = "*"  # the grantee that stands for all keys
# What may be done with something: read about it, use it in a call, change or stop it.
May = Literal["read", "use", "change"]


@dataclass(frozen=True)
class Viewer:
    """A key for whom a home is opened: it sees what is its own or shared with it.

    A home without a viewer is that of the local user, who sees everything.

    Attributes:
        owner: the id of the key. What is made through the home belongs to it.
        may: what the present call does with what it names. Only the owner may change something;
            what is shared to be used may also be read.
        sees_all: whether the key sees everything, as the local user does.
        project: the project that the runs of the key belong to; "" for none.
        priority: the priority of its runs, one of `PRIORITIES`.
    """

    owner: str
    may: May = "read"
    sees_all: bool = False
    project: str = ""
    priority: str = "normal"


@dataclass(frozen=True)
class Share:
    """Something that its owner lets others see.

    Attributes:
        kind: "run" (a run, or a plan), "env" or "deployment".
        name: the id of a run or deployment; of an environment its name (all versions) or an id.
        grantee: the id of the key that sees it; `EVERYONE` for all keys.
        may: "read" or "use".
    """

    kind: str
    name: str
    owner: str
    grantee: str
    may: str
