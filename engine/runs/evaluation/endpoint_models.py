"""Models behind a URL answer the tasks of an evaluation; their answers and costs are recorded.

All models answer a slice of the tasks before the next slice begins. If a cap ends the run, all of
them have answered about the same tasks. A resumed run does not ask again what was answered before.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine.core.files import Appender, JsonObject
from engine.core.format import counted
from engine.endpoints.answered import AnswerLedger
from engine.endpoints.play import Player, PlaySetup
from engine.home.run_dir import RunDir
from engine.home.user_config import key_of
from engine.records.lines.evaluation_row import EvaluationRow, read_evaluation
from engine.records.run_config import EvaluateConfig
from envs.json_types import TaskRow

SLICE = 64  # tasks that every model is asked before the next ones


@dataclass(frozen=True)
class EndpointAnswers:
    """What models behind a URL answered.

    Attributes:
        rows: index of a model in the config's `models` -> its answers.
        use: calls, tokens and money of each model and in total, for result.json.
        stopped_by: the setting that ended the run, with its value; "" if no cap ended it.
        asked_without: model -> parameters that its server refused.
    """

    rows: dict[int, list[EvaluationRow]]
    use: JsonObject
    stopped_by: str
    asked_without: dict[str, list[str]]

    def stop_in_words(self, task_count: int) -> str:
        """Say how many of the `task_count` tasks every model answered before a cap ended the run.

        For example "stopped by max_cost = 1: 12 of 100 tasks answered". Returns "" if no cap ended
        the run.
        """
        if not self.stopped_by:
            return ""
        # A task may have several rows, one for each attempt.
        task_counts = [len({row.task for row in rows}) for rows in self.rows.values()]
        fewest = min(task_counts)
        return f"stopped by {self.stopped_by}: {fewest} of {counted(task_count, 'task')} answered"


def ask_endpoints(
    run: RunDir,
    config: EvaluateConfig,
    setup: PlaySetup,
    tasks: Sequence[TaskRow],
    stop: threading.Event,
    on_slice: Callable[[int], None] = lambda answer_count: None,
) -> EndpointAnswers:
    """Let every model of the config that is behind a URL answer the tasks, and write their rows.

    Args:
        setup: the environment that the models play, with its settings.
        stop: once set, no further request is sent.
        on_slice: called after each slice of `SLICE` tasks with the number of answers so far.

    Raises Refused if an endpoint rejects the requests, EndpointDown if one does not answer, and
    Cancelled once `stop` is set. Rows that were written before stay.
    """
    settings = config.settings
    with ExitStack() as cleanup:  # closes everything below at the end, even after an error
        ledger = AnswerLedger(run.endpoint_calls, settings.max_calls, settings.max_cost)
        cleanup.callback(ledger.close)
        run.evals_dir.mkdir(parents=True, exist_ok=True)
        asked_models = [
            _AskedModel(run, config, index, setup, ledger, stop)
            for index, model in enumerate(config.models)
            if model.endpoint is not None
        ]
        for asked_model in asked_models:
            cleanup.callback(asked_model.close)
        for start in range(0, len(tasks), SLICE):
            for asked_model in asked_models:
                asked_model.play(tasks[start : start + SLICE])
            on_slice(sum(len(asked_model.rows) for asked_model in asked_models))
            if ledger.stopped_by:
                break
        use_by_model = {ref: use.to_json() for ref, use in ledger.use.items()}
        # Parameters of a request that a model's server refused, such as `top_k`.
        refused_parameters = {
            asked_model.player.ref: asked_model.player.client.left_out
            for asked_model in asked_models
        }
        return EndpointAnswers(
            rows={asked_model.index: asked_model.rows for asked_model in asked_models},
            use={"models": use_by_model, "total": ledger.total.to_json()},
            stopped_by=ledger.stopped_by,
            asked_without={ref: names for ref, names in refused_parameters.items() if names},
        )


class _AskedModel:
    """One model that plays the environment, and the file of its answers.

    Attributes:
        index: the model's place in the config's `models`.
        rows: the model's answers, including those from before an interruption.
    """

    def __init__(
        self,
        run: RunDir,
        config: EvaluateConfig,
        index: int,
        setup: PlaySetup,
        ledger: AnswerLedger,
        stop: threading.Event,
    ) -> None:
        """Open the file of the model at `index`, and read what it answered before.

        Args:
            run: the run, in whose folder the answers are stored.
            config: its config.
            index: the model's place in the config's `models`.
            setup: the environment that the model plays, with its settings.
            ledger: records all calls of the run, and enforces its caps on calls and money.
            stop: once set, no further request is sent.
        """
        model = config.models[index]
        assert model.endpoint is not None  # the caller chose it for that
        self.index = index
        path = run.model_evals(index)
        self.rows = read_evaluation(path)
        self._answered_attempts = {(row.task, row.attempt) for row in self.rows}
        self._attempts = config.attempts
        self._file = Appender(path)
        key = key_of(run.home.root, model.endpoint.key_env)
        self.player = Player(model.ref, model.endpoint, key, setup, ledger, stop)

    def play(self, tasks: Sequence[TaskRow]) -> None:
        """Let the model answer these tasks, `attempts` times each; skip attempts that its file has
        from before an interruption."""
        all_jobs = itertools.product(tasks, range(self._attempts))  # task by task
        jobs = [
            (task, attempt)
            for task, attempt in all_jobs
            if (task["id"], attempt) not in self._answered_attempts
        ]
        self.player.play(jobs, self._keep_row)

    def _keep_row(self, row: EvaluationRow) -> None:
        """Append an answer's row to the file and to `rows`."""
        self._file.append(row.to_line())
        self.rows.append(row)

    def close(self) -> None:
        """Close the file of answers and the connections to the endpoint."""
        self._file.close()
        self.player.close()
