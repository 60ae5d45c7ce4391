"""What can be said of runs that were not evaluated: how they were made, and what differs."""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.compare.described import Described, described_run, difference
from engine.home.run_dir import Home
from engine.home.store import Store


def settings_alone(home: Home, ids: Sequence[str], reason: UserError) -> Reply | None:
    """The reply of `compare_runs` about runs that cannot be compared by their answers: the settings
    in which each run differs from the first.

    Returns None if there are fewer than two ids, or if one of them is no training run.

    Args:
        ids: runs or checkpoints of runs.
        reason: the error that says which run has no evaluation.
    """
    runs_or_none = [_described(home, ref) for ref in ids]
    runs = [run for run in runs_or_none if run is not None]
    if len(runs) < len(ids) or len(runs) < 2:  # one is no training run, or there is just one
        return None
    first, *later_runs = runs
    differences = {run.name: difference(first, run) for run in later_runs}
    clauses = []
    for name, differing in differences.items():
        settings = differing.in_words() or "the same settings"
        clauses.append(f"{name} against {first.name}: {settings}")
    call = Call("evaluate", {"env_id": first.choices["env_id"], "models": list(ids)})
    return {
        "summary": f"No verdict yet: {reason.message}. {'; '.join(clauses)}.",
        "verdict": "unknown",
        "reference": first.name,
        "differences": {name: differing.to_json() for name, differing in differences.items()},
        "warnings": [f"{reason.message}: only the settings are compared"],
        "next": [call.to_json()],
    }


def _described(home: Home, ref: str) -> Described | None:
    """The configuration of the training run of a reference such as "sums-sft-1@best". Returns None
    if it is no training run of this home."""
    name, _, _ = ref.partition("@")
    try:
        with Store(home) as store:
            run_id = store.get_run(name).run_id  # `name` may be the beginning of an id
    except UserError:  # a model that no run made
        return None
    return described_run(home, run_id)
