"""A search for a prompt of a model behind a URL: `python -P -m engine.runs.prompts.asking RUN`.

It loads no model, so it needs neither torch nor a device. Exit status: 0 done (result.json), 3
failed (failure.json), 4 stopped on request.
"""

import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import Appender, JsonObject, keep_lines
from engine.endpoints.chat_client import Cancelled, EndpointDown, Refused
from engine.endpoints.play import Player, PlaySetup
from engine.environments.registry import find_env, open_process
from engine.evidence.verdict.provenance import seal
from engine.home.run_dir import RunDir
from engine.home.user_config import key_of
from engine.machine.processes.outcome import EXIT_DONE
from engine.machine.processes.trainer_variables import end_with_supervisor
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.record import DamagedRecord
from engine.records.run_config import PromptConfig
from engine.records.settings import EvaluationSettings
from engine.runs.evaluation.process import Explanation, carry_out
from engine.runs.prompts.checks import require_gepa
from engine.runs.prompts.job import PromptJob
from engine.runs.prompts.reflection import Reflection
from envs.host.judge_budget import JudgeBudget
from envs.json_types import TaskRow


class AskedSearch:
    """A search for a prompt whose answers come from a model behind a URL. It is the `Desk` of its
    `PromptJob`: it answers tasks and writes the run's files."""

    def __init__(self, folder: Path) -> None:
        """Read the config of the run folder, and install the handler of SIGTERM.

        SIGTERM makes `go` raise Cancelled. This process also ends when its supervisor ends. Raises
        DamagedRecord if the config is not that of a search without a loaded model, and UserError
        ENV_* if the environment cannot be used.
        """
        self.run = RunDir(folder)
        self.config = _read_config(self.run)
        self.record = find_env(self.run.home, self.config.env_id)
        self.stop = threading.Event()
        self._events = Appender(self.run.events)
        self._metrics = Appender(self.run.metrics)
        self._player: Player | None = None
        signal.signal(signal.SIGTERM, lambda *_: self.stop.set())
        end_with_supervisor()

    def go(self) -> JsonObject:
        """Carry out the search to its end, and return the content of result.json.

        Raises:
            Cancelled: SIGTERM has come.
            Refused, EndpointDown: an endpoint rejects the requests, or does not answer.
            EnvProblem, OSError: the environment does not start, or a file cannot be written.
            UserError BUDGET: the cap on money, or that of the judges, was reached during an exam
                (the held-out tasks, answered before and after the search).
        """
        require_gepa()
        config, settings = self.config, self.config.settings
        model, endpoint = config.model, config.models[0].endpoint
        assert endpoint is not None  # `_read_config` has checked it
        reflection = Reflection(self.run, config, self.stop)
        with open_process(self.record, log=self.run.logs / "environment.log") as process:
            process.describe()  # waits until the environment is loaded
            process.judge_budget = JudgeBudget(
                settings.max_judge_calls, settings.max_judge_cost, borrowers=settings.score_workers
            )
            setup = PlaySetup(
                process=process,
                multi_turn=self.record.kind == "multi",
                tools=self.record.tools,
                settings=_as_evaluation(config),
                attempts=1,
                half_of_task={},
            )
            key = key_of(self.run.home.root, endpoint.key_env)
            self._player = Player(model, endpoint, key, setup, reflection.answered, self.stop)
            try:
                return PromptJob(self.run, config, self.record, self).carry_out(reflection)
            finally:
                self._player.close()
                reflection.close()

    def play(self, tasks: Sequence[TaskRow]) -> list[EvaluationRow]:
        """Answer each task once, greedily; return a row for each, in the order of the tasks. Raises
        UserError BUDGET if the cap on money allows no more answers."""
        assert self._player is not None
        row_by_task: dict[str, EvaluationRow] = {}

        def keep_row(row: EvaluationRow) -> None:
            """Store the row of an answered task."""
            row_by_task[row.task] = row

        self._player.play([(task, 0) for task in tasks], keep_row)  # 0: the only attempt
        if len(row_by_task) < len(tasks):  # the player stops silently where a cap is reached
            raise UserError(
                "BUDGET",
                f"max_cost = {self.config.settings.max_cost:g} allows no more answers",
                hint="Submit a search with a higher max_cost, or with fewer rollouts.",
            )
        return [row_by_task[task["id"]] for task in tasks]

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append an event to the run's events.jsonl: its name, a message for people, and further
        fields."""
        self._events.append({"time": time.time(), "event": name, "message": message, **fields})

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line to the run's metrics.jsonl: `values` of the metrics at a step, which is a
        round of the search."""
        self._metrics.append({"step": step, "time": time.time(), **values})

    def rewind(self, step: int) -> None:
        """Remove the lines of metrics.jsonl after `step`, which an interrupted attempt has left."""
        keep_lines(self.run.metrics, lambda line: line["step"] <= step)
        self._metrics = Appender(self.run.metrics)  # the file was replaced by a new one

    def is_stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.stop.is_set()

    def check_stop(self) -> None:
        """Raise Cancelled if the run was asked to stop."""
        if self.stop.is_set():
            raise Cancelled


def _as_evaluation(config: PromptConfig) -> EvaluationSettings:
    """Convert the settings of a search to those of a greedy evaluation with one attempt per
    task."""
    values = config.settings.model_dump()
    shared = {name: values[name] for name in EvaluationSettings.model_fields if name in values}
    # `max_calls` limits the other endpoint, the one that writes prompts. `max_cost` limits both
    # together: the object that counts the money of all calls enforces it.
    no_caps = {"max_calls": None, "max_cost": None}
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return EvaluationSettings(**(shared | no_caps), **greedy)


def _read_config(run: RunDir) -> PromptConfig:
    """Read the config of the run. Raises DamagedRecord if it is not the config of a search for a
    prompt, or if the model that answers must be loaded."""
    config = run.read_config()
    if not isinstance(config, PromptConfig) or config.needs_device:
        raise DamagedRecord(str(run.config), "it is no search of a model behind a URL")
    return config


def main(folder: Path) -> int:
    """Carry out the search in the run folder `folder`; returns the exit status of the process."""
    status = carry_out(folder, AskedSearch, "search", Cancelled, _explain)
    if status == EXIT_DONE:
        seal(RunDir(folder))  # hashes of all files that the result rests on
    return status


def _explain(error: Exception) -> Explanation | None:
    """Explain why a search for a prompt failed: `error` of an endpoint or of a budget becomes
    (kind, message, hint). Return None for any other exception, which `carry_out` explains."""
    if isinstance(error, Refused):
        hint = "Correct its url, model or key_env in config.toml, then resume the run."
        return "config", "An endpoint refuses to be asked.", hint
    if isinstance(error, EndpointDown):
        return "infra", "An endpoint does not answer.", "Wait until it does, then resume the run."
    if isinstance(error, UserError) and error.code == "BUDGET":
        return "budget", error.message, error.advice
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
