"""A plan as a list of runs: the steps of a chain, once for each combination of varied settings.

A plan is a request with `then` or `vary`. Its first step is the request itself. Each entry of
`then` is a further step, which starts from the best checkpoint of the step before, on the same
environment unless it names another; where the step before reached the target (`expect`), it is
skipped unless its entry says `"always": true`. The last entry may be an evaluation of the start
model and of the model of every step.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.errors import UserError
from engine.evidence.stats.basics.target import target_in
from engine.runs.submit.evaluation import MAX_MODELS
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from engine.settings.defaults import EVAL_ROWS

MAX_RUNS = 16  # the most runs of a plan
EVALUATE = "evaluate"
# The keys of an entry of `then`, besides `algorithm`.
_TRAIN_KEYS = frozenset({"env_id", "settings", "note", "always"})
_EVALUATE_KEYS = frozenset({"env_id", "settings", "rows", "attempts", "perturb"})
_KEY_TYPES = {
    "env_id": str,
    "note": str,
    "settings": dict,
    "rows": int,
    "attempts": int,
    "perturb": list,
    "always": bool,
}
_EXAMPLE = '{"algorithm": "grpo", "settings": {"seed": 1}} or {"algorithm": "evaluate"}'


@dataclass(frozen=True)
class PlannedTraining:
    """A training run of a plan.

    Attributes:
        step: the run's step in the plan, from 1.
        label: the varied values of the run, such as "seed=2"; "" if nothing varies.
        request: what the run is to train; its `model` counts only if `previous_index` is None.
        previous_index: the index, in the list of the plan's runs, of the run from whose best
            checkpoint this one starts; None for the first run of a chain.
        always: whether it is trained even if the run before it reached the target of the plan.
    """

    step: int
    label: str
    request: TrainRequest
    previous_index: int | None = None
    always: bool = False

    @property
    def may_be_skipped(self) -> bool:
        """Whether it is left out if the run before it reaches the target of the plan."""
        has_target = target_in(self.request.expect) is not None
        return self.previous_index is not None and has_target and not self.always


@dataclass(frozen=True)
class PlannedEvaluation:
    """The evaluation at the end of a plan: of the start model and of the trained models.

    Attributes:
        step: the place in the plan, from 1.
        request: the evaluation; its `models` are placeholders until the runs have ids.
        model_indices: the indices, in the list of the plan's runs, of the runs whose best
            checkpoints are asked.
        label: always "", as an evaluation is not varied.
    """

    step: int
    request: EvaluationRequest
    model_indices: Sequence[int]
    label: str = ""


def steps_of(
    request: TrainRequest,
) -> tuple[list[PlannedTraining], PlannedEvaluation | None]:
    """Read the steps of a plan from the request's `then` and `vary`.

    Returns the training runs, each after the run from which it starts, and the evaluation at the
    end (None if the plan has none). Raises UserError BAD_ARGUMENT if `then` or `vary` is malformed,
    or if the plan has too many runs or models.
    """
    entries = [_check_entry(entry, index) for index, entry in enumerate(request.then)]
    is_evaluated = bool(entries) and entries[-1]["algorithm"] == EVALUATE
    train_entries = entries[:-1] if is_evaluated else entries
    if any(entry["algorithm"] == EVALUATE for entry in train_entries):
        raise _bad_then(
            "only the last step may be an evaluation",
            "Give one, at the end of then; with perturb it asks the plain tasks too.",
        )
    _check_lists(request.vary)
    chain_length = 1 + len(train_entries)  # how many runs train one after the other
    # This is checked before the combinations are made, because there may be millions of them.
    _check_run_count(request.vary, chain_length, is_evaluated=is_evaluated)
    trainings: list[PlannedTraining] = []
    for variant in _combinations(request.vary):
        trainings += _make_chain(request, train_entries, variant, first_index=len(trainings))
    if not is_evaluated:
        return trainings, None
    return trainings, _make_evaluation(request, entries[-1], trainings, chain_length)


def _check_run_count(
    vary: Mapping[str, Sequence[Any]], chain_length: int, *, is_evaluated: bool
) -> None:
    """Raise UserError BAD_ARGUMENT if a plan has more than `MAX_RUNS` runs.

    A plan has one chain of `chain_length` trainings for each combination of the values in `vary`,
    and one evaluation if `is_evaluated`.
    """
    chains = math.prod(len(values) for values in vary.values())  # 1 if nothing varies
    run_count = chains * chain_length + int(is_evaluated)
    if run_count > MAX_RUNS:
        raise UserError(
            "BAD_ARGUMENT",
            f"the plan has {run_count:,} runs; it may have {MAX_RUNS}",
            hint="Vary fewer values, or take fewer steps.",
            field="vary",
        )


def _make_chain(
    request: TrainRequest,
    train_entries: Sequence[Mapping[str, Any]],
    variant: Mapping[str, Any],
    first_index: int,
) -> list[PlannedTraining]:
    """Make one chain of training runs: the first from the request, one more for each entry.

    Args:
        request: the plan.
        train_entries: the entries of `then` that train.
        variant: the varied settings with their values in this chain. A varied seed holds for every
            step of the chain, the other settings hold for the first step only.
        first_index: the index that the chain's first run gets in the list of the plan's runs.
    """
    label = ", ".join(f"{name}={value}" for name, value in variant.items())
    seed_setting = {"seed": variant["seed"]} if "seed" in variant else {}
    first = replace(request, settings={**request.settings, **variant}, then=[], vary={})
    chain = [PlannedTraining(1, label, first)]
    for entry in train_entries:
        previous = chain[-1].request
        next_request = replace(
            previous,
            env_id=entry.get("env_id", previous.env_id),
            model="",  # set later: the model that the run before has yet to train
            algorithm=entry["algorithm"],
            settings={**entry.get("settings", {}), **seed_setting},
            note=entry.get("note", request.note),
            parent="",
        )
        index_of_previous = first_index + len(chain) - 1
        always = entry.get("always", False)
        step = len(chain) + 1
        chain.append(PlannedTraining(step, label, next_request, index_of_previous, always))
    return chain


def _make_evaluation(
    request: TrainRequest,
    entry: Mapping[str, Any],
    trainings: Sequence[PlannedTraining],
    chain_length: int,
) -> PlannedEvaluation:
    """Read the evaluation that the last entry of `then` asks for.

    The evaluation asks the start model and the model of every training. If these are too many for
    one evaluation, only the last model of each chain is asked. Raises UserError BAD_ARGUMENT if
    that is too many as well.

    Args:
        request: the plan.
        entry: the last entry of `then`.
        trainings: the training runs of the plan.
        chain_length: how many training runs each chain has.
    """
    trained_indices = _indices_to_ask(trainings, chain_length)
    env_id = entry.get("env_id", trainings[-1].request.env_id)
    evaluation = EvaluationRequest(
        env_id=env_id,
        models=["start", *map(str, trained_indices)],  # placeholders until the runs have ids
        rows=entry.get("rows", EVAL_ROWS),  # as many as the exams of its training runs
        attempts=entry.get("attempts", 1),
        settings=entry.get("settings", {}),
        perturb=entry.get("perturb", ()),
    )
    return PlannedEvaluation(chain_length + 1, evaluation, trained_indices)


def _indices_to_ask(trainings: Sequence[PlannedTraining], chain_length: int) -> list[int]:
    """Return the indices of the training runs whose models the evaluation asks.

    `trainings` are the training runs of the plan, in chains of `chain_length` runs each. The models
    of all of them are asked, or that of the last run of each chain if all are too many. The start
    model is asked too, but has no index. Raises UserError BAD_ARGUMENT if the last runs are too
    many as well.
    """
    indices = list(range(len(trainings)))
    if len(indices) >= MAX_MODELS:  # `>=`, because the start model is one more
        indices = [index for index in indices if trainings[index].step == chain_length]
    if len(indices) >= MAX_MODELS:
        raise _bad_then(
            f"the evaluation would ask {len(indices) + 1} models; it may ask {MAX_MODELS}",
            "Vary fewer values, or leave the evaluation out.",
        )
    return indices


def _check_lists(vary: Mapping[str, Any]) -> None:
    """Raise UserError BAD_ARGUMENT if a varied setting has no list of values, or an empty one."""
    for name, values in vary.items():
        if not isinstance(values, list) or not values:
            raise _bad_values(name, values)


def _combinations(vary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every combination of the varied values, each as setting -> value.

    For example {"seed": [1, 2], "lora_rank": [8]} has two. If nothing is varied, there is one empty
    combination. Raises UserError BAD_ARGUMENT if a setting has the same value twice.
    """
    for name, values in vary.items():
        if _has_repeats(values):
            raise _bad_values(name, values)
    value_tuples = itertools.product(*vary.values())  # a value of each setting, in their order
    return [dict(zip(vary, values, strict=True)) for values in value_tuples]


def _bad_values(name: str, values: object) -> UserError:
    """Make the error for the values of the varied setting `name` that are no list of different
    values."""
    return UserError(
        "BAD_ARGUMENT",
        f"vary.{name[:40]} = {str(values)[:80]} is no list of different values",
        hint='Give the values of a setting, such as {"seed": [1, 2, 3]}.',
        field="vary",
    )


def _has_repeats(values: Sequence[object]) -> bool:
    """Return whether a value occurs twice. The values may be of any JSON type."""
    # Not by a set, because a value may be a list, which has no hash.
    return any(value in values[:index] for index, value in enumerate(values))


def _check_entry(entry: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Check that the keys and types of an entry of `then` are those of a step; return the entry.

    `index` is its position in `then`, for the message. Raises UserError BAD_ARGUMENT.
    """
    algorithm = entry.get("algorithm")
    if not isinstance(algorithm, str):
        raise _bad_then(f"then[{index}] names no algorithm", f"Write {_EXAMPLE}.")
    allowed = _EVALUATE_KEYS if algorithm == EVALUATE else _TRAIN_KEYS
    for name, value in entry.items():
        if name == "algorithm":
            continue
        if name not in allowed:
            allowed_names = ", ".join(sorted(allowed))
            raise _bad_then(
                f"then[{index}] has no key {name!r}", f"Besides algorithm it takes {allowed_names}."
            )
        # In Python a bool is an int too, but True is no number of rows.
        is_misplaced_bool = isinstance(value, bool) and _KEY_TYPES[name] is not bool
        if not isinstance(value, _KEY_TYPES[name]) or is_misplaced_bool:
            raise _bad_then(
                f"then[{index}].{name} = {str(value)[:80]} cannot be used", f"Write {_EXAMPLE}."
            )
    return entry


def _bad_then(fault: str, hint: str) -> UserError:
    """Make the error for a fault in `then`; `hint` says what to write instead."""
    return UserError("BAD_ARGUMENT", fault, hint=hint, field="then")
