"""Asks the model before and after training what it could already do, to see what training broke.

There are three batteries (sets of questions): what pebble was taught, for pebble; short questions
in English, for any other base (both in engine/skills); and, for every model, the newest environment
of this home that is named `keep`. At most `skill_rows` tasks of each are answered greedily, once at
step 0 and once with the chosen checkpoint; engine/evidence/verdict/regression.py compares them. A
battery that cannot be played is skipped and never fails the run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.core.errors import UserError
from engine.core.files import Appender
from engine.cost.batteries import KEEP
from engine.environments.registry import EnvRecord, find_env, open_process, read_tasks
from engine.home.owner_marks import home_of_owner
from engine.home.run_dir import Home
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import TrainConfig
from engine.runs.evaluation import exam
from engine.skills.batteries import SkillBattery, battery_of
from engine.worker.core import pulse
from engine.worker.core.job import Job
from engine.worker.core.runtime import release_memory
from engine.worker.core.trajectory import Completion
from engine.worker.evaluation import heldout
from engine.worker.network.policy import Base
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, fits
from engine.worker.rollouts.renderer import Renderer
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow
from envs.tool_schemas import tools_of

When = Literal["before", "after"]
FEWEST_TOKENS, MOST_TOKENS = 16, 256  # bounds of an answer's length, for tasks of an environment
MAX_TURNS = 8
MAX_CONTEXT = 4096  # tokens of prompt and answer together
REASON_CHARS = 300  # how much the event `kept_skipped` says of a skipped battery


@dataclass(frozen=True)
class EnvBattery:
    """A battery of tasks of an environment, which scores the answers."""

    record: EnvRecord
    tasks: Sequence[TaskRow]

    @property
    def name(self) -> str:
        """The name of the battery in the rows."""
        return self.record.env_id


class PriorSkills:
    """Asks the batteries (sets of questions) of one run."""

    def __init__(self, job: Job[TrainConfig], base: Base, sampler: Sampler) -> None:
        """Prepare to measure the skills of a run's policy. `sampler` must have loaded this policy
        whenever `evaluate` is called; `base` is the policy's base model."""
        self.job = job
        self.base = base
        self.sampler = sampler

    def evaluate(self, when: When) -> None:
        """Play every battery (a set of questions) and write the answers to
        `evals/kept_before.jsonl` or `kept_after.jsonl`, replacing a file that an interrupted
        attempt left. `when` says whether this is before or after training.

        A battery that cannot be played is skipped with the event `kept_skipped`.
        """
        release_memory()  # training leaves free memory reserved, which sampling now needs
        path = self.job.run.kept(when)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        batteries = list(batteries_of(self.job.config, self.job.run.home))
        with pulse.phase("skill check", of=sum(len(battery.tasks) for battery in batteries)):
            for battery in batteries:
                self._play(battery, path)

    def _play(self, battery: SkillBattery | EnvBattery, path: Path) -> None:
        """Play one battery (a set of questions) and append its rows to the file at `path`. If that
        fails, write the event `kept_skipped` instead."""
        try:
            rows = list(self._rows(battery))  # all at once: a failing battery must leave no rows
        # UserError: the environment is gone; EnvProblem: it failed; OSError: no process.
        except (UserError, EnvProblem, OSError) as problem:
            self.job.event("kept_skipped", f"{battery.name}: {problem}"[:REASON_CHARS])
            return
        with Appender(path) as file:
            for row in rows:
                file.append(row.to_line())

    def question_count(self) -> int:
        """Count the questions that all batteries ask each time."""
        batteries = batteries_of(self.job.config, self.job.run.home)
        return sum(len(battery.tasks) for battery in batteries)

    def _rows(self, battery: SkillBattery | EnvBattery) -> Iterator[EvaluationRow]:
        """Play one battery (a set of questions) and yield a row for each answer."""
        if isinstance(battery, EnvBattery):
            yield from self._environment_rows(battery)
        else:
            yield from self._checked_rows(battery)

    def _environment_rows(self, battery: EnvBattery) -> Iterator[EvaluationRow]:
        """Play a battery (a set of questions) whose answers are scored by its environment, and
        yield a row for each answer. Tasks whose prompts leave no room for an answer are left
        out."""
        with open_process(battery.record) as process:
            context = environment_context(self.base, process)
            params = answer_params(battery.tasks, context.renderer)
            tasks = [task for task in battery.tasks if fits(task, context, params)]
            groups = heldout.evaluate(tasks, context, self.sampler, params)
            families = {task["id"]: family_of(task) for task in tasks}
            # These tasks are not divided into halves.
            for row in heldout.rows_of(groups, half_of_task={}, model=self.job.run.id):
                yield row.model_copy(update={"battery": battery.name, "family": families[row.task]})

    def _checked_rows(self, battery: SkillBattery) -> Iterator[EvaluationRow]:
        """Play a battery of single questions that are checked without an environment, and yield a
        row for each answer."""
        renderer = Renderer(self.base.tokenizer, self.base.stop_ids)
        prompts = [renderer.prompt(task["prompt"], tools_of(task, [])) for task in battery.tasks]
        params = SamplingParams(max_tokens=battery.max_tokens, temperature=0.0)
        completions = self.sampler.generate(prompts, 1, params, lambda *_: pulse.advance())
        for task, (completion,) in zip(battery.tasks, completions, strict=True):
            text = renderer.completion_text(completion.ids)
            is_right = battery.is_right(task, text)
            yield self._checked_row(battery.name, task, completion, text, is_right)

    def _checked_row(
        self, battery_name: str, task: TaskRow, completion: Completion, text: str, is_right: bool
    ) -> EvaluationRow:
        """Make the row of an answer that was checked without an environment.

        Args:
            battery_name: the name of the set of questions that the task is in.
            text: the completion's text.
            is_right: the outcome of the check.
        """
        return EvaluationRow(
            model=self.job.run.id,
            task=task["id"],
            battery=battery_name,
            family=task["family"],
            prompt=task["prompt"],
            completion=text,
            reward=float(is_right),
            success=is_right,
            error=None,
            stop_reason="stop" if completion.finished else "max_tokens",
            tokens=len(completion.ids),
        )


def batteries_of(config: TrainConfig, home: Home) -> Iterator[SkillBattery | EnvBattery]:
    """Yield the batteries (sets of questions) that a run plays; none if `skill_rows` is 0.

    1. The battery for its base model.
    2. The held-out tasks of the environment named `keep` (or all its tasks if none is held out), if
       it exists, scores answers, and is not the one that the run trains on.

    Each has at most `skill_rows` questions.
    """
    most_questions = config.settings.skill_rows
    if not most_questions:
        return
    yield battery_of(config.base.ref).first(most_questions)
    try:
        record = find_env(home_of_owner(home, config), KEEP)
    except UserError:  # there is no such environment, or it is sealed (reserved for a final exam)
        return
    # `find_env` also takes prefixes; only an environment with exactly this name is meant.
    if record.name == KEEP and record.scored and record.env_id != config.env_id:
        tasks = read_tasks(record, "heldout") or read_tasks(record)  # all, if none is held out
        yield EnvBattery(record, exam.ordered(tasks, most_questions))


def environment_context(base: Base, process: EnvProcess) -> RolloutContext:
    """Return how the model `base` plays tasks of the environment that runs in `process`,
    independent of the run's settings."""
    description = process.describe()
    return RolloutContext(
        process=process,
        renderer=Renderer(base.tokenizer, base.stop_ids),
        multi_turn=description["kind"] == "multi",
        tools=description["tools"],
        max_length=min(MAX_CONTEXT, base.network.shape.context),
        max_turns=MAX_TURNS,
    )


def answer_params(tasks: Sequence[TaskRow], renderer: Renderer) -> SamplingParams:
    """Return how tasks of an environment are answered: greedily, with as many tokens as their
    reference answers need."""
    return SamplingParams(max_tokens=_answer_limit(tasks, renderer), temperature=0.0)


def _answer_limit(tasks: Sequence[TaskRow], renderer: Renderer) -> int:
    """Compute the token limit of an answer: FEWEST_TOKENS plus twice the longest assistant turn
    in the tasks' reference answers, but at most MOST_TOKENS. It is FEWEST_TOKENS if no task has
    one."""
    messages = [message for task in tasks for message in task.get("answer") or []]
    turns = [message for message in messages if message["role"] == "assistant"]
    longest = max((len(renderer.encode(turn.get("content") or "")) for turn in turns), default=0)
    return min(2 * longest + FEWEST_TOKENS, MOST_TOKENS)


def family_of(task: TaskRow) -> str:
    """Return the family of questions that a task belongs to, as its metadata names it under
    `family`, or else under `skill`; "" if it names neither."""
    metadata = task.get("metadata") or {}
    return str(metadata.get("family") or metadata.get("skill") or "")
