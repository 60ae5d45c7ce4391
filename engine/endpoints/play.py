"""Has a model behind a URL answer tasks of an environment, and scores the answers: rows of an
evaluation.

Each rollout (one answer to one task) runs in a thread of its own, as many at once as the endpoint
allows. The environment's turns and tools are sent to the model in the form of OpenAI's chat API.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from engine.core.wording.asked import asked_prompt, asked_tools
from engine.endpoints.answered import AnswerLedger, OutOfBudget
from engine.endpoints.chat_client import Cancelled, ChatClient, Refused
from engine.endpoints.checks import MOST_STOPS
from engine.endpoints.metered import Request, ask_once
from engine.records.lines.answer import StopReason
from engine.records.lines.endpoint_call import EndpointCall
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import EndpointEntry
from engine.records.settings import EvaluationSettings
from envs.host.process import EnvProcess, EpisodeFailed
from envs.json_types import ChatMessage, JsonObject, ScoreReply, TaskRow, ToolSchema

REFUSED_AT_ONCE = 3  # after so many refused requests and no answer, all others would be refused too


@dataclass(frozen=True)
class PlaySetup:
    """The environment whose tasks are played, and the settings.

    Attributes:
        process: the environment, in its own process.
        multi_turn: whether the environment replies to the model's turns.
        tools: the environment's tools, as OpenAI function schemas; a task may have others.
        attempts: answers per task; a single one is greedy.
        half_of_task: the half of the held-out tasks that each task is in, by id; if an id is
            missing, "report".
    """

    process: EnvProcess
    multi_turn: bool
    tools: list[ToolSchema]
    settings: EvaluationSettings
    attempts: int
    half_of_task: Mapping[str, str]


@dataclass
class _Rollout:
    """One answer to one task, while it is played."""

    task: TaskRow
    attempt: int
    tools: list[ToolSchema]
    messages: list[ChatMessage] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    tokens: int = 0
    turns: int = 0
    invalid_calls: list[str] = field(default_factory=list)

    @property
    def completion(self) -> str:
        """The text of the last assistant turn; "" before the first."""
        turns = [message for message in self.messages if message["role"] == "assistant"]
        return turns[-1]["content"] if turns else ""


class Player:
    """Has one model behind a URL play the tasks of one environment."""

    def __init__(
        self,
        ref: str,
        endpoint: EndpointEntry,
        key: str,
        setup: PlaySetup,
        ledger: AnswerLedger,
        stop: threading.Event,
    ) -> None:
        """Play with the model `ref` of `endpoint`; its answers are stored in `ledger`.

        Args:
            key: the bearer token; "" for none.
            setup: the environment whose tasks are played, and the settings.
            stop: once set, no further request is sent.
        """
        self.ref, self.endpoint, self.setup = ref, endpoint, setup
        self.client = ChatClient(endpoint, key, stop)
        self._ledger, self._stop = ledger, stop
        self._refused, self._has_answered = 0, False

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def play(
        self, jobs: Sequence[tuple[TaskRow, int]], on_row: Callable[[EvaluationRow], None]
    ) -> None:
        """Play each job, which is a task and the number of the attempt. `on_row` is called in this
        thread with each row as soon as it is complete. Jobs that the run's caps on requests and
        cost do not allow are left out.

        Raises Refused if the endpoint refuses everything, EndpointDown if it does not answer,
        Cancelled if the run was asked to stop. Rollouts under way are awaited first.
        """
        processes = self.setup.process.team(self.setup.settings.score_workers)
        failure: Exception | None = None
        with ThreadPoolExecutor(self.endpoint.max_concurrency, "endpoint") as threads:
            # The env processes get the jobs in turn.
            pending: set[Future[EvaluationRow | None]] = {
                threads.submit(self._play_job, task, attempt, processes[number % len(processes)])
                for number, (task, attempt) in enumerate(jobs)
            }
            while pending:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    try:
                        row = future.result()
                    except Exception as error:  # noqa: BLE001 - raised below, once all have ended
                        failure = self._note_failure(failure, error)
                        # Drop the jobs that have not begun; those under way are awaited.
                        for unfinished in pending:
                            unfinished.cancel()
                        pending = {future for future in pending if not future.cancelled()}
                        continue
                    if row is not None:
                        on_row(row)
        if failure is not None:
            raise failure

    def _note_failure(self, first_failure: Exception | None, new_failure: Exception) -> Exception:
        """Return the failure to report, given the one so far and a new one. It is the first,
        because others follow from it; a mere `Cancelled` gives way to another. From now on nothing
        more is asked."""
        self._stop.set()
        if first_failure is None or isinstance(first_failure, Cancelled):
            return new_failure
        return first_failure

    def _play_job(self, task: TaskRow, attempt: int, process: EnvProcess) -> EvaluationRow | None:
        """Play one rollout and return its row, or None if the caps ended it. Raises Cancelled if
        the run was asked to stop, Refused if the endpoint refuses everything, EndpointDown if it
        does not answer."""
        if self._stop.is_set():
            raise Cancelled
        rollout = _Rollout(task, attempt, asked_tools(task, self.setup.tools))
        try:
            score = self._play_rollout(rollout, process)
        except OutOfBudget:
            return None
        except Refused as refusal:
            if refusal.is_about_all or self._refuses_all():
                raise
            return self._make_row(
                rollout, _failed_score(f"{self.ref} refused it: {refusal}"), "refused"
            )
        if score["error"]:
            reason: StopReason = "timeout" if score.get("timed_out") else "env_error"
            return self._make_row(rollout, score, reason)
        return self._make_row(rollout, score, rollout.stop_reason)

    def _refuses_all(self) -> bool:
        """Count a refused request. Returns whether the endpoint has answered nothing so far and
        refused REFUSED_AT_ONCE requests."""
        self._refused += 1
        return not self._has_answered and self._refused >= REFUSED_AT_ONCE

    def _play_rollout(self, rollout: _Rollout, process: EnvProcess) -> ScoreReply:
        """Play a rollout to its end, and score it. Raises OutOfBudget if a cap allows no further
        request, Refused, EndpointDown or Cancelled if a request ended so."""
        if not self.setup.multi_turn:
            self._take_turn(rollout)
            return process.score(rollout.task, rollout.completion)
        try:
            episode = process.start(rollout.task)
        except EpisodeFailed as error:
            return _failed_score(str(error), timed_out=error.timed_out)
        try:
            while True:
                if not self._take_turn_if_it_fits(rollout):
                    rollout.stop_reason = "max_context"
                    return episode.score()
                replies = episode.step(rollout.messages[-1])
                # A turn that was cut off has no end to which a reply could be appended.
                if replies is None or rollout.stop_reason == "max_tokens":
                    return episode.score()
                if rollout.turns >= self.setup.settings.max_turns:
                    rollout.stop_reason = "max_turns"
                    return episode.score()
                rollout.messages += replies
        except EpisodeFailed as error:
            return _failed_score(str(error), timed_out=error.timed_out)
        finally:
            episode.close()

    def _take_turn_if_it_fits(self, rollout: _Rollout) -> bool:
        """Take the model's next turn of a rollout. Returns False if the conversation has become too
        long for the model."""
        try:
            self._take_turn(rollout)
        except Refused as refusal:
            # A first prompt that is too long is a fault of the task, not an end of the rollout.
            if rollout.turns and refusal.is_too_long:
                return False
            raise
        return True

    def _take_turn(self, rollout: _Rollout) -> None:
        """Ask the model for its next turn and append that to the rollout. Raises OutOfBudget,
        Refused, EndpointDown or Cancelled if there is no answer."""
        call = self._request_turn(rollout)
        self._has_answered = True
        rollout.turns += 1
        rollout.tokens += call.tokens_out
        rollout.messages.append(dict(call.message))
        number = rollout.turns
        rollout.invalid_calls += [f"turn {number}: {fault}" for fault in call.invalid_calls or []]
        rollout.stop_reason = "max_tokens" if call.is_cut else "stop"

    def _request_turn(self, rollout: _Rollout) -> EndpointCall:
        """Return the model's next turn of a rollout: the stored answer, if the same request was
        answered before an interruption; else ask for it now."""
        messages = [*asked_prompt(rollout.task), *rollout.messages]
        request = Request(messages, rollout.tools, self._options(rollout.attempt))
        turn_key = (self.ref, rollout.task["id"], rollout.attempt, rollout.turns)
        return ask_once(self.client, self._ledger, turn_key, request)

    def _options(self, attempt: int) -> JsonObject:
        """Make the sampling parameters of a request for attempt number `attempt` (from 0). A single
        attempt takes the likeliest tokens; several attempts are drawn, each with a seed of its
        own."""
        settings = self.setup.settings
        options: JsonObject = {"max_tokens": settings.max_tokens, "temperature": 0}
        if settings.stop:
            options["stop"] = list(settings.stop)[:MOST_STOPS]
        if self.setup.attempts == 1:
            return options
        options |= {"temperature": settings.temperature, "seed": settings.seed + attempt}
        if settings.top_p != 1:
            options["top_p"] = settings.top_p
        if settings.top_k:
            options["top_k"] = settings.top_k
        if settings.min_p:
            options["min_p"] = settings.min_p
        return options

    def _make_row(self, rollout: _Rollout, score: ScoreReply, reason: StopReason) -> EvaluationRow:
        """Make the row of a rollout that has ended for this reason. `score` comes from the
        environment, or from `_failed_score` if there is none. Optional fields that are empty are
        left out."""
        failed = score["error"] is not None
        optional = {
            "invalid_calls": rollout.invalid_calls,
            "task_group": rollout.task.get("group"),
            "reason": score.get("reason"),
            "parts": score.get("parts"),
        }
        present = {name: value for name, value in optional.items() if value}
        return EvaluationRow(
            model=self.ref,
            half=self.setup.half_of_task.get(rollout.task["id"], "report"),
            attempt=rollout.attempt,
            task=rollout.task["id"],
            prompt=asked_prompt(rollout.task),
            messages=rollout.messages,
            completion=rollout.completion,
            reward=0.0 if failed else float(score["reward"]),
            success=None if failed else score["success"],
            metrics={} if failed else dict(score["metrics"]),
            error=score["error"],
            stop_reason=reason,
            tokens=rollout.tokens,
            **present,
        )


def _failed_score(error: str, *, timed_out: bool = False) -> ScoreReply:
    """Make the score of a rollout that could not be scored, because of `error`. `timed_out` says
    that the environment exceeded its time limit."""
    return {
        "reward": 0.0,
        "success": None,
        "metrics": {},
        "error": error,
        "timed_out": timed_out,
    }
