"""An evaluation of models behind a URL alone: `python -P -m engine.runs.evaluation.asking RUN`.

This is the worker process of an evaluation that loads no model, so it needs neither torch nor a
device. Exit status: 0 done (result.json), 3 failed (failure.json), 4 stopped on request.
"""

import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import Appender, JsonObject
from engine.core.format import counted
from engine.endpoints.chat_client import Cancelled, EndpointDown, Refused
from engine.endpoints.judges import judges_used
from engine.endpoints.play import PlaySetup
from engine.environments.registry import endpoints_of, find_env, open_process, read_tasks
from engine.evidence.stats.basics.summary import summarise
from engine.evidence.verdict.provenance import seal
from engine.home.run_dir import RunDir
from engine.machine.processes.outcome import EXIT_DONE
from engine.machine.processes.trainer_variables import end_with_supervisor
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.manifest import BasesAsked
from engine.records.record import DamagedRecord
from engine.records.run_config import EvaluateConfig
from engine.runs.evaluation import exam, stored_answers
from engine.runs.evaluation.endpoint_models import EndpointAnswers, ask_endpoints
from engine.runs.evaluation.process import Explanation, carry_out
from engine.runs.evaluation.result import evaluation_result, model_result, result_in_words
from envs.host.judge_budget import JudgeBudget
from envs.host.process import EnvProcess


class Asking:
    """One evaluation whose models all answer behind a URL."""

    def __init__(self, folder: Path) -> None:
        """Read the config in the run folder `folder`, and install the handler of SIGTERM.

        SIGTERM makes `go` raise Cancelled. This process also ends when its supervisor ends.

        Raises DamagedRecord if the config is not that of an evaluation of models behind a URL
        alone, and UserError ENV_* if the environment cannot be used.
        """
        self.run = RunDir(folder)
        self.config = _read_config(self.run)
        self.record = find_env(self.run.home, self.config.env_id)
        self.stop = threading.Event()
        self._events = Appender(self.run.events)
        self._metrics = Appender(self.run.metrics)
        signal.signal(signal.SIGTERM, self._on_term)
        end_with_supervisor()

    def go(self) -> JsonObject:
        """Let every model answer the tasks, and return the content of result.json.

        Raises:
            Cancelled: SIGTERM has come.
            Refused, EndpointDown: an endpoint rejects the requests, or does not answer.
            EnvProblem, OSError: the environment does not start, or a file cannot be written.
            UserError BUDGET: a cap ended the run before some model answered a task, or the judges
                of the environment have used up their limit.
        """
        config = self.config
        pool = read_tasks(self.record, config.split)
        tasks, half_of_task = exam.chosen_tasks(config, self.record, pool)
        models = counted(len(config.models), "model")
        self.event("started", models, total_steps=len(config.models))
        self._record_judges()
        with open_process(self.record, log=self.run.logs / "environment.log") as process:
            process.describe()  # waits until the environment is loaded
            process.judge_budget = _judge_budget(config)
            setup = PlaySetup(
                process=process,
                multi_turn=self.record.kind == "multi",
                tools=self.record.tools,
                settings=config.settings,
                attempts=config.attempts,
                half_of_task=half_of_task,
            )
            planned_answers = len(tasks) * config.attempts * len(config.models)

            def on_slice(answer_count: int) -> None:
                """Report how many answers there are so far."""
                self._report_progress(answer_count, planned_answers)

            endpoint_answers = ask_endpoints(self.run, config, setup, tasks, self.stop, on_slice)
            _check_judge(process)
        every_model_answered = all(endpoint_answers.rows.values())  # [] for a model without answers
        if endpoint_answers.stopped_by and not every_model_answered:
            raise UserError(
                "BUDGET",
                f"{endpoint_answers.stopped_by} allowed no answer of every model",
                hint="Raise it, or lower max_tokens: a request is sent only where the most that it "
                "can cost still fits.",
            )
        self._rescore({task["id"]: task for task in tasks})
        return self._result(endpoint_answers, task_count=len(tasks))

    def _record_judges(self) -> None:
        """Write down which judges (models that grade answers) the environment may ask, so that a
        later comparison can tell whether two evaluations had the same ones."""
        judges = judges_used(self.run.home, endpoints_of(self.record))
        if judges:
            # No weights: the models of this evaluation are behind a URL.
            BasesAsked(weights={}, judges=judges).write(self.run.bases)

    def _report_progress(self, answers: int, total: int) -> None:
        """Write a "progress" event: `answers` of `total` answers are there."""
        self.event("progress", f"{answers} of {counted(total, 'answer')}", done=answers, of=total)

    def _rescore(self, task_by_id: Mapping[str, JsonObject]) -> None:
        """Let a second env process score a sample of the first model's answers again, to see
        whether the rewards are the same. `task_by_id` holds the tasks that were asked."""

        def on_skip(reason: str) -> None:
            """Write an event that answers could not be scored again."""
            self.event("rescore_skipped", reason)

        with stored_answers.rescoring(self.run, self.record, on_skip) as rescore_sample:
            both_halves = ""  # held-out tasks that choose a checkpoint, and those that do not
            rescore_sample(self.run.model_evals(0), both_halves, task_by_id)

    def _result(self, answers: EndpointAnswers, task_count: int) -> JsonObject:
        """Make the content of result.json, and write an event and the metrics of each model.

        `answers` holds what each model answered and took. `task_count` is how many tasks each model
        was to answer; a cap may have left some of them out.
        """
        results = []
        for step, (index, rows) in enumerate(sorted(answers.rows.items()), start=1):
            ref = self.config.models[index].ref
            tasks = len({row.task for row in rows})
            result = model_result(ref, tasks, rows, left_out=task_count - tasks)
            results.append(result)
            self.event("evaluated", f"{ref}: {result_in_words(result)}", **result)
            self._write_metrics(step, ref, rows)
        content = evaluation_result(self.run, results) | endpoint_fields(answers, task_count)
        sentences = [content["summary"], *_cost_sentences(answers, task_count)]
        return content | {"summary": ". ".join(sentences)}

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append an event to the run's events.jsonl: its name, a message for people, and further
        fields."""
        self._events.append({"time": time.time(), "event": name, "message": message, **fields})

    def _write_metrics(self, step: int, ref: str, rows: list[EvaluationRow]) -> None:
        """Append the means over `rows`, the answers of the model `ref`, to the run's metrics.jsonl.
        `step` is the number of the model, from 1."""
        curves = summarise(rows).curves(self.config.split)
        self._metrics.append({"step": step, "time": time.time(), "model": ref, **curves})

    def _on_term(self, *_: object) -> None:
        """Handle SIGTERM: send no further request, so that `go` raises Cancelled."""
        self.stop.set()


def endpoint_fields(answers: EndpointAnswers, task_count: int) -> JsonObject:
    """Return the fields of result.json that only models behind a URL have.

    The field `endpoints` holds their calls, tokens and money. `stopped_by` says which cap ended the
    run, and `asked_without` which parameters a server refused; both are left out if there are none.

    Args:
        answers: what the models answered and took.
        task_count: how many tasks each model was to answer.
    """
    fields: JsonObject = {"endpoints": answers.use}
    if answers.stopped_by:
        fields["stopped_by"] = answers.stop_in_words(task_count)
    if answers.asked_without:
        fields["asked_without"] = answers.asked_without
    return fields


def _cost_sentences(answers: EndpointAnswers, task_count: int) -> list[str]:
    """Write sentences about the run's calls and money (in `answers`), the cap that ended it, if one
    did, and the parameters that a server refused. `task_count` is how many tasks each model was to
    answer."""
    total = answers.use["total"]
    money = f", {total['cost']:.4g} in money" if total["cost"] else ""
    sentences = [f"{counted(total['calls'], 'call')}{money}"]
    if answers.stopped_by:
        sentences.append(answers.stop_in_words(task_count))
    for ref, names in answers.asked_without.items():
        sentences.append(f"{ref} takes no {', '.join(names)}, and was asked without")
    return sentences


def _judge_budget(config: EvaluateConfig) -> JudgeBudget:
    """Return the limit on calls and money of the environment's judges (models that score answers),
    from the settings `max_judge_calls` and `max_judge_cost`."""
    settings = config.settings
    return JudgeBudget(
        settings.max_judge_calls, settings.max_judge_cost, borrowers=settings.score_workers
    )


def _check_judge(process: EnvProcess) -> None:
    """Raise UserError BUDGET if the limit of the environment's judge (a model that scores answers)
    made it refuse to score an answer.

    Otherwise the answers that the judge did not see would count as answers with reward 0.
    """
    budget = process.judge_budget
    if budget is not None and budget.used.refused:
        raise UserError(
            "BUDGET",
            f"the judge may be asked no more: {budget.spent or 'its limit is used up'}",
            hint="Raise max_judge_calls or max_judge_cost, or ask fewer rows.",
        )


def _read_config(run: RunDir) -> EvaluateConfig:
    """Read the config of the run.

    Raises DamagedRecord if it is not the config of an evaluation, or if a model must be loaded.
    """
    config = run.read_config()
    if not isinstance(config, EvaluateConfig) or config.needs_device:
        raise DamagedRecord(str(run.config), "it is no evaluation of models behind a URL alone")
    return config


def main(folder: Path) -> int:
    """Carry out the evaluation in the run folder `folder`; returns the exit status of the
    process."""
    status = carry_out(folder, Asking, "asking", Cancelled, _explain)
    if status == EXIT_DONE:
        seal(RunDir(folder))  # hashes of all files that the result rests on
    return status


def _explain(error: Exception) -> Explanation | None:
    """Explain a failure of an endpoint or of a budget as (kind, message, hint).

    Returns None for any other exception, which `carry_out` explains.
    """
    if isinstance(error, Refused):
        hint = "Correct its url, model or key_env in config.toml, or the settings, and ask again."
        return "config", "The endpoint refuses to be asked.", hint
    if isinstance(error, EndpointDown):
        hint = "Wait until it does, then ask again; lower max_concurrency where it says 429."
        return "infra", "The endpoint does not answer.", hint
    if isinstance(error, UserError) and error.code == "BUDGET":
        return "budget", error.message, error.advice
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
