"""Which half of the held-out tasks a number speaks of.

A run's held-out tasks are cut in two: `select` chooses the checkpoint, `report` is read once at the
end. Curves and evaluations along the way are of the first, the verdict is of the second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.files import read_lines
from engine.core.reply import ReplyBase
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


@dataclass(frozen=True)
class ChoosingHalf(ReplyBase):
    """The held-out tasks that choose a run's checkpoint.

    Attributes:
        half: their name in the files of answers.
        tasks: how many they are, `of` all held-out tasks.
        about: the same as a sentence.
    """

    half: str
    tasks: int
    of: int
    about: str


def choosing(run: RunDir) -> ChoosingHalf | None:
    """What `heldout_*` is measured on in a run; None where nothing is held out, or not yet."""
    return chosen_by(read_lines(run.events)[0])


def chosen_by(events: Iterable[Mapping[str, Any]]) -> ChoosingHalf | None:
    """What `heldout_*` is measured on in the run of these events, as its last start says; None
    where nothing is held out, or before the first start."""
    total = tasks = 0
    for event in events:
        heldout, choose = event.get("heldout_tasks"), event.get("heldout_choose")
        if event.get("event") == "started" and isinstance(heldout, int):
            total = heldout
            # Older runs do not say how many choose: every second task did, the first one too.
            tasks = choose if isinstance(choose, int) else total - total // 2
    if not total:
        return None
    other = total - tasks
    rest = f"the verdict is read on the other {other}" if other else "there is no other"
    about = f"heldout_* is of the {tasks} of {total} held-out tasks that choose the checkpoint"
    return ChoosingHalf("select", tasks, total, f"{about}; {rest}")


def scores_in_words(scores: Mapping[str, Any], half: ChoosingHalf | None) -> str:
    """`success 77.5 %, reward 0.8 on the 80 held-out tasks that choose`; "" without scores."""
    parts = []
    for name in ("success", "reward", "loss"):
        value = number(scores.get(f"heldout_{name}"))
        if value is not None:
            shown = f"{100 * value:.1f} %" if name == "success" else f"{value:.3g}"
            parts.append(f"{name} {shown}")
    where = f" on the {half.tasks} held-out tasks that choose" if half else ""
    return ", ".join(parts) + where if parts else ""
