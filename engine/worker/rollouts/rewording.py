"""Tasks in other words, for a running environment: its own (`Env.perturb`), or those of the rules.

The order of options has a rule too, but only the environment knows whether the right answer moved
with its text. So it is asked: the moved answer must be right for the moved task, and the old one
must not be.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.format import whole_percent
from engine.environments.registry import EnvRecord
from engine.records.settings import GRPOSettings, SFTSettings
from engine.wording.kinds import TRAINED_KINDS, Kind, Stock
from engine.wording.options import MovedOptions, last_answer, moved_options
from engine.wording.reword import drawn, reword
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow, ToolSchema

_MOST_SEEDS = 2**30  # for the environment; doubled, with the stock in the last bit


@dataclass
class Rewording:
    """Rewords the tasks of one environment.

    Attributes:
        process: its running process; None where nothing scores, then the rules alone are used.
        tools: the environment's.
        multi_turn: whether it answers the model: then no single answer can be tried, and the order
            of options stays.
        stock: whose words are taken.
        report: writes an event, given its name and a message; None where nobody reads any.
        problems: what the environment's own `perturb` raised, each text once.
    """

    process: EnvProcess | None
    tools: list[ToolSchema]
    multi_turn: bool
    stock: Stock
    report: Callable[[str, str], None] | None = None
    problems: list[str] = field(default_factory=list)

    def reworded(self, task: TaskRow, kind: Kind, seed: int) -> TaskRow | None:
        """Return the task in other words of this kind by this seed; None if it cannot be reworded.

        The environment words it, or else the rules do.
        """
        env_task = self._own_words(task, kind, seed)
        if env_task is not None:
            # The task as it was says that it cannot be asked otherwise.
            return None if _is_same(env_task, task) else {**env_task, "gold": _gold(task, env_task)}
        if kind == "options":
            return self._with_moved_options(task, seed)
        return reword(task, kind, self.tools, seed, self.stock)

    def _own_words(self, task: TaskRow, kind: Kind, seed: int) -> TaskRow | None:
        """Ask the environment for the task in other words; None where it leaves that to the rules.

        None too where it fails; the problem is reported once.
        """
        if self.process is None:
            return None
        env_seed = 2 * drawn(task, kind, seed, self.stock).randrange(_MOST_SEEDS)
        try:
            return self.process.perturb(task, kind, env_seed + (self.stock == "probe"))
        except EnvProblem as problem:
            if str(problem) not in self.problems:
                self.problems.append(str(problem))
                if self.report is not None:
                    self.report("perturb_failed", f"the rules reword instead: {problem}")
            return None

    def _with_moved_options(self, task: TaskRow, seed: int) -> TaskRow | None:
        """Return the task with its options in another order; None where that is not possible.

        The environment must score the right answer where it moved to.
        """
        if self.process is None or self.multi_turn or not task.get("answer"):
            return None
        moved = moved_options(task, drawn(task, "options", seed, self.stock))
        if moved is None or not self._is_right(task, last_answer(task)):
            return None
        fitting = (row for row in moved.readings if self._is_moved(task, row, moved))
        return next(fitting, None)

    def _is_moved(self, task: TaskRow, row: TaskRow, moved: MovedOptions) -> bool:
        """Whether the environment scores `row`, a reading of the moved task, as it should."""
        old, new = last_answer(task), last_answer(row)
        if not self._is_right(row, new):
            return False
        if old != new:
            return not self._is_right(row, old)
        letter = moved.answer_letter
        if not letter:  # an answer that is neither a moved letter nor the text of an option
            return False
        # Where the letter alone is right too, it must have moved as well.
        if not self._is_right(task, letter):
            return True
        return self._is_right(row, moved.letters[letter]) and not self._is_right(row, letter)

    def _is_right(self, task: TaskRow, answer: str) -> bool:
        """Whether the environment takes `answer` for right: success, or without one full reward."""
        assert self.process is not None  # asked only where something scores
        score = self.process.score(task, answer)
        return score["reward"] >= 1 if score["success"] is None else score["success"]


def _is_same(own: TaskRow, task: TaskRow) -> bool:
    """Whether the environment gave back the task as it was."""
    return all(own.get(key) == task.get(key) for key in ("prompt", "tools", "answer", "metadata"))


def _gold(task: TaskRow, env_task: TaskRow) -> list[dict[str, object]] | None:
    """Return the reference conversation of a task that the environment worded; None without one.

    It is the new prompt, and the new answer where that is another; else what followed the prompt
    before.
    """
    if not task.get("gold"):
        return None
    if env_task["answer"] is not None and env_task["answer"] != task.get("answer"):
        return [*env_task["prompt"], *env_task["answer"]]
    return [*env_task["prompt"], *task["gold"][len(task["prompt"]) :]]


@dataclass(frozen=True)
class VariedWording:
    """Rewords a share of the rows that training sees (`vary_wording`), anew each time.

    What is reworded follows from the seed, the step and the task, so a resumed run trains on the
    same rows.
    """

    rewording: Rewording
    share: float
    seed: int

    def of(self, task: TaskRow, step: int) -> TaskRow:
        """The task as `step` sees it: in other words, or the same object as it is."""
        rng = random.Random(f"{self.seed}-vary-{step}-{task['id']}")
        if rng.random() >= self.share:
            return task
        first = rng.choice(TRAINED_KINDS)
        kinds: list[Kind] = [k for k in TRAINED_KINDS if k == first or rng.random() < 0.5]
        return self._in_other_words(task, kinds, rng.randrange(2**31))

    def of_all(
        self, tasks: Sequence[TaskRow], step: int, fits: Callable[[TaskRow], bool]
    ) -> list[TaskRow]:
        """The tasks as `step` sees them; one that leaves no room for an answer in other words
        (`fits`) stays as it is."""
        worded = [self.of(task, step) for task in tasks]
        return [new if fits(new) else old for new, old in zip(worded, tasks, strict=True)]

    def _in_other_words(self, task: TaskRow, kinds: Sequence[Kind], seed: int) -> TaskRow:
        """The task reworded by each of these kinds, one after the other."""
        for kind in kinds:
            task = self.rewording.reworded(task, kind, seed) or task
        return task


def varied_wording(
    settings: SFTSettings | GRPOSettings,
    env: EnvRecord,
    process: EnvProcess | None,
    report: Callable[[str, str], None],
) -> VariedWording | None:
    """What rewords the rows of a run of training; None where its setting `vary_wording` is 0.

    Args:
        process: the environment's; None where nothing scores.
        report: writes an event, given its name and a message.
    """
    share = settings.vary_wording
    if not share:
        return None
    report(
        "vary_wording",
        f"{whole_percent(share)} of the rows come in other words each time they are seen",
    )
    rewording = Rewording(process, env.tools, env.kind == "multi", "training", report)
    return VariedWording(rewording, share, settings.seed)
