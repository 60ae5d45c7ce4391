"""A search for a prompt from its exam before to its exam after, whoever samples the answers.

The model answers the held-out tasks with the environment's own texts; then the search (search.py),
which never sees those tasks; then the same tasks with the texts that it chose. The two exams are
step 0 and the last step of the run, so its verdict is made as that of a training run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.errors import UserError
from engine.core.files import Appender, JsonObject, keep_lines, last_line
from engine.environments.registry import EnvRecord, read_tasks
from engine.evidence.stats.basics.summary import summarise
from engine.evidence.stats.results import TEST
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import RunDir
from engine.home.sanitize import redactor_for
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.prompt_line import PromptLine
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import PromptConfig
from engine.runs.evaluation import exam
from engine.runs.prompts.reflection import Reflection
from engine.runs.prompts.search import Answers, Found, Round, Search, most_rounds
from engine.runs.prompts.tasks import SearchTasks, search_tasks
from engine.runs.prompts.versions import make_version
from engine.wording.asked import asked_otherwise
from engine.wording.prompt_texts import Texts, prompt_with, texts_of, tools_with
from envs.json_types import TaskRow
from envs.tool_schemas import tools_of

SLICE = 64  # held-out tasks between two looks at a request to stop


class Desk(Protocol):
    """What a process that searches offers: the run's files, and answers."""

    def play(self, tasks: Sequence[TaskRow]) -> list[EvaluationRow]:
        """Answer each task once, greedily, and score it; a row for each, in their order."""
        ...

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append an event to the run's events.jsonl."""
        ...

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to the run's metrics.jsonl."""
        ...

    def rewind(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after `step`."""
        ...

    def is_stopping(self) -> bool:
        """Whether the run was asked to stop."""
        ...

    def check_stop(self) -> None:
        """Raise what ends a run that was asked to stop."""
        ...


@dataclass(frozen=True)
class PromptJob:
    """One search: its run, and who answers.

    Attributes:
        left_out: for a task as it would be asked, why it cannot be; "" where it can.
    """

    run: RunDir
    config: PromptConfig
    env: EnvRecord
    desk: Desk
    left_out: Callable[[TaskRow], str] = lambda task: ""

    def carry_out(self, reflection: Reflection) -> JsonObject:
        """Search to the end; returns the content of result.json.

        Raises Refused or EndpointDown where the endpoint cannot be asked, UserError where the
        environment has no texts that all its tasks share, and what the desk raises.
        """
        settings, desk = self.config.settings, self.desk
        tasks = search_tasks(self.run.home, self.env, settings)
        texts = self._own_texts()
        rounds = most_rounds(settings, len(tasks.choosing))
        heldout = exam.ordered(read_tasks(self.env, "heldout"), settings.eval_rows)
        desk.event(
            "started",
            f"{len(tasks.reflected)} train tasks to reflect on, {len(tasks.choosing)} that choose",
            total_steps=rounds + 1,  # the last is the exam
        )
        self._tell_sealed(tasks)
        self._first_line(texts)
        before = self._exam(0, heldout, texts)
        if last_line(self.run.metrics) is None:
            desk.metrics(0, summarise(before).curves())
        found = self._searched(tasks, texts, reflection)
        desk.check_stop()
        if reflection.failure is not None:
            raise reflection.failure
        step = found.rounds + 1
        after = self._exam(step, heldout, found.texts) if found.is_new else self._same(step, before)
        env_id, problem = self._version(found)
        self._last_line(found, env_id)
        self.desk.metrics(step, summarise(after).curves())
        return self._result(found, tasks, env_id, problem, reflection, texts)

    def _own_texts(self) -> Texts:
        """The environment's own texts. Raises UserError BAD_ARGUMENT where tasks share none."""
        rows = read_tasks(self.env)
        texts = texts_of(rows, self.env.tools, with_tools=self.config.settings.tool_texts)
        if not texts:
            raise no_texts_error(self.env.env_id)
        return texts

    def _tell_sealed(self, tasks: SearchTasks) -> None:
        """Write how many tasks the endpoint is not shown because of a sealed exam."""
        if tasks.sealed:
            text = f"{tasks.sealed} train tasks hold tasks of a sealed exam: they are not sent away"
            self.desk.event("sealed_tasks", text, tasks=tasks.sealed)

    def _play(self, tasks: Sequence[TaskRow], texts: Texts) -> list[EvaluationRow]:
        """Answer tasks with `texts`; one that cannot be asked with them earns nothing."""
        self.desk.check_stop()
        asked = [self._asked(task, texts) for task in tasks]
        reasons = [self.left_out(task) for task in asked]
        rows = iter(
            self.desk.play(
                [task for task, reason in zip(asked, reasons, strict=True) if not reason]
            )
        )
        return [
            self._not_asked(task, reason) if reason else next(rows)
            for task, reason in zip(asked, reasons, strict=True)
        ]

    def _asked(self, task: TaskRow, texts: Texts) -> TaskRow:
        """The task as it is asked with `texts`; it is scored as it was."""
        tools = tools_with(tools_of(task, self.env.tools), texts)
        return asked_otherwise(task, prompt_with(task["prompt"], texts), tools)

    def _not_asked(self, task: TaskRow, reason: str) -> EvaluationRow:
        """The row of a task that could not be asked."""
        return EvaluationRow(
            model=self.config.model,
            half=TEST,
            attempt=0,
            task=task["id"],
            prompt=task["prompt"],
            messages=[],
            completion="",
            reward=0.0,
            success=None,
            metrics={},
            error=reason,
            stop_reason="max_context",
            tokens=0,
        )

    def _exam(self, step: int, heldout: Sequence[TaskRow], texts: Texts) -> Sequence[EvaluationRow]:
        """Answer the held-out tasks with `texts`, or what of them an earlier attempt did not; the
        rows are written to the file of `step`."""
        path = self.run.evals(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_evaluation(path)
        done = {row.task for row in rows}
        left = [task for task in heldout if task["id"] not in done]
        with Appender(path) as file:
            for start in range(0, len(left), SLICE):
                for row in self._play(left[start : start + SLICE], texts):
                    file.append(row.to_line())
                    rows.append(row)
        return rows

    def _same(self, step: int, rows: Sequence[EvaluationRow]) -> Sequence[EvaluationRow]:
        """The exam of a prompt that is the one from before: the same answers."""
        self.desk.event("no_better_prompt", "no prompt earned more than the environment's own")
        path = self.run.evals(step)
        path.unlink(missing_ok=True)
        with Appender(path) as file:
            for row in rows:
                file.append(row.to_line())
        return rows

    def _searched(self, tasks: SearchTasks, texts: Texts, reflection: Reflection) -> Found:
        """Search from `texts`."""
        search = Search(
            self.run.search,
            self.config.settings,
            tasks,
            self._play,
            reflection,
            redactor_for(self.run.home, self.env.dir),
            self._on_round,
            self.desk.is_stopping,
        )
        return search.run(texts)

    def _first_line(self, texts: Texts) -> None:
        """Begin prompts.jsonl with the environment's own texts."""
        if not self.run.prompts.exists():
            self._append(PromptLine(round=0, texts=dict(texts)))

    def _append(self, line: PromptLine) -> None:
        """Add a line to prompts.jsonl."""
        with Appender(self.run.prompts) as file:
            file.append(line.to_line())

    def _on_round(self, done: Round, search: Search) -> None:
        """Write down a round: its rollouts, its prompt, its numbers."""
        sides = [answers for answers in (done.before, done.after) if answers is not None]
        self._write_rollouts(done.number, sides)
        if done.after is not None:
            keep_lines(self.run.prompts, lambda line: line["round"] < done.number)
            line = PromptLine(
                round=done.number,
                texts=dict(done.after.texts),
                before=done.before.mean if done.before else None,
                after=done.after.mean,
            )
            chosen = {} if done.chosen_by is None else {"chosen_by": done.chosen_by}
            self._append(line.model_copy(update=chosen))
        use = search.reflection.use
        values: dict[str, float | None] = {
            "tried_reward": done.after.mean if done.after else None,
            "reward_before": done.before.mean if done.before else None,
            "chosen_reward": search.best,
            "rollouts": float(search.rollouts),
            "reflection_calls": float(use.calls),
            "reflection_cost": use.cost,
        }
        self.desk.rewind(done.number - 1)  # of an attempt that was interrupted before it was saved
        self.desk.metrics(done.number, values)

    def _write_rollouts(self, step: int, sides: Sequence[Answers]) -> None:
        """Write the answers of a round: member 0 of a task with the prompt before, 1 with the new
        one."""
        path = self.run.rollouts(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shared = set(TrajectoryRecord.model_fields) & set(EvaluationRow.model_fields)
        with Appender(path) as file:
            for member, side in enumerate(sides):
                for group, row in enumerate(side.rows):
                    record = TrajectoryRecord(
                        **row.model_dump(include=shared, exclude_unset=True),
                        step=step,
                        group=group,
                        member=member,
                        advantage=0.0,
                        turns=sum(m["role"] == "assistant" for m in row.messages or []),
                    )
                    file.append(record.to_line())

    def _version(self, found: Found) -> tuple[str, str]:
        """Push the version of the prompt that was chosen: (its id, why there is none)."""
        if not found.is_new:
            return "", ""
        try:
            env_id = make_version(self.run.home, self.env, found.texts)
        except UserError as error:  # the texts are in the result all the same
            self.desk.event("not_pushed", f"the prompt could not be pushed: {error.message}")
            return "", error.message
        self.desk.event("pushed", f"the prompt is the environment {env_id}", env_id=env_id)
        return env_id, ""

    def _last_line(self, found: Found, env_id: str) -> None:
        """End prompts.jsonl with the prompt that was chosen, and the version of it."""
        if found.is_new:
            line = PromptLine(
                round=found.rounds + 1, texts=dict(found.texts), chosen_by=found.chosen_by
            )
            self._append(line.model_copy(update={"env_id": env_id}) if env_id else line)

    def _result(
        self,
        found: Found,
        tasks: SearchTasks,
        env_id: str,
        problem: str,
        reflection: Reflection,
        before: Texts,
    ) -> JsonObject:
        """Make the content of result.json."""
        verdict = run_verdict(self.run).to_json()
        use = {name: use.to_json() for name, use in reflection.answered.use.items()}
        prompt: JsonObject = {
            "env_id": env_id,
            "of": self.env.env_id,
            "texts": dict(found.texts),
            "texts_before": dict(before),
            "rounds": found.rounds,
            "rollouts": found.rollouts,
            "chosen_by": {
                "tasks": len(tasks.choosing),
                "before": round(found.chosen_by_before, 6),
                "after": round(found.chosen_by, 6),
            },
            "stopped_by": found.stopped_by,
        }
        if problem:
            prompt["not_pushed"] = problem
        return {
            "steps": found.rounds + 1,
            "verdict": verdict["verdict"],
            "summary": " ".join([verdict.get("summary", ""), _in_words(found, env_id, problem)]),
            "evidence": verdict,
            "prompt": prompt,
            "endpoints": {"models": use, "total": reflection.answered.total.to_json()},
        }


def _in_words(found: Found, env_id: str, problem: str) -> str:
    """What a search came to, in a sentence or two."""
    ended = f", ended by {found.stopped_by}" if found.stopped_by else ""
    effort = f"{found.rounds} rounds, {found.rollouts} rollouts{ended}"
    if not found.is_new:
        return f"No prompt earned more than the environment's own ({effort})."
    if problem:
        return f"The new prompt could not be pushed ({problem}); result.json has it ({effort})."
    return f"The new prompt is the environment {env_id} ({effort})."


def no_texts_error(env_id: str) -> UserError:
    """The error for an environment whose tasks share no text that could be written anew."""
    return UserError(
        "BAD_ARGUMENT",
        f"the tasks of {env_id} have different system messages, so no one prompt is theirs",
        hint="Move what differs into the user's message, and push again.",
        field="env_id",
    )
