"""A regrade: stored answers are scored again by another version of an environment.

This is the worker process, `python -P -m engine.runs.evaluation.regrade RUN`, of an evaluation
whose config names a run in `regrade`. No model is loaded, so neither torch nor a GPU is needed.
Answers of several turns are played again.
Exit status: 0 done (result.json), 3 failed (failure.json), 4 stopped on request.
"""

import hashlib
import itertools
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import Appender
from engine.core.format import counted, decimal
from engine.core.reply import Reply
from engine.core.split import prompt_key
from engine.environments.registry import find_env, open_process, read_tasks
from engine.evidence.compare.rank_changes import rank_changes, sentence
from engine.evidence.signal.preview import preview
from engine.evidence.stats.results import load_rows, measure_of, side
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import RunDir
from engine.machine.processes.trainer_variables import end_with_supervisor
from engine.records.lines.answer import present_stop_reason
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.line_record import Line
from engine.records.record import DamagedRecord
from engine.records.run_config import RegradeConfig
from engine.runs.evaluation import stored_answers
from engine.runs.evaluation.process import carry_out
from engine.runs.evaluation.stored_answers import score_stored
from envs.host.process import EnvProcess
from envs.json_types import ScoreReply

# Why a stored answer was not scored.
SKIPPED = stored_answers.SKIPPED | {
    "unknown_task": "this environment has no task of that id",
    "changed_prompt": "the task of that id asks something else here",
}
# Fields of a rollout that are not copied.
_TRAINING_ONLY = ("ids", "prompt_ids", "loss_mask", "advantage")
_OF_OLD_SCORE = ("reason", "parts")  # taken from the new score; left out if it has none


class Stopped(Exception):
    """The run was asked to stop."""


@dataclass(frozen=True)
class ModelScores:
    """The means over the stored answers of one model, scored again.

    Attributes:
        ref: the model.
        success: mean; None if the environment does not report success.
        tasks, attempts: how many tasks, and how many answers, were scored.
        reward, reward_before: means of the new scores and of the stored ones.
        errors: how many scores failed.
    """

    ref: str
    tasks: int
    attempts: int
    success: float | None
    reward: float
    reward_before: float
    errors: int


class Regrade:
    """One regrade: a run whose stored answers are scored again by another environment version.

    Args:
        folder: the folder of the regrade's own run, with the config.json that submit wrote. In it
            `regrade` names the source run, and each entry of `models` the file there that holds the
            model's answers.
    """

    def __init__(self, folder: Path) -> None:
        """Read the config and the tasks, and install the handler of SIGTERM.

        SIGTERM makes `go` raise Stopped. This process also ends when its supervisor ends.

        Raises DamagedRecord if the config is not that of a regrade, and UserError ENV_* if the
        environment version cannot be used.
        """
        self.run = RunDir(folder)
        self.config = _read_config(self.run)
        self.source = self.run.home.run(self.config.regrade)  # the run that stored the answers
        self.record = find_env(self.run.home, self.config.env_id)
        self.is_multi_turn = self.record.kind == "multi"
        self.tasks = {row["id"]: row for row in read_tasks(self.record)}
        self.skip_counts: dict[str, int] = {}  # key of SKIPPED -> how many answers were not scored
        self._events = Appender(self.run.events)
        self._metrics = Appender(self.run.metrics)
        self._was_told_to_stop = False
        signal.signal(signal.SIGTERM, self._on_term)
        end_with_supervisor()

    def go(self) -> Reply:
        """Score the stored answers of all models, and return the content of result.json.

        Each model counts as one step of the run. Raises Stopped after SIGTERM, EnvProblem if the
        environment does not start, OSError for a file, and UserError NOT_COMPARABLE if none of the
        stored answers could be scored.
        """
        models = self.config.models
        self.event("started", counted(len(models), "model"), total_steps=len(models))
        regraded = self._score_all()
        if not any(regraded.values()):
            raise self._nothing_scored_error()
        return self._result(regraded)

    def _score_all(self) -> dict[str, list[Line]]:
        """Score the stored answers of all models, and return model -> its new rows.

        The mean scores of a model are recorded as soon as all of its answers are scored.
        """
        models = self.config.models
        stored_rows = {model.ref: load_rows(self.source.path / model.rows) for model in models}
        task_ids = self._task_ids(stored_rows.values())
        regraded: dict[str, list[Line]] = {}
        with open_process(self.record, log=self.run.logs / "environment.log") as process:
            process.describe()  # waits until the environment is loaded
            for index, (ref, rows) in enumerate(stored_rows.items()):
                regraded[ref] = self._score_model(process, index, ref, rows, task_ids)
                self._record_scores(step=index + 1, scores=_mean_scores(ref, regraded[ref]))
        return regraded

    def _record_scores(self, step: int, scores: ModelScores) -> None:
        """Write the means of one model, `scores`, to events.jsonl and metrics.jsonl.

        `step` is the number of models that are done.
        """
        ref, reward = scores.ref, scores.reward
        self.event("evaluated", f"{ref}: reward {decimal(reward)}", **asdict(scores))
        self._write_metrics(step, {"model": ref, f"{self.config.split}_reward": reward})

    def _nothing_scored_error(self) -> UserError:
        """Make the error for a regrade that could not score a single answer, with the reasons."""
        reasons = ", ".join(
            f"{count} {SKIPPED[reason]}" for reason, count in self.skip_counts.items()
        )
        return UserError(
            "NOT_COMPARABLE",
            f"none of the stored answers can be scored by {self.record.env_id}: {reasons}",
            hint="Regrade with a version of the environment that asks the same tasks.",
        )

    def _result(self, regraded: Mapping[str, list[Line]]) -> Reply:
        """Make the content of result.json; `regraded` maps each model to its new rows."""
        records = {ref: _records(rows) for ref, rows in regraded.items()}
        # Which models, tasks and attempts the new scores rank in another order.
        changes = rank_changes(records)
        groups = preview(records)  # None if each task was answered once
        evidence = run_verdict(self.run).to_json()
        source_files = [model.rows for model in self.config.models]
        groups_entry = {"groups": groups.to_json()} if groups else {}
        groups_sentence = f" {groups.sentence()}" if groups else ""
        return {
            "models": [asdict(_mean_scores(ref, rows)) for ref, rows in regraded.items()],
            "regrade": {
                **changes.to_json(),
                **groups_entry,
                "source": self.source.id,
                "skipped": self.skip_counts,
            },
            "source_files": {name: _digest(self.source.path / name) for name in source_files},
            "verdict": evidence["verdict"],
            "evidence": evidence,
            "summary": f"{sentence(changes)}{groups_sentence}",
        }

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append an event to the run's events.jsonl: its name, a message for people, and further
        fields."""
        self._events.append({"time": time.time(), "event": name, "message": message, **fields})

    def _write_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the values of one step to the run's metrics.jsonl."""
        self._metrics.append({"step": step, "time": time.time(), **values})

    def _task_ids(self, rows_of_models: Iterable[Sequence[Line]]) -> set[str]:
        """Return the ids of the tasks whose answers are scored: at most the config's `rows`.

        The tasks are taken in the order of `_task_order`. `rows_of_models` holds the stored rows of
        each model.
        """
        all_rows = itertools.chain.from_iterable(rows_of_models)
        all_ids = {str(row.get("task")) for row in all_rows}
        in_order = sorted(all_ids, key=_task_order)
        return set(in_order[: self.config.rows])

    def _score_model(
        self, process: EnvProcess, index: int, ref: str, rows: Sequence[Line], task_ids: set[str]
    ) -> list[Line]:
        """Score the stored rows of one model again, write the new rows to a file, and return them.

        Rows that cannot be scored are counted by reason in `self.skip_counts`. Raises Stopped
        before the next row once SIGTERM has come.

        Args:
            process: the process of the environment that scores.
            index: the model's place in the config's `models`, by which its file is named.
            ref: the model.
            rows: its stored rows.
            task_ids: rows of other tasks are left out.
        """
        path = self.run.model_evals(index)
        path.unlink(missing_ok=True)  # an earlier attempt of this run may have left it
        new_rows: list[Line] = []
        with Appender(path) as file:
            for position, row in enumerate(rows):
                if self._was_told_to_stop:
                    raise Stopped
                if str(row.get("task")) not in task_ids:
                    continue
                score = self._new_score(process, row)
                if isinstance(score, str):  # a key of SKIPPED
                    self.skip_counts[score] = self.skip_counts.get(score, 0) + 1
                    continue
                new_row = _new_row_of(row, score, ref, position)
                file.append(new_row)
                new_rows.append(new_row)
        return new_rows

    def _new_score(self, process: EnvProcess, row: Line) -> ScoreReply | str:
        """Score one stored answer, the line `row`, with this environment version in its `process`.

        Returns the score, or a key of `SKIPPED`, such as "changed_prompt", that says why the answer
        cannot be scored.
        """
        task = self.tasks.get(str(row.get("task")))
        if task is None:
            return "unknown_task"
        # Answers of older versions do not hold the prompt.
        if row.get("prompt") and prompt_key(row["prompt"]) != prompt_key(task["prompt"]):
            return "changed_prompt"
        return score_stored(process, task, row, is_multi_turn=self.is_multi_turn)

    def _on_term(self, *_: object) -> None:
        """Handle SIGTERM: make `_score_model` raise Stopped before the next answer."""
        self._was_told_to_stop = True


def _read_config(run: RunDir) -> RegradeConfig:
    """Read the config of the run. Raises DamagedRecord if it is not the config of a regrade."""
    config = run.read_config()
    if not isinstance(config, RegradeConfig):
        raise DamagedRecord(str(run.config), "it is no config of a regrade")
    return config


def _new_row_of(row: Line, score: Mapping[str, Any], ref: str, position: int) -> Line:
    """Return a copy of a stored row with its new score in place of the old one.

    The old score is kept in the keys `reward_before`, `success_before` and `error_before`.

    Args:
        row: the stored row.
        score: the new score.
        ref: the model that gave the answer.
        position: the row's place in its file, used as the number of the attempt if the row has
            no such number.
    """
    dropped_keys = (*_TRAINING_ONLY, *_OF_OLD_SCORE)
    copied_fields = {name: value for name, value in row.items() if name not in dropped_keys}
    # The explanation of the new score: `reason` and `parts`, if it has them.
    new_explanation = {name: score[name] for name in _OF_OLD_SCORE if score.get(name)}
    return copied_fields | {
        **new_explanation,
        "model": ref,
        # Rollouts of training name their attempt "member".
        "attempt": row.get("attempt", row.get("member", position)),
        "reward": score["reward"],
        "success": None if score["error"] else score["success"],
        "metrics": score["metrics"],
        "error": score["error"],
        "stop_reason": _new_stop_reason(row, score),
        "reward_before": float(row.get("reward") or 0.0),
        "success_before": row.get("success"),
        "error_before": row.get("error"),
    }


def _new_stop_reason(row: Line, score: Mapping[str, Any]) -> object:
    """Return the `stop_reason` of the answer, given its new score.

    This is "timeout" or "env_error" if the new score failed, "stop" if only the old score had
    failed, and the stored reason otherwise.
    """
    stop_reason = present_stop_reason(row.get("stop_reason"))  # older versions had other names
    if score["error"]:
        return "timeout" if score.get("timed_out") else "env_error"
    return "stop" if stop_reason in ("timeout", "env_error") else stop_reason


def _records(rows: Sequence[Line]) -> list[EvaluationRow]:
    """Check the lines and return them as typed rows of an evaluation."""
    return [EvaluationRow.of(row, "a row that was scored again") for row in rows]


def _mean_scores(ref: str, rows: Sequence[Line]) -> ModelScores:
    """Return the mean scores over `rows`, the scored answers of the model `ref`.

    If there are no rows, the means are 0. `success` is None if the environment does not report
    success.
    """
    records = _records(rows)
    measure = measure_of(records)  # "success" or "reward"; empty if no scoring has succeeded
    # The number of errors is the same for both measures.
    errors = side(records, measure or "reward").errors
    count = max(1, len(rows))  # not 0, to avoid a division by zero
    solved_count = sum(bool(row["success"]) for row in rows)
    return ModelScores(
        ref=ref,
        tasks=len({row["task"] for row in rows}),
        attempts=len(rows),
        success=solved_count / count if measure == "success" else None,
        reward=sum(row["reward"] for row in rows) / count,
        reward_before=sum(row["reward_before"] for row in rows) / count,
        errors=errors,
    )


def _task_order(task_id: str) -> bytes:
    """Return the sort key of a task: the SHA-256 of its id, for an order that looks random but is
    always the same."""
    return hashlib.sha256(task_id.encode()).digest()


def _digest(path: Path) -> str:
    """Return the SHA-256 of the file at `path` as hex; "" if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def main(folder: Path) -> int:
    """Carry out the regrade (the new scoring of stored answers) that the run folder `folder`
    describes; return the exit status of the process."""
    return carry_out(folder, Regrade, "regrading", Stopped)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
