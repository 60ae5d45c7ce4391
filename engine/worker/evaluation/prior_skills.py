"""Asks the model before and after training what it could already do: did the training break
something?

This needs no settings. Three batteries of tasks exist: what pebble was taught, for pebble; the
families of reasoning-gym, for any other base where that package is installed; and, for every model,
the newest environment of this home that is named `keep`. A few dozen greedy answers each, once at
step 0 and once with the chosen checkpoint; engine/evidence/verdict/regression.py compares them. A
battery that cannot be played is skipped and never fails the run.
"""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.core.errors import UserError
from engine.core.files import Appender
from engine.cost.flops import KEEP, KEEP_TASKS
from engine.environments.registry import EnvRecord, find_env, open_process, read_tasks, sandbox_of
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import TrainConfig
from engine.worker.core.job import Job
from engine.worker.core.runtime import release_memory
from engine.worker.evaluation import heldout, pebble_skills
from engine.worker.network.policy import Base
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, fits
from engine.worker.rollouts.renderer import Renderer
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

When = Literal["before", "after"]
SKILLS = ("copy", "reverse", "upper", "count", "compare", "add_one", "sort_letters", "json_answer")
TASKS_PER_SKILL = 6  # of pebble
SKILL_TOKENS = 24  # of an answer to a skill of pebble
FEWEST_TOKENS, MOST_TOKENS = 16, 256  # of an answer to any other task
MAX_TURNS = 8
MAX_CONTEXT = 4096  # tokens of prompt and answer together
REASON_CHARS = 300  # why a battery is skipped
GYM = Path(__file__).resolve().parents[3] / "envs" / "examples" / "reasoning_gym_tasks"


@dataclass(frozen=True)
class Battery:
    """Tasks, and where the environment that scores them comes from.

    Attributes:
        name: in the rows.
        tasks: empty if the environment has yet to be asked for them.
        folder: of an environment that is not stored.
        record: of a stored environment.
    """

    name: str
    tasks: Sequence[TaskRow]
    folder: Path | None = None
    record: EnvRecord | None = None

    @property
    def has_environment(self) -> bool:
        """False for pebble's own skills, whose answers are checked here."""
        return self.folder is not None or self.record is not None


class PriorSkills:
    """The batteries of one run."""

    def __init__(self, job: Job[TrainConfig], base: Base, sampler: Sampler) -> None:
        """Measure the skills of a run's policy, which is the one that `sampler` has loaded whenever
        `evaluate` is called; `base` is its base model."""
        self.job = job
        self.base = base
        self.sampler = sampler

    def evaluate(self, when: When) -> None:
        """Play every battery and write the answers to `evals/kept_before.jsonl` or
        `kept_after.jsonl`, in place of a file that an interrupted attempt left.

        A battery that cannot be played is skipped with the event `kept_skipped`.
        """
        release_memory()  # what training freed, before sampling allocates its own
        path = self.job.run.kept(when)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        for battery in self._batteries():
            try:
                rows = list(self._rows(battery))
            # UserError: the environment is gone; EnvProblem: it failed; OSError: no process.
            except (UserError, EnvProblem, OSError) as problem:
                self.job.event("kept_skipped", f"{battery.name}: {problem}"[:REASON_CHARS])
                continue
            with Appender(path) as file:
                for row in rows:
                    file.append(row.to_line())

    def _batteries(self) -> Iterator[Battery]:
        """Yield the batteries to play: the one for this base model, if there is one, and the tasks
        of the environment named `keep`, if it exists, scores, and is not the one that the run
        trains on."""
        if self.job.config.base.ref == "pebble":
            yield Battery("pebble skills", pebble_tasks())
        elif importlib.util.find_spec("reasoning_gym") is not None:
            yield Battery("reasoning-gym", tasks=(), folder=GYM)
        try:
            record = find_env(self.job.run.home, KEEP)
        except UserError:  # no such environment
            return
        # `find_env` also takes prefixes; only an environment with exactly this name is meant.
        if record.name == KEEP and record.scored and record.env_id != self.job.config.env_id:
            tasks = read_tasks(record, "heldout") or read_tasks(record)  # all, if none is held out
            yield Battery(record.env_id, tasks, record=record)

    def _rows(self, battery: Battery) -> Iterator[EvaluationRow]:
        """Play one battery and yield a row for each answer, scored by the battery's environment.
        Tasks whose prompts leave no room for an answer are left out."""
        if not battery.has_environment:
            yield from self._skill_rows(battery)
            return
        with _process(self.job.run.home, battery) as process:
            description = process.describe()
            all_tasks = battery.tasks or process.tasks()
            renderer = Renderer(self.base.tokenizer, self.base.stop_ids)
            tasks = heldout.ordered(all_tasks, KEEP_TASKS)
            context = RolloutContext(
                process=process,
                renderer=renderer,
                multi_turn=description["kind"] == "multi",
                tools=description["tools"],
                max_length=min(MAX_CONTEXT, self.base.network.shape.context),
                max_turns=MAX_TURNS,
            )
            params = SamplingParams(max_tokens=_answer_limit(tasks, renderer), temperature=0.0)
            tasks = [task for task in tasks if fits(task, context, params)]
            groups = heldout.evaluate(tasks, context, self.sampler, params)
            families = {task["id"]: _family(task) for task in tasks}
            # These tasks are not divided into halves.
            for row in heldout.rows_of(groups, half_of_task={}, model=self.job.run.id):
                yield row.model_copy(update={"battery": battery.name, "family": families[row.task]})

    def _skill_rows(self, battery: Battery) -> Iterator[EvaluationRow]:
        """Play pebble's own battery and yield a row for each answer, which is checked here, as
        there is no environment to score it."""
        renderer = Renderer(self.base.tokenizer, self.base.stop_ids)
        prompts = [renderer.prompt(task["prompt"], tools=[]) for task in battery.tasks]
        params = SamplingParams(max_tokens=SKILL_TOKENS, temperature=0.0)
        completions = self.sampler.generate(prompts, n=1, params=params)
        for task, (completion,) in zip(battery.tasks, completions, strict=True):
            text = renderer.completion_text(completion.ids)
            is_right = pebble_skills.says(task["answer"], text)
            yield EvaluationRow(
                model=self.job.run.id,
                task=task["id"],
                battery=battery.name,
                family=task["family"],
                prompt=task["prompt"],
                completion=text,
                reward=float(is_right),
                success=is_right,
                error=None,
                stop_reason="stop" if completion.finished else "max_tokens",
                tokens=len(completion.ids),
            )


def pebble_tasks() -> list[TaskRow]:
    """The tasks of pebble's battery: TASKS_PER_SKILL of every skill in SKILLS, the same in every
    run.

    Each has the keys `id` (such as "copy-0"), `family` (the skill), `prompt` and `answer`.
    """
    tasks = []
    for skill in SKILLS:
        rng = random.Random(f"kept-{skill}")
        for index in range(TASKS_PER_SKILL):
            sample = pebble_skills.draw(rng, skill, excluded=(), measured=True)
            tasks.append(
                {
                    "id": f"{skill}-{index}",
                    "family": skill,
                    "prompt": sample.messages[:1],
                    "answer": sample.answer,
                }
            )
    return tasks


@contextmanager
def _process(home: Home, battery: Battery) -> Iterator[EnvProcess]:
    """A context with the running env process that scores a battery, which must have an
    environment."""
    if battery.record is not None:
        with open_process(battery.record) as process:
            yield process
        return
    assert battery.folder is not None
    with EnvProcess(battery.folder, sandbox=sandbox_of(home)) as process:
        yield process


def _answer_limit(tasks: Sequence[TaskRow], renderer: Renderer) -> int:
    """The most tokens of an answer: FEWEST_TOKENS plus twice the longest assistant turn in the
    answers that the tasks carry, but at most MOST_TOKENS. FEWEST_TOKENS if no task has an
    answer."""
    messages = [message for task in tasks for message in task.get("answer") or []]
    turns = [message for message in messages if message["role"] == "assistant"]
    longest = max((len(renderer.encode(turn.get("content") or "")) for turn in turns), default=0)
    return min(2 * longest + FEWEST_TOKENS, MOST_TOKENS)


def _family(task: TaskRow) -> str:
    """The family that the task's metadata names; "" if it names none."""
    return str((task.get("metadata") or {}).get("family") or "")
