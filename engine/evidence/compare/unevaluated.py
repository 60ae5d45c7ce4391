"""What can be said of runs that were not evaluated: how they were made, and what differs."""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.evidence.compare.described import Described, described_run, difference
from engine.home.run_dir import Home
from engine.home.store import Store


def settings_alone(home: Home, ids: Sequence[str], reason: UserError) -> Reply | None:
    """The answer of `compare_runs` where `reason` says that a run has no evaluation: which settings
    differ, each run against the first. None where one of the ids is no training run.

    `ids` are runs or checkpoints of runs.
    """
    described = [_described(home, ref) for ref in ids]
    sides = [side for side in described if side is not None]
    if len(sides) < len(described) or len(sides) < 2:
        return None
    first, *others = sides
    differences = {other.name: difference(first, other) for other in others}
    told = "; ".join(
        f"{name} against {first.name}: {each.in_words() or 'the same settings'}"
        for name, each in differences.items()
    )
    call = Call("evaluate", {"env_id": first.choices["env_id"], "models": list(ids)})
    return {
        "summary": f"No verdict yet: {reason.message}. {told}.",
        "verdict": "unknown",
        "reference": first.name,
        "differences": {name: each.to_json() for name, each in differences.items()},
        "warnings": [f"{reason.message}: only the settings are compared"],
        "next": [call.to_json()],
    }


def _described(home: Home, ref: str) -> Described | None:
    """What the run of a reference such as "sums-sft-1@best" was told; None if it is no training
    run of this home."""
    name = ref.partition("@")[0]
    try:
        with Store(home) as store:
            run_id = store.get_run(name).run_id
    except UserError:  # a model that no run made
        return None
    return described_run(home, run_id)
