"""The search itself: the library gepa (Agrawal et al., "GEPA: Reflective Prompt Evolution Can
Outperform Reinforcement Learning", arXiv 2507.19457), given our rollouts, scores and endpoint.

A round answers a few train tasks with one of the prompts so far. The endpoint then writes a new
prompt from these answers and what they earned. The same tasks are answered with the new prompt, and
if these answers earn more, so are the tasks that choose among prompts. gepa keeps its state in a
folder after every round; a later attempt of the run continues from that.
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
from engine.core.wording.prompt_texts import SYSTEM, Texts
from engine.home.sanitize import Redactor
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.settings import PromptSettings
from engine.runs.prompts.feedback import example_of
from engine.runs.prompts.reflection import Reflection
from engine.runs.prompts.tasks import SearchTasks
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
    """A round of the search. A field is None or empty if the round did not get so far.

    Attributes:
        number: the number of the round, from 1.
        before, after: the answers to the train tasks of the round, with the old prompt and with the
            new one.
        new_texts: what the endpoint wrote.
        chosen_by: mean reward of the new prompt on the tasks that choose among prompts.
    """

    number: int
    before: Answers | None = None
    after: Answers | None = None
    new_texts: Texts = field(default_factory=dict)
    chosen_by: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        texts: the best texts.
        is_new: whether they differ from the texts that the search began with.
        chosen_by, chosen_by_before: mean reward on the tasks that choose among prompts, with the
            best texts and with the first ones.
        rounds, rollouts: how many there were in all attempts of the run together.
        stopped_by: the setting that ended the search, with its value; "" if every task that chooses
            was solved.
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
    """Return the reward of an answer; 0 if the answer could not be scored."""
    return 0.0 if row.error else float(row.reward or 0.0)


def rollouts_per_round(settings: PromptSettings, choosing_count: int) -> int:
    """Return the most rollouts that one round takes, if `choosing_count` tasks choose among
    prompts."""
    return 2 * settings.prompts_per_step + choosing_count


def most_rounds(settings: PromptSettings, choosing_count: int) -> int:
    """Return how many rounds the rollouts allow if no round finds a better prompt. Before the first
    round the `choosing_count` tasks that choose among prompts are answered once."""
    return max(0, settings.max_rollouts - choosing_count) // (2 * settings.prompts_per_step)


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
            folder: where gepa keeps the state of the search; existing state is continued.
            settings: the settings of the run.
            tasks: the tasks to reflect on, and those that choose among prompts.
            play: answers tasks with given texts.
            reflection: asks the endpoint that writes prompts.
            redact: hides secrets in what the endpoint is shown.
            on_round: called after each round.
            is_stopping: returns whether the run was asked to stop.
        """
        self.folder, self.settings, self.tasks = folder, settings, tasks
        self.reflection = reflection
        self.best: float | None = None  # mean reward of the best prompt on the tasks that choose
        self.rollouts = 0
        self._play, self._redact, self._on_round = play, redact, on_round
        self._is_stopping = is_stopping
        self._choosing_ids = {task["id"] for task in tasks.choosing}
        self._round = Round(0)
        self._stopped_by = ""
        # Hash of texts -> task id -> reward.
        self._choosing_rewards: dict[str, dict[str, float]] = {}

    def run(self, texts: Texts) -> SearchResult:
        """Search, beginning with `texts`, until a cap is reached or every task that chooses is
        solved.

        If the run was asked to stop, or the endpoint failed, the search ends too: the caller must
        ask for that. Raises what `play` raises.
        """
        gepa: Any = importlib.import_module(PACKAGE)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read_choosing_rewards()
        with Appender(self.folder / "choosing.jsonl") as file:
            self._file = file
            result = gepa.optimize(
                seed_candidate=dict(texts),
                trainset=list(self.tasks.reflected),
                valset=list(self.tasks.choosing),
                adapter=self,
                reflection_lm=self.reflection,
                reflection_prompt_template={name: _request_template(name) for name in texts},
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
        scores = result.val_aggregate_scores  # of each prompt on the tasks that choose; 0: the seed
        return SearchResult(
            texts=dict(result.best_candidate),
            is_new=dict(result.best_candidate) != dict(texts),
            chosen_by=float(scores[result.best_idx]),
            chosen_by_before=float(scores[0]),
            rounds=self._round.number,
            rollouts=self.rollouts,
            stopped_by=self._stopped_by or self.reflection.stopped_by,
        )

    def log(self, message: str) -> None:
        """Drop a line of gepa's own log: the run has events instead."""

    def should_stop(self, state: Any) -> bool:
        """Return whether to end the search before the next round; gepa calls this with its
        state."""
        self.rollouts = int(state.total_num_evals)
        mean_rewards = []  # of each prompt on the tasks that choose
        for index in range(self._count_prompts(state)):
            mean_reward, _ = state.get_program_average_val_subset(index)  # and the number of tasks
            mean_rewards.append(mean_reward)
        best = max(mean_rewards)
        self.best = best
        if self._is_stopping() or self.reflection.is_over or best >= FULL_REWARD:
            return True
        needed_rollouts = rollouts_per_round(self.settings, len(self.tasks.choosing))
        if self.rollouts + needed_rollouts > self.settings.max_rollouts:
            self._stopped_by = f"max_rollouts = {self.settings.max_rollouts}"
            return True
        return False

    @staticmethod
    def _count_prompts(state: Any) -> int:
        """Return how many prompts gepa has kept so far."""
        return len(state.program_candidates)

    def evaluate(self, batch: list[TaskRow], candidate: Texts, capture_traces: bool = False) -> Any:
        """Answer the tasks of `batch` with the texts `candidate`; return the rewards in gepa's
        form.

        gepa calls this for the train tasks of a round and for the tasks that choose. If an earlier
        attempt of the run stored the rewards of the tasks that choose, they are not answered again.
        `capture_traces` is gepa's and not needed: rows that were answered are always returned.
        """
        chooses = batch[0]["id"] in self._choosing_ids  # a batch is all of one kind
        # Task id -> reward, as an earlier attempt of the run stored it.
        stored = self._choosing_rewards.get(_hash_of(candidate), {}) if chooses else {}
        if stored and all(task["id"] in stored for task in batch):
            stored_rewards = [stored[task["id"]] for task in batch]
            self._round.chosen_by = fmean(stored_rewards)
            return self._as_gepa_batch([None] * len(batch), stored_rewards, None)
        rows = self._play(batch, candidate)
        answers = Answers(dict(candidate), batch, rows)
        rewards = [reward_of(row) for row in rows]
        if chooses:
            self._store_choosing_rewards(candidate, batch, rewards)
            self._round.chosen_by = answers.mean
        elif self._round.before is None:  # gepa tries the old prompt of a round first
            self._round.before = answers
        else:
            self._round.after = answers
        return self._as_gepa_batch(rows, rewards, list(zip(batch, rows, strict=True)))

    @staticmethod
    def _as_gepa_batch(
        outputs: Sequence[Any], rewards: list[float], traces: list[Any] | None
    ) -> Any:
        """Make gepa's own object for answered tasks: an output, a reward and a trace for each.

        `outputs` are the rows of the answers, None for one that is not known any more; `traces`,
        from which gepa makes examples, are None if it needs none.
        """
        module: Any = importlib.import_module(f"{PACKAGE}.core.adapter")
        return module.EvaluationBatch(outputs=list(outputs), scores=rewards, trajectories=traces)

    def make_reflective_dataset(
        self, candidate: Texts, eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[JsonObject]]:
        """Return what the endpoint is shown of the answers in `eval_batch`: text to rewrite
        (`components_to_update` are their names) -> examples of answers. gepa calls this; every text
        gets the same examples."""
        examples = [example_of(task, row, self._redact) for task, row in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, examples)

    def on_iteration_start(self, event: Mapping[str, Any]) -> None:
        """Begin a new round, whose number is `event["iteration"]`; gepa calls this."""
        self._round = Round(int(event["iteration"]))

    def on_proposal_end(self, event: Mapping[str, Any]) -> None:
        """Note the texts that the endpoint wrote, `event["new_instructions"]`; gepa calls this."""
        self._round.new_texts = dict(event["new_instructions"])

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        """Report a finished round; gepa calls this. If the run is stopping, the round may be
        incomplete and is not reported."""
        self.rollouts = int(event["state"].total_num_evals)
        if not self._is_stopping():
            self._on_round(self._round, self)

    def _store_choosing_rewards(
        self, texts: Texts, tasks: Sequence[TaskRow], rewards: Sequence[float]
    ) -> None:
        """Store the rewards that the tasks that choose earned with the prompt `texts`, so that no
        later attempt of the run answers them again."""
        reward_by_task = {task["id"]: reward for task, reward in zip(tasks, rewards, strict=True)}
        self._choosing_rewards[_hash_of(texts)] = reward_by_task
        self._file.append({"texts": _hash_of(texts), "rewards": reward_by_task})

    def _read_choosing_rewards(self) -> None:
        """Read the rewards of the tasks that choose which earlier attempts of the run have
        stored."""
        whole_file = 1 << 30  # bytes: more than the file can have
        lines, _ = read_lines(self.folder / "choosing.jsonl", 0, max_bytes=whole_file)
        self._choosing_rewards = {str(line["texts"]): dict(line["rewards"]) for line in lines}


def _request_template(name: str) -> str:
    """Return the template of the request to rewrite the text `name`, "system" or that of a tool;
    gepa fills in the text and the examples."""
    text_in_words = _NAMES.get(name, f"what {name} says of itself")
    return _TEMPLATE.format(what=text_in_words)


def _hash_of(texts: Texts) -> str:
    """Return a hash of texts and their names."""
    return hashlib.sha256(json.dumps(dict(texts), sort_keys=True).encode()).hexdigest()[:24]
