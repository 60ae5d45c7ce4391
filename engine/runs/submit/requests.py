"""What a client asks for when it queues work.

The command line or the tool builds it once; it is passed on unchanged until the run exists.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from engine.core.files import JsonObject
from engine.core.wording.kinds import KINDS, Kind
from engine.home.rows import DEFAULT_GPU_HOURS
from engine.records.settings import GivenSettings

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
        max_gpu_hours: the most device hours that this attempt may take. None stands for
            DEFAULT_GPU_HOURS, or for the cap that a resumed run had.
        request_id: if a second request has the same id, no second run is made; its reply is about
            the first run.
        resume: the run to continue from its last complete checkpoint.
        approved: whether a person agreed to a spend above `auto_approve_gpu_hours`.
        profile: whether the worker writes a profiler trace of two steps.
        then: further steps of a plan. Each starts from the best checkpoint of the step before;
            engine/runs/submit/plan_steps.py reads them.
        vary: setting -> list of values. The plan is carried out once for each combination.
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
        """Whether the request is a plan: several runs that are queued, capped and cancelled as
        one."""
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
        """Return `then` and `vary`, without empty ones.

        A request without them must keep the hash that it had before these arguments existed.
        """
        plan_arguments = {"then": list(self.then), "vary": dict(self.vary)}
        return {name: value for name, value in plan_arguments.items() if value}

    def plan(self) -> Mapping[str, Any]:
        """Return the environment, model, algorithm and settings by the names of these arguments.

        A dry run, an estimate and a submit all take these four arguments.
        """
        return {
            "env_id": self.env_id,
            "model": self.model,
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
        }

    def given_arguments(self) -> Mapping[str, Any]:
        """Return the arguments of a call that repeats this request, by name, without empty ones.

        `max_gpu_hours` is left out, because a caller who repeats the call names another cap.
        `approved` is left out, because a person has agreed to this one spend only.
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
        """Return the names of arguments that were given although a resumed run does not take them.

        An argument counts as given if its value differs from the default.
        """
        defaults = TrainRequest()
        names = [argument.name for argument in fields(self) if argument.name not in _RESUME_TAKES]
        return [name for name in names if getattr(self, name) != getattr(defaults, name)]


@dataclass(frozen=True)
class DryRunRequest(TrainRequest):
    """The check of a request that could be submitted, without training.

    Attributes:
        samples: how many tasks the model answers in a probe (a short sampling run); 0 for none.
        smoke: whether to also make two optimizer steps on a few rows, whose result is thrown away.
        smoke_s: seconds that these steps may take; 0 for what is left of a client's call.
        full: whether the reply also has the details of the checks that passed.
    """

    samples: int = 0
    smoke: bool = False
    smoke_s: float = 0.0
    full: bool = False


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation of models on the same tasks, or with `regrade` a new scoring of stored answers.

    Attributes:
        env_id: the environment version that asks and scores.
        models: references of the models that answer.
        split: "heldout", "dev" or "train".
        rows: the most tasks that are asked.
        attempts: answers per task; one is greedy, more are sampled.
        settings: sampling settings that should differ from the defaults.
        regrade: the run whose stored answers the environment scores; "" for an evaluation.
        task_indices: the tasks to ask, instead of `rows`: positions from 0 and ranges of them, such
            as "0-9,12", in the order in which the environment lists the split; "" for no choice.
        perturb: the kinds of other words (engine/core/wording) in which the same tasks are also
            asked, or "all".
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
        """The kinds of other words in which tasks are also asked, each once, in the order of
        `KINDS`."""
        return [kind for kind in KINDS if kind in self.perturb or "all" in self.perturb]


@dataclass(frozen=True)
class ProbeRequest:
    """A short run that samples `samples` tasks `group_size` times each."""

    env_id: str
    model: str
    samples: int
    settings: GivenSettings = field(default_factory=dict)
