"""What the model could do before, asked again after: did the training break something?

Nobody sets this up: pebble is asked what it was taught, any model of another base the families of
reasoning-gym where that package is installed, and every model the newest environment named `keep`
of this home. A few dozen greedy answers each, once at step 0 and once with the checkpoint chosen;
engine/evidence/verdict/regression.py compares them. A battery that cannot be played costs the run
nothing.
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
EACH = 6  # tasks per skill of pebble
SKILL_TOKENS = 24
MOST_TOKENS = 256
GYM = Path(__file__).resolve().parents[3] / "envs" / "examples" / "reasoning_gym_tasks"


@dataclass(frozen=True)
class Battery:
    """Tasks with the environment that scores them; pebble's own skills have none."""

    name: str
    tasks: Sequence[TaskRow]
    folder: Path | None = None
    record: EnvRecord | None = None


class PriorSkills:
    """The batteries of one run.

    Args:
        job: the run; rows go to its `evals/kept_before.jsonl` and `kept_after.jsonl`.
        sampler: samples from the policy as it is.
    """

    def __init__(self, job: Job[TrainConfig], base: Base, sampler: Sampler) -> None:
        self.job = job
        self.base = base
        self.sampler = sampler

    def evaluate(self, when: When) -> None:
        """Ask every battery; rows of an attempt that was cut short are replaced."""
        release_memory()
        path = self.job.run.kept(when)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        for battery in self._batteries():
            try:
                rows = list(self._rows(battery))
            except (UserError, EnvProblem, OSError) as problem:
                self.job.event("kept_skipped", f"{battery.name}: {problem}"[:300])
                continue
            with Appender(path) as file:
                for row in rows:
                    file.append(row.to_line())

    def _batteries(self) -> Iterator[Battery]:
        """Which earlier skills are asked for: those of the base, and those the owner wants kept."""
        if self.job.config.base.ref == "pebble":
            yield Battery("pebble skills", pebble_tasks())
        elif importlib.util.find_spec("reasoning_gym") is not None:
            yield Battery("reasoning-gym", (), folder=GYM)
        try:
            record = find_env(self.job.run.home, KEEP)
        except UserError:
            return
        if record.name == KEEP and record.scored and record.env_id != self.job.config.env_id:
            tasks = read_tasks(record, "heldout") or read_tasks(record)
            yield Battery(record.env_id, tasks, record=record)

    def _rows(self, battery: Battery) -> Iterator[EvaluationRow]:
        """The answers to one battery, scored by its environment."""
        if battery.folder is None and battery.record is None:
            yield from self._skill_rows(battery)
            return
        with _process(self.job.run.home, battery) as process:
            described = process.describe()
            known = battery.tasks or process.tasks()
            renderer = Renderer(self.base.tokenizer, self.base.stop_ids)
            tasks = heldout.ordered(known, KEEP_TASKS)
            context = RolloutContext(
                process=process,
                renderer=renderer,
                multi_turn=described["kind"] == "multi",
                tools=described["tools"],
                max_length=self._room(),
                max_turns=8,
            )
            params = SamplingParams(max_tokens=_limit(tasks, renderer), temperature=0.0)
            tasks = [task for task in tasks if fits(task, context, params)]
            groups = heldout.evaluate(tasks, context, self.sampler, params)
            families = {task["id"]: _family(task) for task in tasks}
            for row in heldout.rows_of(groups, {}, self.job.run.id):
                yield row.model_copy(update={"battery": battery.name, "family": families[row.task]})

    def _skill_rows(self, battery: Battery) -> Iterator[EvaluationRow]:
        """The answers to pebble's own battery, which needs no environment to be scored."""
        renderer = Renderer(self.base.tokenizer, self.base.stop_ids)
        prompts = [renderer.prompt(task["prompt"], []) for task in battery.tasks]
        params = SamplingParams(max_tokens=SKILL_TOKENS, temperature=0.0)
        completions = self.sampler.generate(prompts, 1, params)
        for task, (completion,) in zip(battery.tasks, completions, strict=True):
            text = renderer.completion_text(completion.ids)
            right = pebble_skills.says(task["answer"], text)
            yield EvaluationRow(
                model=self.job.run.id,
                task=task["id"],
                battery=battery.name,
                family=task["family"],
                prompt=task["prompt"],
                completion=text,
                reward=float(right),
                success=right,
                error=None,
                stop_reason="stop" if completion.finished else "length",
                tokens=len(completion.ids),
            )

    def _room(self) -> int:
        return min(4096, self.base.network.shape.context)


def pebble_tasks() -> list[TaskRow]:
    """The same tasks in every run: `EACH` of every skill that pebble has."""
    tasks = []
    for skill in SKILLS:
        rng = random.Random(f"kept-{skill}")
        for index in range(EACH):
            sample = pebble_skills.draw(rng, skill, (), measured=True)
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
    if battery.record is not None:
        with open_process(battery.record) as process:
            yield process
        return
    assert battery.folder is not None
    with EnvProcess(battery.folder, sandbox=sandbox_of(home)) as process:
        yield process


def _limit(tasks: Sequence[TaskRow], renderer: Renderer) -> int:
    """Tokens an answer may take: twice the longest reference turn."""
    turns = [m for task in tasks for m in task.get("answer") or [] if m["role"] == "assistant"]
    longest = max((len(renderer.encode(turn.get("content") or "")) for turn in turns), default=0)
    return max(16, min(2 * longest + 16, MOST_TOKENS))


def _family(task: TaskRow) -> str:
    return str((task.get("metadata") or {}).get("family") or "")
