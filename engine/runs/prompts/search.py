"""The search itself: the library gepa (Agrawal et al., "GEPA: Reflective Prompt Evolution Can
Outperform Reinforcement Learning", arXiv 2507.19457), given our rollouts, scores and endpoint.

In every round it answers a few train tasks with a prompt so far, has the endpoint write another
from the answers and what they earned, answers the same tasks with that, and if they earn more, the
tasks that choose. gepa keeps its state in a folder after every round, from which a run goes on.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.core.files import Appender, JsonObject, read_lines
from engine.home.sanitize import Redactor
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.settings import PromptSettings
from engine.runs.prompts.feedback import example_of
from engine.runs.prompts.reflection import Reflection
from engine.runs.prompts.tasks import SearchTasks
from engine.wording.prompt_texts import SYSTEM, Texts
from envs.json_types import TaskRow

PACKAGE = "gepa"
FULL_REWARD = 1.0  # answers that all earn it leave nothing to reflect on
_NAMES = {SYSTEM: "the system message"}
_TEMPLATE = """\
An assistant works on tasks by the following text, which is {what}. It may be empty.
```
<curr_param>
```

These are tasks that it was given, what it answered, and what each answer earned:
```
<side_info>
```

Write the text anew, so that answers to other tasks of this kind earn more. Say what these tasks
ask for and which form of answer earns something, in general terms; name facts and rules that the
assistant needs, and no answers to single tasks. Give the new text within ``` blocks.
"""


@dataclass(frozen=True)
class Answers:
    """How tasks were answered with some texts: one row for each task, in their order."""

    texts: Texts
    tasks: Sequence[TaskRow]
    rows: Sequence[EvaluationRow]

    @property
    def mean(self) -> float:
        """Mean reward."""
        return fmean(reward_of(row) for row in self.rows) if self.rows else 0.0


@dataclass
class Round:
    """A round of the search; None or empty for what did not come to be in it.

    Attributes:
        number: from 1.
        before, after: the answers to the train tasks of the round, by the prompt that was taken up
            and by the new one.
        new_texts: what the endpoint wrote.
        chosen_by: mean reward of the new prompt on the tasks that choose.
    """

    number: int
    before: Answers | None = None
    after: Answers | None = None
    new_texts: Texts = field(default_factory=dict)
    chosen_by: float | None = None


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        texts: the best ones.
        is_new: whether they are not those that it began with.
        chosen_by, chosen_by_before: mean reward on the tasks that choose, of these and of those.
        rounds, rollouts: how many there were in all attempts.
        stopped_by: the setting that ended it, with its value; "" where every such task was solved.
    """

    texts: Texts
    is_new: bool
    chosen_by: float
    chosen_by_before: float
    rounds: int
    rollouts: int
    stopped_by: str


Play = Callable[[Sequence[TaskRow], Texts], list[EvaluationRow]]


def reward_of(row: EvaluationRow) -> float:
    """What an answer earned; 0 where it could not be scored."""
    return 0.0 if row.error else float(row.reward or 0.0)


def rollouts_per_round(settings: PromptSettings, choosing: int) -> int:
    """The most rollouts of a round, where `choosing` tasks choose among prompts."""
    return 2 * settings.prompts_per_step + choosing


def most_rounds(settings: PromptSettings, choosing: int) -> int:
    """How many rounds there can be at most, where none of them finds anything."""
    return max(0, settings.max_rollouts - choosing) // (2 * settings.prompts_per_step)


class Search:
    """gepa's adapter, callback and stopper in one, for one run."""

    propose_new_texts = None  # gepa's own way to ask the endpoint

    def __init__(
        self,
        folder: Path,
        settings: PromptSettings,
        tasks: SearchTasks,
        play: Play,
        reflection: Reflection,
        redact: Redactor,
        on_round: Callable[[Round, "Search"], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Prepare a search, or another attempt of one.

        Args:
            folder: where its state is kept; one that has state goes on.
            play: answers tasks with some texts.
            redact: hides secrets in what the endpoint is shown.
            on_round: is told of each round when it is over.
            is_stopping: whether the run was asked to stop.
        """
        self.folder, self.settings, self.tasks = folder, settings, tasks
        self.reflection = reflection
        self.best: float | None = None  # mean reward of the best prompt on the tasks that choose
        self.rollouts = 0
        self._play, self._redact, self._on_round = play, redact, on_round
        self._is_stopping = is_stopping
        self._choosing = {task["id"] for task in tasks.choosing}
        self._round = Round(0)
        self._stopped_by = ""
        self._known: dict[str, dict[str, float]] = {}  # hash of texts -> task -> reward

    def run(self, texts: Texts) -> Found:
        """Search from `texts` until a cap is reached or every task that chooses is solved.

        What ended it by force is for the caller to ask: a request to stop, and what `reflection`
        says. Raises what `play` raises.
        """
        gepa: Any = importlib.import_module(PACKAGE)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_known()
        with Appender(self.folder / "choosing.jsonl") as file:
            self._file = file
            result = gepa.optimize(
                seed_candidate=dict(texts),
                trainset=list(self.tasks.reflected),
                valset=list(self.tasks.choosing),
                adapter=self,
                reflection_lm=self.reflection,
                reflection_prompt_template={
                    name: _TEMPLATE.format(what=_NAMES.get(name, f"what {name} says of itself"))
                    for name in texts
                },
                reflection_minibatch_size=min(
                    self.settings.prompts_per_step, len(self.tasks.reflected)
                ),
                perfect_score=FULL_REWARD,
                stop_callbacks=self.should_stop,
                logger=self,
                callbacks=[self],
                run_dir=str(self.folder),
                track_best_outputs=False,
                seed=self.settings.seed,
            )
        scores = result.val_aggregate_scores
        return Found(
            texts=dict(result.best_candidate),
            is_new=dict(result.best_candidate) != dict(texts),
            chosen_by=float(scores[result.best_idx]),
            chosen_by_before=float(scores[0]),
            rounds=self._round.number,
            rollouts=self.rollouts,
            stopped_by=self._stopped_by or self.reflection.stopped_by,
        )

    def log(self, message: str) -> None:
        """gepa's own log: the run has events instead."""

    def should_stop(self, state: Any) -> bool:
        """Whether the search is over before another round: gepa asks with its state."""
        self.rollouts = int(state.total_num_evals)
        scores = [state.get_program_average_val_subset(i)[0] for i in range(self._count(state))]
        best = self.best = max(scores)
        needed = rollouts_per_round(self.settings, len(self.tasks.choosing))
        if self._is_stopping() or self.reflection.is_over or best >= FULL_REWARD:
            return True
        if self.rollouts + needed > self.settings.max_rollouts:
            self._stopped_by = f"max_rollouts = {self.settings.max_rollouts}"
            return True
        return False

    @staticmethod
    def _count(state: Any) -> int:
        """How many prompts were kept so far."""
        return len(state.program_candidates)

    def evaluate(self, batch: list[TaskRow], candidate: Texts, capture_traces: bool = False) -> Any:
        """Answer tasks: gepa asks so for the tasks of a round, and for those that choose."""
        chooses = batch[0]["id"] in self._choosing
        kept = self._known.get(_hash_of(candidate), {}) if chooses else {}
        if kept and all(task["id"] in kept for task in batch):
            self._round.chosen_by = fmean(kept[task["id"]] for task in batch)
            return self._batch([None] * len(batch), [kept[task["id"]] for task in batch], None)
        rows = self._play(batch, candidate)
        answers = Answers(dict(candidate), batch, rows)
        rewards = [reward_of(row) for row in rows]
        if chooses:
            self._keep(candidate, batch, rewards)
            self._round.chosen_by = answers.mean
        elif self._round.before is None:
            self._round.before = answers
        else:
            self._round.after = answers
        return self._batch(rows, rewards, list(zip(batch, rows, strict=True)))

    @staticmethod
    def _batch(outputs: Sequence[Any], rewards: list[float], traces: list[Any] | None) -> Any:
        """The answers in gepa's own form."""
        module: Any = importlib.import_module(f"{PACKAGE}.core.adapter")
        return module.EvaluationBatch(outputs=list(outputs), scores=rewards, trajectories=traces)

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[JsonObject]]:
        """What the endpoint is shown, for each text that it is to write anew."""
        examples = [example_of(task, row, self._redact) for task, row in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, examples)

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        """gepa begins a round."""
        self._round = Round(int(event["iteration"]))

    def on_proposal_end(self, event: Mapping[str, Any]) -> None:
        """The endpoint wrote new texts."""
        self._round.new_texts = dict(event["new_instructions"])

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        """A round is over; where the run is stopping it may be half of one."""
        self.rollouts = int(event["state"].total_num_evals)
        if not self._is_stopping():
            self._on_round(self._round, self)

    def _keep(self, texts: Texts, tasks: Sequence[TaskRow], rewards: Sequence[float]) -> None:
        """Write down what the tasks that choose earned, so that no attempt asks them again."""
        earned = {task["id"]: reward for task, reward in zip(tasks, rewards, strict=True)}
        self._known[_hash_of(texts)] = earned
        self._file.append({"texts": _hash_of(texts), "rewards": earned})

    def _read_known(self) -> None:
        """Read what tasks that choose earned in earlier attempts."""
        lines, _ = read_lines(self.folder / "choosing.jsonl", 0, max_bytes=1 << 30)
        self._known = {str(line["texts"]): dict(line["rewards"]) for line in lines}


def _hash_of(texts: Texts) -> str:
    """A hash of texts by their names."""
    return hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()[:24]
