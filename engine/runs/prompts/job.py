"""A search for a prompt, from the exam before it to the exam after it, whoever samples the answers.

The model first answers the held-out tasks with the environment's own texts (system message and tool
descriptions). Then comes the search (search.py), which never sees those tasks. Then the model
answers the same tasks with the texts that the search chose. The two exams are step 0 and the last
step of the run, so its verdict is made like that of a training run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.errors import UserError
from engine.core.files import Appender, JsonObject, keep_lines, last_line
from engine.core.wording.asked import asked_otherwise
from engine.core.wording.prompt_texts import Texts, prompt_with, texts_of, tools_with
from engine.environments.registry import EnvRecord, read_tasks
from engine.evidence.stats.basics.summary import summarise
from engine.evidence.stats.results import TEST
from engine.evidence.verdict.verdict import run_verdict
from engine.home.owner_marks import home_of_owner
from engine.home.run_dir import RunDir
from engine.home.sanitize import redactor_for
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.lines.prompt_line import PromptLine
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import PromptConfig
from engine.runs.evaluation import exam
from engine.runs.prompts.reflection import Reflection
from engine.runs.prompts.search import Answers, Round, Search, SearchResult, most_rounds
from engine.runs.prompts.tasks import SearchTasks, search_tasks
from engine.runs.prompts.versions import make_version
from envs.json_types import TaskRow
from envs.tool_schemas import tools_of

SLICE = 64  # held-out tasks between two looks at a request to stop


class Desk(Protocol):
    """What `PromptJob` needs from the process that runs it: answers to tasks, and the run's
    files."""

    def play(self, tasks: Sequence[TaskRow]) -> list[EvaluationRow]:
        """Answer each task once, greedily, and score the answer; return a row for each task, in
        order."""
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
    """One search for a prompt, with its exams before and after it.

    Attributes:
        run: the folder of the run.
        config: its config.
        env: the environment version whose prompt is searched for.
        desk: answers tasks and writes events and metrics.
        left_out: takes a task as it would be asked, and returns why it cannot be asked, e.g.
            because it is too long; "" if it can.
    """

    run: RunDir
    config: PromptConfig
    env: EnvRecord
    desk: Desk
    left_out: Callable[[TaskRow], str] = lambda task: ""

    def carry_out(self, reflection: Reflection) -> JsonObject:
        """Carry out the search and both exams, and return the content of result.json.

        `reflection` asks the endpoint that writes prompts. Raises Refused or EndpointDown if that
        endpoint cannot be asked, UserError if the environment has no texts that all its tasks
        share, and whatever the desk raises.
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
        self._report_sealed(tasks)
        self._record_first_prompt(texts)
        before = self._take_exam(0, heldout, texts)
        if last_line(self.run.metrics) is None:
            desk.metrics(0, summarise(before).curves())
        search_result = self._search(tasks, texts, reflection)
        desk.check_stop()
        if reflection.failure is not None:
            raise reflection.failure
        last_step = search_result.rounds + 1
        if search_result.is_new:
            after = self._take_exam(last_step, heldout, search_result.texts)
        else:
            after = self._copy_exam(last_step, before)
        env_id, problem = self._push_version(search_result)
        self._record_chosen_prompt(search_result, env_id)
        self.desk.metrics(last_step, summarise(after).curves())
        return self._result(search_result, tasks, env_id, problem, reflection, texts)

    def _own_texts(self) -> Texts:
        """Return the environment's own texts. Raises UserError BAD_ARGUMENT if its tasks share
        none."""
        rows = read_tasks(self.env)
        texts = texts_of(rows, self.env.tools, with_tools=self.config.settings.tool_texts)
        if not texts:
            raise no_texts_error(self.env.env_id)
        return texts

    def _report_sealed(self, tasks: SearchTasks) -> None:
        """Write an event with the number of tasks that the endpoint is not shown because they hold
        tasks of a sealed exam (tasks that nobody may see)."""
        if tasks.sealed:
            text = f"{tasks.sealed} train tasks hold tasks of a sealed exam: they are not sent away"
            self.desk.event("sealed_tasks", text, tasks=tasks.sealed)

    def _play(self, tasks: Sequence[TaskRow], texts: Texts) -> list[EvaluationRow]:
        """Let the model answer the tasks with `texts`; return a row for each task, in order. A task
        that cannot be asked with these texts gets a row with reward 0."""
        self.desk.check_stop()
        tasks_with_texts = [self._task_with_texts(task, texts) for task in tasks]
        obstacles = [self.left_out(task) for task in tasks_with_texts]  # "": it can be asked
        pairs = list(zip(tasks_with_texts, obstacles, strict=True))
        askable_tasks = [task for task, obstacle in pairs if not obstacle]
        answered_rows = iter(self.desk.play(askable_tasks))  # in the order of these tasks
        return [
            self._row_of_unasked(task, obstacle) if obstacle else next(answered_rows)
            for task, obstacle in pairs
        ]

    def _task_with_texts(self, task: TaskRow, texts: Texts) -> TaskRow:
        """Return a copy of the task that is asked with `texts`. Its answer is scored as before."""
        tools = tools_with(tools_of(task, self.env.tools), texts)
        return asked_otherwise(task, prompt_with(task["prompt"], texts), tools)

    def _row_of_unasked(self, task: TaskRow, reason: str) -> EvaluationRow:
        """Make the row of a task that could not be asked; `reason` becomes its error."""
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

    def _take_exam(
        self, step: int, heldout: Sequence[TaskRow], texts: Texts
    ) -> Sequence[EvaluationRow]:
        """Let the model answer the held-out tasks `heldout` with `texts`, and append the rows to
        the file of `step`. Tasks whose rows an earlier attempt of the run wrote are not asked
        again. Returns all rows."""
        path = self.run.evals(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_evaluation(path)
        answered_ids = {row.task for row in rows}
        tasks_left = [task for task in heldout if task["id"] not in answered_ids]
        with Appender(path) as file:
            for start in range(0, len(tasks_left), SLICE):
                for row in self._play(tasks_left[start : start + SLICE], texts):
                    file.append(row.to_line())
                    rows.append(row)
        return rows

    def _copy_exam(self, step: int, rows: Sequence[EvaluationRow]) -> Sequence[EvaluationRow]:
        """Write the rows of the first exam as those of `step` too, and return them. The search has
        chosen the prompt from before it, whose answers would be the same."""
        self.desk.event("no_better_prompt", "no prompt earned more than the environment's own")
        path = self.run.evals(step)
        path.unlink(missing_ok=True)
        with Appender(path) as file:
            for row in rows:
                file.append(row.to_line())
        return rows

    def _search(self, tasks: SearchTasks, texts: Texts, reflection: Reflection) -> SearchResult:
        """Search for texts that earn more than `texts`, and return the result. `tasks` are those of
        the search, `reflection` asks the endpoint that writes prompts."""
        prompt_search = Search(
            folder=self.run.search,
            settings=self.config.settings,
            tasks=tasks,
            play=self._play,
            reflection=reflection,
            redact=redactor_for(self.run.home, self.env.dir),
            on_round=self._on_round,
            is_stopping=self.desk.is_stopping,
        )
        return prompt_search.run(texts)

    def _record_first_prompt(self, texts: Texts) -> None:
        """Begin prompts.jsonl with the environment's own texts."""
        if not self.run.prompts.exists():
            self._append(PromptLine(round=0, texts=dict(texts)))

    def _append(self, line: PromptLine) -> None:
        """Append a prompt that was tried, with what it earned, to prompts.jsonl."""
        with Appender(self.run.prompts) as file:
            file.append(line.to_line())

    def _on_round(self, search_round: Round, search: Search) -> None:
        """Record a round of the search: its rollouts, its new prompt and its metrics.

        `search` tells the best prompt so far and what the whole search has used.
        """
        before, after = search_round.before, search_round.after  # None if it did not get so far
        answer_sets = [answers for answers in (before, after) if answers is not None]
        self._write_rollouts(search_round.number, answer_sets)
        if after is not None:
            # An interrupted attempt may have written this round already.
            keep_lines(self.run.prompts, lambda line: line["round"] < search_round.number)
            line = PromptLine(
                round=search_round.number,
                texts=dict(after.texts),
                before=before.mean if before else None,
                after=after.mean,
            )
            if search_round.chosen_by is not None:  # only a field that was set is written
                line = line.model_copy(update={"chosen_by": search_round.chosen_by})
            self._append(line)
        use = search.reflection.use
        values: dict[str, float | None] = {
            "tried_reward": after.mean if after else None,
            "reward_before": before.mean if before else None,
            "chosen_reward": search.best,
            "rollouts": float(search.rollouts),
            "reflection_calls": float(use.calls),
            "reflection_cost": use.cost,
        }
        # An attempt that was interrupted may have left numbers of a round that was not saved.
        self.desk.rewind(search_round.number - 1)
        self.desk.metrics(search_round.number, values)

    def _write_rollouts(self, step: int, answer_sets: Sequence[Answers]) -> None:
        """Write the answers of a round to the rollout file of `step`: `answer_sets` holds those
        with the old prompt, then those with the new one. Each task is a group: member 0 is its
        answer with the old prompt, member 1 that with the new one."""
        path = self.run.rollouts(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        shared_fields = set(TrajectoryRecord.model_fields) & set(EvaluationRow.model_fields)
        with Appender(path) as file:
            for member, answers in enumerate(answer_sets):
                for group, row in enumerate(answers.rows):
                    messages = row.messages or []
                    record = TrajectoryRecord(
                        **row.model_dump(include=shared_fields, exclude_unset=True),
                        step=step,
                        group=group,
                        member=member,
                        advantage=0.0,  # a rollout must have one, but no weights are trained here
                        turns=sum(message["role"] == "assistant" for message in messages),
                    )
                    file.append(record.to_line())

    def _push_version(self, search_result: SearchResult) -> tuple[str, str]:
        """Push an environment version with the prompt that the search chose. Returns (its id, ""),
        or ("", why it could not be pushed); both are "" if the search chose no new prompt."""
        if not search_result.is_new:
            return "", ""
        try:
            env_id = make_version(
                home_of_owner(self.run.home, self.config), self.env, search_result.texts
            )
        except UserError as error:  # the texts are in the result all the same
            self.desk.event("not_pushed", f"the prompt could not be pushed: {error.message}")
            return "", error.message
        self.desk.event("pushed", f"the prompt is the environment {env_id}", env_id=env_id)
        return env_id, ""

    def _record_chosen_prompt(self, search_result: SearchResult, env_id: str) -> None:
        """Append the prompt that the search chose to prompts.jsonl, with the id of its version if
        it could be pushed."""
        if search_result.is_new:
            line = PromptLine(
                round=search_result.rounds + 1,
                texts=dict(search_result.texts),
                chosen_by=search_result.chosen_by,
            )
            self._append(line.model_copy(update={"env_id": env_id}) if env_id else line)

    def _result(
        self,
        search_result: SearchResult,
        tasks: SearchTasks,
        env_id: str,
        problem: str,
        reflection: Reflection,
        before: Texts,
    ) -> JsonObject:
        """Make the content of result.json.

        Args:
            search_result: what the search chose.
            tasks: the tasks of the search.
            env_id: the id of the version with the new prompt; "" for none.
            problem: why there is no such version; "" if there is one or none is needed.
            reflection: asked the endpoint; it knows what that took.
            before: the environment's own texts.
        """
        verdict = run_verdict(self.run).to_json()
        use = {name: use.to_json() for name, use in reflection.answered.use.items()}
        prompt: JsonObject = {
            "env_id": env_id,
            "of": self.env.env_id,
            "texts": dict(search_result.texts),
            "texts_before": dict(before),
            "rounds": search_result.rounds,
            "rollouts": search_result.rollouts,
            "chosen_by": {
                "tasks": len(tasks.choosing),
                "before": round(search_result.chosen_by_before, 6),
                "after": round(search_result.chosen_by, 6),
            },
            "stopped_by": search_result.stopped_by,
        }
        if problem:
            prompt["not_pushed"] = problem
        return {
            "steps": search_result.rounds + 1,
            "verdict": verdict["verdict"],
            "summary": " ".join(
                [verdict.get("summary", ""), _describe_result(search_result, env_id, problem)]
            ),
            "evidence": verdict,
            "prompt": prompt,
            "endpoints": {"models": use, "total": reflection.answered.total.to_json()},
        }


def _describe_result(search_result: SearchResult, env_id: str, problem: str) -> str:
    """Say in one sentence what a search has come to. `env_id` is the environment version with the
    new prompt, `problem` why there is none; each is "" if it does not apply."""
    ended = f", ended by {search_result.stopped_by}" if search_result.stopped_by else ""
    effort = f"{search_result.rounds} rounds, {search_result.rollouts} rollouts{ended}"
    if not search_result.is_new:
        return f"No prompt earned more than the environment's own ({effort})."
    if problem:
        return f"The new prompt could not be pushed ({problem}); result.json has it ({effort})."
    return f"The new prompt is the environment {env_id} ({effort})."


def no_texts_error(env_id: str) -> UserError:
    """Make the error for an environment whose tasks share no text that could be rewritten."""
    return UserError(
        "BAD_ARGUMENT",
        f"the tasks of {env_id} have different system messages, so no one prompt is theirs",
        hint="Move what differs into the user's message, and push again.",
        field="env_id",
    )
