"""The two halves of a run's held-out tasks, and on which half a number was measured.

The half `select` chooses the checkpoint; the half `report` is evaluated once at the end. Curves and
evaluations along the way are measured on `select`, the verdict on `report`. If the environment has
dev tasks, these are `select`, and all held-out tasks are `report`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.core.files import read_lines
from engine.core.format import percent, significant
from engine.core.reply import ReplyBase
from engine.home.run_dir import RunDir
from engine.records.lines.curves import number

ABOUT_HALF = (
    "select: held-out or dev tasks that choose the checkpoint, the curves are of them; report: the "
    "others, the verdict is of them; kept: questions on what the model could do before (step=0 "
    "reads the answers before training)"
)
ABOUT_USE = (
    "how often the held-out tasks of a version were used to choose (checkpoints, runs, "
    "models): the more often, the luckier the best"
)


@dataclass(frozen=True)
class ChoosingHalf(ReplyBase):
    """The tasks that choose a run's checkpoint: half of the held-out tasks, or the dev tasks.

    Attributes:
        half: the name of this half in the files of answers: "select".
        tasks: how many tasks choose the checkpoint.
        of: how many held-out tasks there are in total, or how many dev tasks if these choose.
        about: a sentence that says the same.
        side: "dev" if dev tasks choose the checkpoint; None if held-out tasks do.
    """

    half: str
    tasks: int
    of: int
    about: str
    side: Literal["dev"] | None = None


def choosing(run: RunDir) -> ChoosingHalf | None:
    """Return which held-out tasks choose the best checkpoint of `run`; its `heldout_*` metrics are
    measured on these tasks.

    Returns None if no task is held out, or if the run has never started.
    """
    events, _ = read_lines(run.events)
    return choosing_half_in(events)


def choosing_half_in(events: Iterable[Mapping[str, Any]]) -> ChoosingHalf | None:
    """Return the tasks that choose a run's checkpoint, from the last "started" event in `events`.

    Returns None if no task is held out, or if there is no such event.
    """
    heldout_total = choosing_count = 0
    dev_tasks: object = None
    for event in events:
        heldout = event.get("heldout_tasks")
        if event.get("event") == "started" and isinstance(heldout, int):
            heldout_total = heldout
            choosing_count = _choosing_count(event.get("heldout_choose"), heldout_total)
            dev_tasks = event.get("dev_tasks")
    if not heldout_total:
        return None
    report_count = heldout_total - choosing_count  # the tasks that the verdict is read on
    if dev_tasks:
        return _describe_dev_tasks(choosing_count, report_count)
    about_others = (
        f"the verdict is read on the other {report_count}" if report_count else "there is no other"
    )
    about = (
        f"heldout_* is of the {choosing_count} of {heldout_total} held-out tasks "
        "that choose the checkpoint"
    )
    return ChoosingHalf(
        half="select",  # the other half is called "report"
        tasks=choosing_count,
        of=heldout_total,
        about=f"{about}; {about_others}",
    )


def _describe_dev_tasks(dev_count: int, heldout_count: int) -> ChoosingHalf:
    """Describe the `dev_count` dev tasks that choose the checkpoint of a run whose verdict rests on
    `heldout_count` held-out tasks."""
    return ChoosingHalf(
        half="select",
        tasks=dev_count,
        of=dev_count,
        about=f"heldout_* is of the {dev_count} dev tasks, which choose the checkpoint; the "
        f"verdict is read on all {heldout_count} held-out tasks",
        side="dev",
    )


def _choosing_count(recorded: object, heldout_total: int) -> int:
    """Return how many of the held-out tasks choose the checkpoint.

    `recorded` is the number in the "started" event. Older runs have no such number: in them every
    second task, beginning with the first, chose the checkpoint, so the larger half did.
    """
    if isinstance(recorded, int):
        return recorded
    return heldout_total - heldout_total // 2


def scores_in_words(scores: Mapping[str, Any], half: ChoosingHalf | None) -> str:
    """Write the held-out scores in a line of metrics as text; "" if the line has none.

    For example `success 77.5 %, reward 0.8 on the 80 held-out tasks that choose`.

    Args:
        scores: a line of metrics; only its `heldout_*` columns are read.
        half: which tasks were scored; None leaves the tasks out of the text.
    """
    parts = []
    for name in ("success", "reward", "loss"):
        value = number(scores.get(f"heldout_{name}"))
        if value is not None:
            text = percent(value) if name == "success" else significant(value)
            parts.append(f"{name} {text}")
    if not parts:
        return ""
    measured_on = (
        f" on the {half.tasks} {half.side or 'held-out'} tasks that choose" if half else ""
    )
    return ", ".join(parts) + measured_on
