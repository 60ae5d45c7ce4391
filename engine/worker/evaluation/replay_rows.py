"""Where replayed rows (replay.py) come from: the starting model's own right answers to practice
questions or to the train tasks of an environment, or the answers in the environment's rows.

Own answers are sampled greedily before the first step and trained with exactly the sampled tokens,
so nothing is taught that the model could not do. No row asks a question that an exam (evaluation)
of the run asks, and none answers a question of the run's own rows otherwise than these do: it would
teach the opposite.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine.core.split import prompt_key
from engine.environments.registry import EnvRecord, find_env, open_process, read_tasks
from engine.records.lines.replayed_row import ReplayedRow
from engine.records.manifest import ReplayUsed
from engine.records.run_config import GRPOConfig, SFTConfig
from engine.records.settings import GRPOSettings
from engine.skills.batteries import SkillBattery, in_turn, practice_of
from engine.worker.core.job import Job
from engine.worker.core.trajectory import Trajectory
from engine.worker.evaluation.prior_skills import (
    answer_params,
    batteries_of,
    environment_context,
    family_of,
)
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, collect, fits
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import ChatMessage, TaskRow
from envs.tool_schemas import tools_of

MOST_ROWS = 2_000  # the most rows that are collected; enough for a share of any run
FEWEST_ASKED = 32  # questions sampled at a time; fewer would not fill the sampler


@dataclass(frozen=True)
class Start:
    """A run before its first step.

    Attributes:
        policy: the starting model, before any step and without a resumed checkpoint.
        sampler: samples with any adapter on the run's base.
        renderer: renders conversations in the same way as the run's own rows.
        env: the run's environment.
    """

    policy: Policy
    sampler: Sampler
    renderer: Renderer
    env: EnvRecord


class TaughtAnswers:
    """The answers that a run's own rows teach, and how many rows would have taught others.

    `opposed` counts the rows that `agreeing` left out.
    """

    def __init__(self, train_tasks: Sequence[TaskRow]) -> None:
        """Collect the reference answers of the run's train tasks. A task without one teaches
        none."""
        self._by_prompt: dict[str, set[str]] = {}  # the texts of the answers to each prompt
        self.opposed = 0
        for task in train_tasks:
            gold = task.get("gold")
            if gold:
                texts = self._by_prompt.setdefault(prompt_key(task["prompt"]), set())
                texts.add(_answer_in(gold))

    def agreeing(self, rows: Sequence[ReplayedRow]) -> list[ReplayedRow]:
        """Return the rows without those that answer a prompt of the run's own rows in another way
        than these do; how many were left out is added to `opposed`."""
        agreeing_rows = []
        for row in rows:
            prompt = row.messages[:-1]  # the last message is the answer
            taught_texts = self._by_prompt.get(prompt_key(prompt))
            if taught_texts is None or _answer_in(row.messages) in taught_texts:
                agreeing_rows.append(row)
        self.opposed += len(rows) - len(agreeing_rows)
        return agreeing_rows


def _answer_in(messages: Sequence[ChatMessage]) -> str:
    """Return the text of a conversation's last message, without white space around it."""
    return str(messages[-1].get("content") or "").strip()


class ReplaySource:
    """Collects the rows that one run may replay."""

    def __init__(self, job: Job[SFTConfig] | Job[GRPOConfig], start: Start, needed: int) -> None:
        """Prepare to collect rows for a run that begins with `start`.

        Args:
            needed: how many rows the run will use; at most so many (and at most MOST_ROWS) are
                collected.
        """
        self.job = job
        self.settings = job.config.settings
        self.start = start
        self.needed = min(needed, MOST_ROWS)
        # Large data are read row by row and would not fit into a table of answers.
        is_large = bool(start.env.version.data)
        train_tasks = () if is_large else read_tasks(start.env, "train")
        self.taught_answers = TaughtAnswers(train_tasks)
        base = start.policy.base
        # Without the run's setting `thinking`, as the batteries of earlier skills are asked.
        self.renderer = Renderer(base.tokenizer, base.stop_ids)

    def rows(self) -> tuple[list[ReplayedRow], ReplayUsed]:
        """Return the rows that the settings ask for, and what the manifest says of them.

        There are no rows if nothing can be replayed, or nothing of the environment `keep_env` if
        that is set. Raises UserError if that environment is gone.
        """
        practice = practice_of(self.job.config.base.ref)
        if not self.settings.keep_env:
            return self._practice_rows(practice)
        self.needed = (self.needed + 1) // 2  # each of the two sources gives half
        record = find_env(self.job.run.home, self.settings.keep_env)
        environment_rows, environment_entry = self._environment_rows(record)
        if not environment_rows:
            return [], environment_entry
        practice_rows, practice_entry = self._practice_rows(practice)
        if not practice_rows:
            return environment_rows, environment_entry
        combined_entry = practice_entry.model_copy(update={"beside": environment_entry})
        return [*practice_rows, *environment_rows], combined_entry

    def _environment_rows(self, record: EnvRecord) -> tuple[list[ReplayedRow], ReplayUsed]:
        """Make rows of the environment `keep_env`, with the answers that `keep_answers` asks
        for."""
        if self.settings.keep_answers == "own":
            return self._own_answer_rows(record)
        return self._reference_answer_rows(record)

    def _practice_rows(self, practice: SkillBattery) -> tuple[list[ReplayedRow], ReplayUsed]:
        """Make rows of the starting model's right answers to practice questions.

        Questions of all skills are asked in turn until `needed` answers are right or no question is
        left. Returns the rows, and what the manifest says of them.
        """
        params = SamplingParams(max_tokens=practice.max_tokens, temperature=0.0)
        remaining_tasks = in_turn(practice.tasks)
        rows: list[ReplayedRow] = []
        self.start.sampler.load(self.start.policy.adapter)
        while remaining_tasks and len(rows) < self.needed:
            count = max(FEWEST_ASKED, self.needed - len(rows))
            batch, remaining_tasks = remaining_tasks[:count], remaining_tasks[count:]
            answers = self._answers(batch, params)
            right_answers = [
                answer for answer in answers if practice.is_right(answer.task, answer.text)
            ]
            new_rows = [answer.row(practice.name) for answer in right_answers]
            rows += self.taught_answers.agreeing(new_rows)
        self.start.sampler.release_memory()
        question_count = len(practice.tasks) - len(remaining_tasks)
        return rows, self._manifest_entry(practice.name, rows, question_count)

    def _own_answer_rows(self, record: EnvRecord) -> tuple[list[ReplayedRow], ReplayUsed]:
        """Make rows of the starting model's own answers to train tasks of an environment.

        These are the answers that the environment scores as right. If it scores nothing, they are
        all answers that the model ended itself. Returns the rows, and what the manifest says of
        them.
        """
        tasks = self._tasks_outside_exams(record)
        rows: list[ReplayedRow] = []
        question_count = 0
        self.start.sampler.load(self.start.policy.adapter)
        with ExitStack() as stack:
            context = None  # how the tasks are played; stays None if the environment scores nothing
            if record.scored:
                process = stack.enter_context(open_process(record))
                context = environment_context(self.start.policy.base, process)
            while question_count < len(tasks) and len(rows) < self.needed:
                batch_size = max(FEWEST_ASKED, self.needed - len(rows))
                batch = tasks[question_count : question_count + batch_size]
                question_count += len(batch)
                if context:
                    new_rows = self._rightly_played_rows(record, batch, context)
                else:
                    new_rows = self._unscored_rows(batch)
                rows += self.taught_answers.agreeing(new_rows)
        self.start.sampler.release_memory()
        rows = [row.model_copy(update={"source": record.env_id}) for row in rows]
        return rows, self._manifest_entry(record.env_id, rows, question_count)

    def _rightly_played_rows(
        self, record: EnvRecord, tasks: Sequence[TaskRow], context: RolloutContext
    ) -> list[ReplayedRow]:
        """Play the tasks with the starting model; return the episodes that were scored as right, as
        rows.

        `context` is that of an environment that scores. Tasks without room for an answer are left
        out.
        """
        params = answer_params(tasks, context.renderer)
        fitting = [task for task in tasks if fits(task, context, params)]
        groups, _times = collect(fitting, 1, context, self.start.sampler, params)
        rows = []
        for task, group in zip(fitting, groups, strict=True):
            (episode,) = group.members  # each task is played once
            if _is_right(episode) and any(episode.loss_mask):
                rows.append(
                    ReplayedRow(
                        source=record.env_id,
                        task=task["id"],
                        family=family_of(task),
                        messages=[*task["prompt"], *episode.messages],
                        ids=[*episode.prompt_ids, *episode.ids],
                        loss_mask=[0] * len(episode.prompt_ids) + episode.loss_mask,
                    )
                )
        return rows

    def _unscored_rows(self, tasks: Sequence[TaskRow]) -> list[ReplayedRow]:
        """Ask the starting model tasks that nothing scores; return its answers as rows, except
        those that the token limit cut off."""
        answers = self._answers(tasks, answer_params(tasks, self.renderer))
        # The caller replaces the source.
        return [answer.row(source="") for answer in answers if answer.finished]

    def _answers(self, tasks: Sequence[TaskRow], params: SamplingParams) -> "Iterator[_Answer]":
        """Yield the model's answer to each task, asked with the task's prompt alone."""
        prompts = [self.renderer.prompt(task["prompt"], tools_of(task, [])) for task in tasks]
        completions = self.start.sampler.generate(prompts, n=1, params=params)
        for task, prompt, (completion,) in zip(tasks, prompts, completions, strict=True):
            text = self.renderer.completion_text(completion.ids)
            yield _Answer(task, prompt, completion.ids, text, completion.finished)

    def _reference_answer_rows(self, record: EnvRecord) -> tuple[list[ReplayedRow], ReplayUsed]:
        """Make rows of an environment's train tasks with the reference answers in them.

        There are at most about MOST_ROWS rows, each cut at max_length. Returns the rows, and what
        the manifest says of them.
        """
        rows: list[ReplayedRow] = []
        for task in self._tasks_outside_exams(record):
            if len(rows) >= MOST_ROWS:
                break
            if task["gold"]:
                reference_rows = list(self._rows_of_reference(record, task))
                rows += self.taught_answers.agreeing(reference_rows)
        return rows, self._manifest_entry(record.env_id, rows)

    def _rows_of_reference(self, record: EnvRecord, task: TaskRow) -> Iterator[ReplayedRow]:
        """Yield the rows of a task's reference conversation (`gold`), rendered as SFT renders its
        own rows."""
        settings, conversation = self.settings, task["gold"]
        tools = tools_of(task, record.tools)
        if isinstance(settings, GRPOSettings):  # GRPO lacks these settings, so SFT's defaults hold
            loss_on, thinking = "assistant", "keep"
        else:
            loss_on, thinking = settings.loss_on, settings.thinking
        for rendered in self.start.renderer.rows(conversation, tools, loss_on, thinking):
            loss_mask = rendered.loss_mask[: settings.max_length]
            if any(loss_mask):
                yield ReplayedRow(
                    source=record.env_id,
                    task=task["id"],
                    messages=conversation,
                    ids=rendered.ids[: settings.max_length],
                    loss_mask=loss_mask,
                )

    def _tasks_outside_exams(self, record: EnvRecord) -> list[TaskRow]:
        """Return train tasks of an environment in an order drawn by the run's seed. Tasks whose
        prompt also occurs in an exam (evaluation) of this run are left out."""
        tasks = read_tasks(record, "train")
        # More than needed, because some may have no answer, or occur in an exam.
        count = min(len(tasks), 4 * MOST_ROWS)
        rng = random.Random(f"{self.settings.seed}-keep-rows")
        drawn_tasks = [tasks[index] for index in rng.sample(range(len(tasks)), count)]
        exam_prompts = {prompt_key(task["prompt"]) for task in self._exam_tasks()}
        return [task for task in drawn_tasks if prompt_key(task["prompt"]) not in exam_prompts]

    def _exam_tasks(self) -> Iterator[TaskRow]:
        """Yield every task that an exam (evaluation) of this run asks: those of its batteries (sets
        of questions about earlier skills), and the held-out and dev tasks of its environment."""
        for split in ("heldout", "dev"):
            yield from read_tasks(self.start.env, split)
        for battery in batteries_of(self.job.config, self.job.run.home):
            yield from battery.tasks

    def _manifest_entry(
        self, source: str, rows: Sequence[ReplayedRow], questions: int | None = None
    ) -> ReplayUsed:
        """Describe the rows from a source for the manifest.

        `questions` is how many questions the model was asked; None if it was asked none. Opposed
        rows are those that were left out, because they answer a prompt of the run otherwise than
        its own rows; their count begins anew for the next source.
        """
        opposed = self.taught_answers.opposed
        self.taught_answers.opposed = 0
        return ReplayUsed(
            share=self.settings.keep,
            source=source,
            rows=len(rows),
            questions=questions,
            opposed=opposed,
        )


@dataclass(frozen=True)
class _Answer:
    """The starting model's answer to one task.

    Attributes:
        prompt: the token ids of the prompt.
        ids: the token ids of the answer.
        text: the answer as text.
        finished: whether the model ended the answer itself, rather than the token limit.
    """

    task: TaskRow
    prompt: list[int]
    ids: list[int]
    text: str
    finished: bool

    def row(self, source: str) -> ReplayedRow:
        """Return the answer as a row to train on, with the loss on the answer's tokens alone.
        `source` names the set of questions or the environment that the task comes from."""
        return ReplayedRow(
            source=source,
            task=self.task["id"],
            family=self.task.get("family") or family_of(self.task),
            messages=[*self.task["prompt"], {"role": "assistant", "content": self.text}],
            ids=[*self.prompt, *self.ids],
            loss_mask=[0] * len(self.prompt) + [1] * len(self.ids),
        )


def _is_right(episode: Trajectory) -> bool:
    """Tell whether a scored episode counts as right: by its success, or, if no success was
    reported, by a reward above 0."""
    if episode.error is not None:
        return False
    return episode.reward > 0 if episode.success is None else episode.success
