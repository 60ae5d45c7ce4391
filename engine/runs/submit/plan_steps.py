"""A plan as a list of runs: the steps of a chain, once for each combination of varied settings.

A plan is a request with `then` or `vary`. Its first step is the request itself; each entry of
`then` is a further step, which starts from the best checkpoint of the one before, on the same
environment unless it names another. The last entry may be an evaluation: of the model that the plan
starts from and of every step's.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import UserError
from engine.runs.submit.evaluation import MAX_MODELS
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

MAX_RUNS = 16  # of a plan
EVALUATE = "evaluate"
# The keys of an entry of `then`, besides `algorithm`.
_TRAIN_KEYS = frozenset({"env_id", "settings", "note"})
_EVALUATE_KEYS = frozenset({"env_id", "settings", "rows", "attempts"})
_KEY_TYPES = {"env_id": str, "note": str, "settings": dict, "rows": int, "attempts": int}
_EXAMPLE = '{"algorithm": "grpo", "settings": {"steps": 60}} or {"algorithm": "evaluate"}'


@dataclass(frozen=True)
class PlannedTraining:
    """A training run of a plan.

    Attributes:
        step: 1 for the first.
        label: the values that are varied, such as "seed=2"; "" for none.
        request: its `model` counts only where `behind` is None.
        behind: the place, in the list of the plan's runs, of the run whose best checkpoint it
            starts from.
    """

    step: int
    label: str
    request: TrainRequest
    behind: int | None = None


@dataclass(frozen=True)
class PlannedEvaluation:
    """The evaluation at the end of a plan: of the model that it starts from, and of the best
    checkpoints of the runs at the places `asked`. `request` names no models."""

    step: int
    request: EvaluationRequest
    asked: Sequence[int]
    label: str = ""


def steps_of(
    request: TrainRequest,
) -> tuple[list[PlannedTraining], PlannedEvaluation | None]:
    """The training runs of a plan, each after the one that it starts from, and the evaluation at
    its end where it asks for one. Raises UserError BAD_ARGUMENT."""
    entries = [_checked(entry, place) for place, entry in enumerate(request.then)]
    is_evaluated = bool(entries) and entries[-1]["algorithm"] == EVALUATE
    further = entries[:-1] if is_evaluated else entries
    if any(entry["algorithm"] == EVALUATE for entry in further):
        raise _bad_then("an evaluation is not the last step", "Put it at the end of then.")
    _check_lists(request.vary)
    chains = math.prod(len(values) for values in request.vary.values())
    count = chains * (1 + len(further)) + is_evaluated
    if count > MAX_RUNS:  # before the combinations are made, which may be millions
        raise UserError(
            "BAD_ARGUMENT",
            f"the plan has {count:,} runs; it may have {MAX_RUNS}",
            hint="Vary fewer values, or take fewer steps.",
            field="vary",
        )
    trainings: list[PlannedTraining] = []
    for variant in _variants(request.vary):
        trainings += _chain(request, further, variant, place=len(trainings))
    if not is_evaluated:
        return trainings, None
    chain_length = 1 + len(further)
    return trainings, _evaluation(request, entries[-1], trainings, chain_length)


def _chain(
    request: TrainRequest,
    further: Sequence[Mapping[str, Any]],
    variant: Mapping[str, Any],
    place: int,
) -> list[PlannedTraining]:
    """One chain of training runs.

    Args:
        further: the entries of `then` that train.
        variant: the settings that are varied, with their values in this chain. The seed counts in
            every step, the others in the first.
        place: that of its first run in the list of the plan's runs.
    """
    label = ", ".join(f"{name}={value}" for name, value in variant.items())
    seed = {"seed": variant["seed"]} if "seed" in variant else {}
    first = replace(request, settings={**request.settings, **variant}, then=[], vary={})
    chain = [PlannedTraining(1, label, first)]
    for entry in further:
        before = chain[-1].request
        next_request = replace(
            before,
            env_id=entry.get("env_id", before.env_id),
            model="",
            algorithm=entry["algorithm"],
            settings={**entry.get("settings", {}), **seed},
            note=entry.get("note", request.note),
            parent="",
        )
        behind = place + len(chain) - 1
        chain.append(PlannedTraining(len(chain) + 1, label, next_request, behind))
    return chain


def _evaluation(
    request: TrainRequest,
    entry: Mapping[str, Any],
    trainings: Sequence[PlannedTraining],
    chain_length: int,
) -> PlannedEvaluation:
    """The evaluation that the last entry of `then` asks for: of every training's model, or of the
    last of each chain where that would be too many. Raises UserError BAD_ARGUMENT."""
    asked = list(range(len(trainings)))
    if len(asked) >= MAX_MODELS:  # with the start it would be more than one evaluation takes
        asked = [place for place in asked if trainings[place].step == chain_length]
    if len(asked) >= MAX_MODELS:
        raise _bad_then(
            f"the evaluation would ask {len(asked) + 1} models; it may ask {MAX_MODELS}",
            "Vary fewer values, or leave the evaluation out.",
        )
    env_id = entry.get("env_id", trainings[-1].request.env_id)
    evaluation = EvaluationRequest(
        env_id=env_id,
        models=["start", *map(str, asked)],  # replaced when the runs have their ids
        rows=entry.get("rows", EvaluationRequest(env_id).rows),
        attempts=entry.get("attempts", 1),
        settings=entry.get("settings", {}),
    )
    return PlannedEvaluation(chain_length + 1, evaluation, asked)


def _check_lists(vary: Mapping[str, Any]) -> None:
    """Raises UserError BAD_ARGUMENT for a varied setting whose values are no list, or none."""
    for name, values in vary.items():
        if not isinstance(values, list) or not values:
            raise _bad_values(name, values)


def _variants(vary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the varied values: setting -> value; one that is empty where nothing is
    varied. Raises UserError BAD_ARGUMENT for a value that is given twice."""
    for name, values in vary.items():
        if _has_repeats(values):
            raise _bad_values(name, values)
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def _bad_values(name: str, values: object) -> UserError:
    """The error for the values of a varied setting."""
    return UserError(
        "BAD_ARGUMENT",
        f"vary.{name[:40]} = {str(values)[:80]} is no list of different values",
        hint='Give the values of a setting, such as {"seed": [1, 2, 3]}.',
        field="vary",
    )


def _has_repeats(values: Sequence[object]) -> bool:
    """Whether a value occurs twice. Values may be lists, which have no hash."""
    return any(value in values[:place] for place, value in enumerate(values))


def _checked(entry: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    """An entry of `then`, whose keys and types are those that a step may have. Raises UserError
    BAD_ARGUMENT."""
    algorithm = entry.get("algorithm")
    if not isinstance(algorithm, str):
        raise _bad_then(f"then[{place}] names no algorithm", f"Write {_EXAMPLE}.")
    allowed = _EVALUATE_KEYS if algorithm == EVALUATE else _TRAIN_KEYS
    for name, value in entry.items():
        if name == "algorithm":
            continue
        if name not in allowed:
            known = ", ".join(sorted(allowed))
            raise _bad_then(
                f"then[{place}] has no key {name!r}", f"Besides algorithm it takes {known}."
            )
        if not isinstance(value, _KEY_TYPES[name]) or isinstance(value, bool):
            raise _bad_then(
                f"then[{place}].{name} = {str(value)[:80]} cannot be used", f"Write {_EXAMPLE}."
            )
    return entry


def _bad_then(fault: str, hint: str) -> UserError:
    """The error for a fault in `then`."""
    return UserError("BAD_ARGUMENT", fault, hint=hint, field="then")
