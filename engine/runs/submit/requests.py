"""What a client asks for when it queues work.

The command line or the tool builds it once; it is passed on unchanged until the run exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from engine.core.files import JsonObject
from engine.home.rows import DEFAULT_GPU_HOURS
from engine.records.settings import GivenSettings
from engine.wording.kinds import KINDS, Kind

# The arguments that count when a run is resumed.
_RESUME_TAKES = frozenset({"resume", "max_gpu_hours", "request_id", "approved", "profile"})


@dataclass(frozen=True)
class TrainRequest:
    """A training run, or with `resume` a new attempt of one.

    Attributes:
        env_id: an environment version, the beginning of its id, or a bare name.
        model: what to train: a reference as engine/models/catalog.py reads it.
        algorithm: "sft", "dpo" or "grpo".
        settings: what should differ from the defaults.
        note: why this run.
        expect: the prediction "better" or "no_difference", a target such as "90 %", or "".
        parent: the run to compare the settings with.
        max_gpu_hours: the most device hours that this attempt may take; None: DEFAULT_GPU_HOURS,
            of a resumed run its own.
        request_id: the same request again is answered with the run it made first.
        resume: the run to continue from its last complete checkpoint.
        approved: a person agreed to a spend above `auto_approve_gpu_hours`.
        profile: the worker leaves a trace of two steps.
        then: further steps of a plan, each from the best of the one before, as
            engine/runs/submit/plan_steps.py reads them.
        vary: setting -> values: the plan is carried out once for each combination of them.
    """

    env_id: str = ""
    model: str = "pebble"
    algorithm: str = "grpo"
    settings: GivenSettings = field(default_factory=dict)
    note: str = ""
    expect: str = ""
    parent: str = ""
    max_gpu_hours: float | None = None
    request_id: str = ""
    resume: str = ""
    approved: bool = False
    profile: bool = False
    then: Sequence[JsonObject] = field(default_factory=list)
    vary: JsonObject = field(default_factory=dict)

    @property
    def is_plan(self) -> bool:
        """Whether it asks for several runs, which are queued, capped and cancelled as one."""
        return bool(self.then or self.vary)

    @property
    def cap_hours(self) -> float:
        """The most device hours that a new run may take."""
        return float(DEFAULT_GPU_HOURS if self.max_gpu_hours is None else self.max_gpu_hours)

    def body(self) -> Mapping[str, Any]:
        """Return the arguments that identify the request, by name.

        The same `request_id` with another body is refused. The hash of the body is stored, so the
        keys must never change.
        """
        return {
            **self.plan(),
            "note": self.note,
            "expect": self.expect,
            "parent": self.parent,
            "resume": self.resume,
            "max_gpu_hours": self.cap_hours,
            **self._plan_arguments(),
        }

    def _plan_arguments(self) -> Mapping[str, Any]:
        """Return `then` and `vary` where they were given: requests without them keep their hash."""
        given = {"then": list(self.then), "vary": dict(self.vary)}
        return {name: value for name, value in given.items() if value}

    def plan(self) -> Mapping[str, Any]:
        """Return the arguments that a dry run, an estimate and a submit have in common, by name.

        They say what is to be trained on what, and how.
        """
        return {
            "env_id": self.env_id,
            "model": self.model,
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
        }

    def given_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of a call that makes the same request, by name.

        These are the plan and what else was given. The cap is left out: whoever repeats the call
        names another one. So is `approved`: a person agrees to one spend, not to another.
        """
        optional_texts = {
            "note": self.note,
            "expect": self.expect,
            "parent": self.parent,
            "request_id": self.request_id,
        }
        given_texts = {name: text for name, text in optional_texts.items() if text}
        return {**self.plan(), **given_texts, **self._plan_arguments()}

    def arguments_not_for_resume(self) -> list[str]:
        """List the names of arguments that were given although a resumed run does not take them.

        An argument counts as given where it differs from its default.
        """
        defaults = TrainRequest()
        names = [item.name for item in fields(self) if item.name not in _RESUME_TAKES]
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]


@dataclass(frozen=True)
class DryRunRequest(TrainRequest):
    """The check of a request that could be submitted, without training.

    Attributes:
        samples: how many tasks the model answers in a probe; 0 for none.
        smoke: also do two optimizer steps on a few rows and throw them away.
        smoke_s: seconds that they may take; 0 for what is left of a client's call.
        full: the reply also has the details of what passed.
    """

    samples: int = 0
    smoke: bool = False
    smoke_s: float = 0.0
    full: bool = False


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation of models on the same tasks, or with `regrade` the scoring of that run's
    stored answers by this environment.

    Attributes:
        split: "heldout", "dev" or "train".
        rows: tasks at most.
        attempts: answers per task; one is greedy, more are sampled.
        settings: sampling settings that should differ from the defaults.
        task_indices: these tasks of the split instead of `rows`: positions from 0 and ranges of
            them, such as "0-9,12", in the order in which the environment lists its tasks; "" for
            none.
        perturb: in which other words the same tasks are asked too: kinds of engine/wording, or
            "all".
    """

    env_id: str
    models: Sequence[str] = ()
    split: str = "heldout"
    rows: int = 100
    attempts: int = 1
    settings: GivenSettings = field(default_factory=dict)
    regrade: str = ""
    task_indices: str = ""
    perturb: Sequence[str] = ()

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of other words that it asks for, each once, in their order."""
        return [kind for kind in KINDS if kind in self.perturb or "all" in self.perturb]


@dataclass(frozen=True)
class ProbeRequest:
    """A short run that samples `samples` tasks `group_size` times each."""

    env_id: str
    model: str
    samples: int
    settings: GivenSettings = field(default_factory=dict)
