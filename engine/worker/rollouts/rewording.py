"""Rewords tasks for a running environment: in the environment's own words (`Env.perturb`), or by
rules.

There is also a rule that changes the order of options. But only the environment knows whether the
right answer moves with its option, so the environment is asked: it must score the moved answer as
right for the changed task, and the old answer as wrong.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.format import whole_percent
from engine.core.wording.kinds import TRAINED_KINDS, Kind, Stock
from engine.core.wording.options import MovedOptions, last_answer, moved_options
from engine.core.wording.reword import drawn, reword
from engine.environments.registry import EnvRecord
from engine.records.settings import GRPOSettings, SFTSettings
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow, ToolSchema

_MOST_SEEDS = 2**30  # an environment's seed is twice such a number, plus a last bit for the stock


@dataclass
class Rewording:
    """Rewords the tasks of one environment.

    Attributes:
        process: the environment's running process; None if it scores nothing, so that only the
            rules are used.
        tools: the environment's tools.
        multi_turn: whether the environment answers the model. If so, no single answer can be tried,
            and the order of options stays.
        stock: which set of words the rules use, for training or for the probe.
        report: writes an event, given its name and a message; None to write none.
        problems: the errors that the environment's own `perturb` raised, each text once.
    """

    process: EnvProcess | None
    tools: list[ToolSchema]
    multi_turn: bool
    stock: Stock
    report: Callable[[str, str], None] | None = None
    problems: list[str] = field(default_factory=list)

    def reworded(self, task: TaskRow, kind: Kind, seed: int) -> TaskRow | None:
        """Return the task in other words of this kind, drawn by this seed; None if it cannot be
        reworded.

        The environment rewords the task, or else the rules do. The reference conversation (`gold`)
        gets the new words too.
        """
        env_task = self._reworded_by_environment(task, kind, seed)
        if env_task is not None:
            # By returning the unchanged task, an environment says that it cannot be reworded.
            if _is_same_task(env_task, task):
                return None
            return {**env_task, "gold": _reworded_gold(task, env_task)}
        if kind == "options":
            return self._with_moved_options(task, seed)
        return reword(task, kind, self.tools, seed, self.stock)

    def _reworded_by_environment(self, task: TaskRow, kind: Kind, seed: int) -> TaskRow | None:
        """Ask the environment for the task in other words of this kind, drawn by the seed. Returns
        None if the environment leaves this to the rules, or if it fails; the problem is then
        reported once."""
        if self.process is None:
            return None
        # Doubled, so that the last bit tells training (0) from the probe (1): each has own words.
        even_seed = 2 * drawn(task, kind, seed, self.stock).randrange(_MOST_SEEDS)
        env_seed = even_seed + 1 if self.stock == "probe" else even_seed
        try:
            return self.process.perturb(task, kind, env_seed)
        except EnvProblem as problem:
            if str(problem) not in self.problems:
                self.problems.append(str(problem))
                if self.report is not None:
                    self.report("perturb_failed", f"the rules reword instead: {problem}")
            return None

    def _with_moved_options(self, task: TaskRow, seed: int) -> TaskRow | None:
        """Return the task with its options in another order; None if that is impossible.

        The environment must score the right answer as right at its new place. How it stores this
        answer is not known (as its text, its letter or its number), so every way to write it into
        the changed task is tried (`moved.readings`), and the first that scores right is returned.
        """
        if self.process is None or self.multi_turn or not task.get("answer"):
            return None
        moved = moved_options(task, drawn(task, "options", seed, self.stock))
        if moved is None or not self._is_right(task, last_answer(task)):
            return None
        fitting = (row for row in moved.readings if self._is_moved(task, row, moved))
        return next(fitting, None)

    def _is_moved(self, task: TaskRow, row: TaskRow, moved: MovedOptions) -> bool:
        """Tell whether the environment's answer moved with its option. `row` is one reading of the
        task with moved options: its own answer must be scored as right, and the original task's
        answer as wrong."""
        old_answer, new_answer = last_answer(task), last_answer(row)
        if not self._is_right(row, new_answer):
            return False
        if old_answer != new_answer:
            return not self._is_right(row, old_answer)
        letter = moved.answer_letter
        if not letter:  # an answer that is neither a moved letter nor the text of an option
            return False
        # If the letter alone is also a right answer, it must have moved as well.
        if not self._is_right(task, letter):
            return True
        return self._is_right(row, moved.letters[letter]) and not self._is_right(row, letter)

    def _is_right(self, task: TaskRow, answer: str) -> bool:
        """Tell whether the environment scores `answer` as right: by its success, or, if it reports
        none, by full reward."""
        assert self.process is not None  # only called if the environment scores
        score = self.process.score(task, answer)
        if score["success"] is None:
            return score["reward"] >= 1
        return score["success"]


def _is_same_task(env_task: TaskRow, task: TaskRow) -> bool:
    """Tell whether the environment, asked to reword `task`, returned it unchanged (`env_task`)."""
    keys = ("prompt", "tools", "answer", "metadata")
    return all(env_task.get(key) == task.get(key) for key in keys)


def _reworded_gold(task: TaskRow, env_task: TaskRow) -> list[dict[str, object]] | None:
    """Return the reference conversation of `env_task`, which is `task` as the environment reworded
    it; None if `task` had none.

    It consists of the new prompt and the new answer. If the answer did not change, it is the new
    prompt and what followed the old one.
    """
    if not task.get("gold"):
        return None
    if env_task["answer"] is not None and env_task["answer"] != task.get("answer"):
        return [*env_task["prompt"], *env_task["answer"]]
    return [*env_task["prompt"], *task["gold"][len(task["prompt"]) :]]


@dataclass(frozen=True)
class VariedWording:
    """Rewords a share of the rows that training sees (setting `vary_wording`), anew each time.

    What is reworded depends only on the seed, the step and the task, so a resumed run trains on the
    same rows.
    """

    rewording: Rewording
    share: float
    seed: int

    def task_at(self, task: TaskRow, step: int) -> TaskRow:
        """Return the task as optimizer step `step` sees it: in other words with the probability
        `share`, else the same object unchanged."""
        rng = random.Random(f"{self.seed}-vary-{step}-{task['id']}")
        if rng.random() >= self.share:
            return task
        certain_kind = rng.choice(TRAINED_KINDS)
        # One kind at random, and each of the other kinds with a chance of one half.
        kinds: list[Kind] = [
            kind for kind in TRAINED_KINDS if kind == certain_kind or rng.random() < 0.5
        ]
        return self._in_other_words(task, kinds, rng.randrange(2**31))

    def tasks_at(
        self, tasks: Sequence[TaskRow], step: int, fits: Callable[[TaskRow], bool]
    ) -> list[TaskRow]:
        """Return the tasks as `step` sees them, some in other words. A task stays unchanged if its
        rewording would leave no room for an answer; `fits` tells whether one does."""
        reworded_tasks = [self.task_at(task, step) for task in tasks]
        return [
            reworded if fits(reworded) else task
            for reworded, task in zip(reworded_tasks, tasks, strict=True)
        ]

    def _in_other_words(self, task: TaskRow, kinds: Sequence[Kind], seed: int) -> TaskRow:
        """Reword the task by each of these kinds, one after the other. A kind by which it cannot be
        reworded leaves it as it is."""
        for kind in kinds:
            reworded = self.rewording.reworded(task, kind, seed)
            if reworded is not None:
                task = reworded
        return task


def varied_wording(
    settings: SFTSettings | GRPOSettings,
    env: EnvRecord,
    process: EnvProcess | None,
    report: Callable[[str, str], None],
) -> VariedWording | None:
    """Return what rewords the rows of a training run; None if its setting `vary_wording` is 0.

    Args:
        process: the environment's process; None if it scores nothing.
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
