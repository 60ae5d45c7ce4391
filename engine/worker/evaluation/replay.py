"""Rows that are replayed beside the run's own (`keep`), so that earlier skills are not lost.

Training on a new task alone overwrites what a model could do; a share of earlier rows in every
batch prevents it (rehearsal: Robins, "Catastrophic forgetting, rehearsal and pseudorehearsal",
1995). Here they are the starting model's own right answers, sampled greedily before the first step
from practice questions (practice.py), with exactly the tokens that were sampled: nothing is taught
that it could not do. With `keep_env` they are the train rows of another environment. No row asks
what an exam of the run asks.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from engine.core.files import write_text
from engine.core.split import prompt_key
from engine.environments.registry import find_env, read_tasks
from engine.records.lines.replayed_row import ReplayedRow
from engine.records.manifest import ReplayUsed
from engine.records.run_config import SFTConfig
from engine.worker.core.batch import Row
from engine.worker.core.job import Job, require
from engine.worker.evaluation.practice import practice_of
from engine.worker.evaluation.prior_skills import SKILL_TOKENS, batteries_of
from engine.worker.network.policy import Policy
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import TaskRow

MOST_ROWS = 2_000  # of an environment that are replayed: enough for a share of any run


@dataclass(frozen=True)
class Replay:
    """The rows to replay.

    Attributes:
        rows: all of them; each step takes some.
        share: of the rows of a batch that are replayed, above 0.
        seed: decides their order.
        used: what the manifest says of them.
    """

    rows: Sequence[Row]
    share: float
    seed: int
    used: ReplayUsed

    def beside(self, row_count: int) -> int:
        """How many rows to put beside `row_count` others so that they are the share of the sum; at
        least 1."""
        return max(1, round(row_count * self.share / (1 - self.share)))

    def of_step(self, step: int, row_count: int, batch_size: int) -> list[Row]:
        """The rows to put into the batch of `step` (from 1) beside its `row_count` own.

        They follow from the seed and the step alone, so a resumed run trains on the same. Each is
        used once before any is used again, up to steps whose own rows are fewer than `batch_size`.
        """
        first = (step - 1) * self.beside(batch_size)
        numbers = range(first, first + self.beside(row_count))
        return [self.rows[self._at(number)] for number in numbers]

    def _at(self, number: int) -> int:
        """The index of the row that is used as number `number`, counted over the whole run."""
        round_number, place = divmod(number, len(self.rows))
        return _order_of_round(round_number, len(self.rows), self.seed)[place]


@lru_cache(maxsize=2)  # a step's rows may belong to two rounds
def _order_of_round(round_number: int, count: int, seed: int) -> list[int]:
    """The indices of `count` rows in the order in which a round over all of them takes them."""
    return random.Random(f"{seed}-keep-{round_number}").sample(range(count), count)


@dataclass(frozen=True)
class Start:
    """A run before its first step.

    Attributes:
        policy: the starting model: no step made, no checkpoint loaded.
        sampler: answers with any adapter on its base.
        renderer: renders conversations as the run's own rows are.
        heldout: the held-out and the dev tasks of its environment.
    """

    policy: Policy
    sampler: Sampler
    renderer: Renderer
    heldout: Sequence[TaskRow]


def replay_of(job: Job[SFTConfig], start: Start) -> Replay | None:
    """The rows that the settings `keep` and `keep_env` ask for, written to `replayed.jsonl` and
    told by the event `replayed`; None where `keep` is 0.

    Raises:
        WorkerFailure: kind data, where there is nothing to replay.
    """
    settings = job.config.settings
    if not settings.keep:
        return None
    if settings.keep_env:
        rows, used = _environment_rows(job, start)
    else:
        rows, used = _own_answers(job, start)
    # At once and not row by row: an attempt after a kill writes the same file again.
    write_text(job.run.replayed, "".join(json.dumps(row.to_line()) + "\n" for row in rows))
    job.event(
        "replayed",
        used.sentence,
        rows=used.rows,
        source=used.source,
        questions=used.questions,
    )
    trained = [Row(row.ids, row.loss_mask) for row in rows]
    return Replay(trained, settings.keep, settings.seed, used)


def _own_answers(job: Job[SFTConfig], start: Start) -> tuple[list[ReplayedRow], ReplayUsed]:
    """The starting model's right answers to practice questions. Raises WorkerFailure (kind data) if
    none is right."""
    settings = job.config.settings
    practice = practice_of(job.config.base.ref)
    # The scorer of practice questions is always a function, never an environment.
    is_right = cast(Callable[[TaskRow, str], bool], practice.scorer)
    base = start.policy.base
    renderer = Renderer(base.tokenizer, base.stop_ids)  # as the batteries are asked
    prompts = [renderer.prompt(task["prompt"], tools=[]) for task in practice.tasks]
    start.sampler.load(start.policy.adapter)
    params = SamplingParams(max_tokens=SKILL_TOKENS, temperature=0.0)
    completions = start.sampler.generate(prompts, n=1, params=params)
    start.sampler.release_memory()
    rows = []
    for task, prompt, (completion,) in zip(practice.tasks, prompts, completions, strict=True):
        text = renderer.completion_text(completion.ids)
        if is_right(task, text):
            answer = {"role": "assistant", "content": text}
            rows.append(
                ReplayedRow(
                    source=practice.name,
                    task=task["id"],
                    family=task["family"],
                    messages=[*task["prompt"], answer],
                    ids=[*prompt, *completion.ids],
                    loss_mask=[0] * len(prompt) + [1] * len(completion.ids),
                )
            )
    questions = len(practice.tasks)
    require(
        rows,
        f"rows to replay: the starting model answers none of the {questions} practice questions of "
        f"{practice.name} rightly",
        "Leave keep out, or name an environment whose rows are replayed: keep_env.",
    )
    return rows, ReplayUsed(
        share=settings.keep, source=practice.name, rows=len(rows), questions=questions
    )


def _environment_rows(job: Job[SFTConfig], start: Start) -> tuple[list[ReplayedRow], ReplayUsed]:
    """At most MOST_ROWS train rows of the environment `keep_env`, drawn by the seed and cut at
    max_length; without those that an exam of this run asks. Raises WorkerFailure (kind data) if
    none is left, UserError if the environment is gone."""
    settings = job.config.settings
    record = find_env(job.run.home, settings.keep_env)
    tasks = read_tasks(record, "train")
    drawn = min(len(tasks), 4 * MOST_ROWS)  # some may have no answer, or be asked
    order = random.Random(f"{settings.seed}-keep-rows").sample(range(len(tasks)), drawn)
    asked = _asked_prompts(job, start.heldout)
    rows: list[ReplayedRow] = []
    for index in order:
        task = tasks[index]
        if not task["gold"] or prompt_key(task["prompt"]) in asked:
            continue
        tools = task["metadata"].get("tools") or record.tools
        rendered = start.renderer.rows(task["gold"], tools, settings.loss_on, settings.thinking)
        for chat in rendered:
            loss_mask = chat.loss_mask[: settings.max_length]
            if any(loss_mask):
                rows.append(
                    ReplayedRow(
                        source=record.env_id,
                        task=task["id"],
                        messages=task["gold"],
                        ids=chat.ids[: settings.max_length],
                        loss_mask=loss_mask,
                    )
                )
        if len(rows) >= MOST_ROWS:
            break
    require(
        rows,
        f"rows to replay: {record.env_id} has no train row with an answer that no exam asks",
        "Leave keep_env out: the model's own right answers are replayed then.",
    )
    return rows, ReplayUsed(share=settings.keep, source=record.env_id, rows=len(rows))


def _asked_prompts(job: Job[SFTConfig], heldout: Sequence[TaskRow]) -> set[str]:
    """The prompts, as `prompt_key`s, of every question that this run asks: of its batteries and of
    its environment's held-out tasks."""
    return {prompt_key(task["prompt"]) for task in _asked_tasks(job, heldout)}


def _asked_tasks(job: Job[SFTConfig], heldout: Sequence[TaskRow]) -> Iterator[TaskRow]:
    """Every task that an exam of this run asks."""
    yield from heldout
    for battery in batteries_of(job.config, job.run.home):
        yield from battery.tasks
