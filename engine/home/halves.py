"""Which half of the held-out tasks a number speaks of.

A run's exam is cut in two: `select` chooses the checkpoint, `report` is read once at the end.
Curves and evaluations along the way are of the first, the verdict is of the second.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from engine.core.files import read_lines
from engine.home.run_dir import RunDir
from engine.records.lines.curves import number

ABOUT_HALF = (
    "select: held-out tasks that choose the checkpoint, the curves are of them; report: the "
    "others, the verdict is of them"
)
ABOUT_USE = (
    "how often the held-out tasks of a version were used to choose (checkpoints, runs, "
    "models): the more often, the luckier the best"
)


def choosing(run: RunDir) -> dict[str, Any]:
    """What `heldout_*` is measured on in a run, see `chosen_by`."""
    return chosen_by(read_lines(run.events)[0])


def chosen_by(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What `heldout_*` is measured on in the run of these events: {"half", "tasks", "of",
    "about"}; {} without an exam, or before it."""
    total = tasks = 0
    for event in events:
        said, choose = event.get("heldout_tasks"), event.get("heldout_choose")
        if event.get("event") == "started" and isinstance(said, int):
            total = said
            # Runs that did not say it: they alternated, and the first one chose.
            tasks = choose if isinstance(choose, int) else total - total // 2
    if not total:
        return {}
    other = total - tasks
    rest = f"the verdict is read on the other {other}" if other else "there is no other"
    about = f"heldout_* is of the {tasks} of {total} held-out tasks that choose the checkpoint"
    return {"half": "select", "tasks": tasks, "of": total, "about": f"{about}; {rest}"}


def scores_in_words(scores: Mapping[str, Any], exam: Mapping[str, Any]) -> str:
    """`success 77.5 %, reward 0.8 on the 80 held-out tasks that choose`; "" without scores."""
    said = []
    for name in ("success", "reward", "loss"):
        value = number(scores.get(f"heldout_{name}"))
        if value is not None:
            shown = f"{100 * value:.1f} %" if name == "success" else f"{value:.3g}"
            said.append(f"{name} {shown}")
    where = f" on the {exam['tasks']} held-out tasks that choose" if exam else ""
    return ", ".join(said) + where if said else ""
