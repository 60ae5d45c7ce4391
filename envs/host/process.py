"""The client of an env process. User code runs there, under limits, and never in this process.

A call that raises, hangs, crashes or answers nonsense costs one sample: the caller gets an error
text. If the process died, the next call starts a fresh one, and rollouts that were under way are
replayed there from the messages they had received.
"""

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.base import Message
from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.judge_budget import JudgeBudget
from envs.host.pipe import Fault, Pipe, reach_of
from envs.host.replies import (
    checked_description,
    checked_rows,
    checked_score,
    failed_score,
    failure_of,
    score_in_row,
    task_of_row,
)
from envs.isolation.packages import packages_of
from envs.isolation.sandbox import Confinement, Sandbox
from envs.json_types import ChatMessage, EnvDescription, Request, ScoreReply, TaskRow
from envs.metering.relay import Relay, Upstream

LOAD_ATTEMPTS = 3  # starts that may fail before the environment counts as broken
AT_ONCE = 16  # scores of an async `score` that are awaited together
SPARE_SECONDS = 1.0  # all of them together may take this much longer than one


class EpisodeFailed(Exception):
    """A rollout cannot go on; the text says why.

    Attributes:
        timed_out: whether the reason is a call of the environment that took too long.
    """

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        """Store `text`, the reason, and whether a call of the environment took too long."""
        super().__init__(text)
        self.timed_out = timed_out


class EnvProcess:
    """A client of one environment that runs in a process of its own.

    The process starts with the first call. Calls are serialised: one instance serves one caller at
    a time, several instances run in parallel.
    """

    def __init__(
        self,
        source: Path,
        *,
        python: str | Path | None = None,
        limits: Limits | None = None,
        secrets: Mapping[str, str] | None = None,
        log: Path | None = None,
        sandbox: Sandbox | None = None,
        upstreams: Mapping[str, Upstream] | None = None,
    ) -> None:
        """Store the arguments; the process starts with the first call.

        Args:
            source: the environment's folder.
            python: the interpreter whose packages the environment may import; by default the
                present one. The process always runs on the present interpreter.
            limits: the resources it may use; by default those of its environment.toml.
            secrets: names and values of environment variables that only this process gets.
            log: the file its output is appended to, up to 1 MiB; by default output is dropped.
            sandbox: the isolation that must hold; by default whatever works on this machine.
            upstreams: the models it may ask: name -> model. Those of the home are served first.
        """
        self.source = Path(source).absolute()
        self.python = str(python or sys.executable)
        self.secrets = dict(secrets or {})
        self.log = log
        self.upstreams = dict(upstreams or {})
        self.generation = 0  # number of starts; episodes of an earlier start have to be replayed
        self._limits = limits  # None until they are read
        self._lock = threading.RLock()
        self._pipe: Pipe | None = None  # None while the process does not run
        self._description: EnvDescription | None = None
        self.sandbox = sandbox or Sandbox()
        self._confinement: Confinement | None = None
        self._problem: EnvProblem | None = None  # raised by every further call
        self._failed_loads = 0  # starts that failed in a row
        self._episode_numbers = itertools.count(1)
        self.judge_budget: JudgeBudget | None = None  # limits its judge calls; None: no limit
        self._team_members: list[EnvProcess] = []  # the other processes of `team`

    def __enter__(self) -> "EnvProcess":
        """Return this client; the process still starts with the first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()

    @property
    def limits(self) -> Limits:
        """The resources that the process may use: those given, or else those of environment.toml.
        Raises EnvProblem if that file cannot be read."""
        if self._limits is None:
            self._limits = read_settings(self.source).limits
        return self._limits

    @property
    def confinement(self) -> Confinement:
        """The isolation around user code; starts the process if it does not run.

        Raises EnvProblem if it cannot be started.
        """
        self.describe()  # starts the process, which reports its isolation
        assert self._confinement is not None  # describe raises otherwise
        return self._confinement

    @property
    def isolation(self) -> str:
        """The isolation in one line, its level and the measures. Starts the process if it does not
        run.

        Raises EnvProblem if it cannot be started.
        """
        return str(self.confinement)

    @property
    def level(self) -> str:
        """How well user code is isolated: `full`, `no-namespaces` or `limits`.

        A self-test inside the process tells, so this starts the process if it does not run. Raises
        EnvProblem if it cannot be started.
        """
        return self.confinement.level

    @property
    def gaps(self) -> list[str]:
        """What user code can still do in spite of the isolation, as sentences.

        Starts the process if it does not run. Raises EnvProblem if it cannot be started.
        """
        return list(self.confinement.gaps)  # `confinement` starts the process

    @property
    def pid(self) -> int | None:
        """The id of the process that runs user code.

        None while no process runs, and under bubblewrap, which hides the id.
        """
        return self._pipe.child_pid if self._pipe else None

    def describe(self) -> EnvDescription:
        """Return the environment's kind, whether it is scored, and its tools.

        Starts the process if it does not run. Raises EnvProblem if it cannot be started or the
        environment cannot be loaded.
        """
        with self._lock:
            try:
                self._ensure_started()
            except Fault as fault:
                raise _as_problem(fault) from None
            assert self._description is not None  # _ensure_started raises otherwise
            return self._description.copy()

    def tasks(self, seconds: float | None = None) -> list[TaskRow]:
        """Return every task of the environment as a row to be stored.

        `seconds` is the time allowed for tasks(); None takes the limit `start_seconds`. Raises
        EnvProblem if tasks() fails, takes longer, or returns a bad task.
        """
        seconds = self.limits.start_seconds if seconds is None else seconds
        with self._lock:
            try:
                rows: list[Any] = []  # the call appends to it
                self._call("tasks", {}, seconds, rows)
            except Fault as fault:
                raise _as_problem(fault) from None
            # In an SFT dataset nothing is scored, so every task needs an answer to learn from.
            return checked_rows(rows, needs_answer=self.describe()["kind"] == "sft")

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        """Score one completion (its text) of a task (a stored row). The score's `seconds` is how
        long the call took.

        A failure raises nothing: the score then has reward 0 and the reason as its `error`.
        """
        return self._ask_for_score("score", {"task": task, "completion": completion})

    @property
    def compares_groups(self) -> bool:
        """Whether the environment has `score_group`, which scores all completions of one task
        together; False if it cannot be loaded."""
        try:
            return bool(self.describe().get("groups"))
        except EnvProblem:  # every score then fails with the reason
            return False

    @property
    def at_once(self) -> int:
        """How many scores `score_many` awaits at once: AT_ONCE if `score` is async, else 1 (also if
        the environment cannot be loaded)."""
        try:
            return AT_ONCE if self.describe().get("concurrent") else 1
        except EnvProblem:  # every score then fails with the reason
            return 1

    def score_many(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[ScoreReply]:
        """Return the score of each (task, completion) pair, in order, as `score` would.

        If the environment's `score` is async, the scores are awaited together; pairs for which that
        fails are then scored one by one.
        """
        scores: dict[int, ScoreReply] = {}  # index of the pair -> its score
        if len(pairs) > 1 and self.at_once > 1:
            scores = self._scores_together(pairs)
        for index, (task, completion) in enumerate(pairs):
            if index not in scores:
                scores[index] = self.score(task, completion)
        return [scores[index] for index in range(len(pairs))]

    def score_group(self, task: Mapping[str, Any], completions: Sequence[str]) -> list[ScoreReply]:
        """Return the scores that `score_group` gives to completions of one task, in their order.

        A failure costs all of them: each score then has reward 0 and the reason as its `error`.
        """
        began = time.monotonic()
        body = {"task": task, "completions": list(completions)}
        try:
            with self._lock:
                values = self._call("score_group", body, self.limits.call_seconds)
            if not isinstance(values, list) or len(values) != len(completions):
                raise Fault("score_group() gave no score for each completion", alive=True)
            scores = [checked_score(value) for value in values]
        except Fault as fault:
            scores = [failure_of(fault) for _ in completions]
        except EnvProblem as problem:
            scores = [failed_score(str(problem)) for _ in completions]
        seconds_per_score = (time.monotonic() - began) / max(1, len(completions))
        return [{**score, "seconds": seconds_per_score} for score in scores]

    def _scores_together(
        self, pairs: Sequence[tuple[Mapping[str, Any], str]]
    ) -> dict[int, ScoreReply]:
        """Ask an async `score` for all pairs at once; return index of the pair -> its score.

        A pair without an answer, e.g. because the process died, is missing in the result.
        """
        rows: list[Any] = []
        began, seconds = time.monotonic(), self.limits.call_seconds
        body = {"items": [[task, text] for task, text in pairs], "seconds": seconds}
        # A failure is no error here: the caller scores the pairs without an answer one by one.
        with self._lock, contextlib.suppress(Fault, EnvProblem):
            # Longer than the limit of each score, so that a score that hangs times out alone.
            self._call("scores", body, seconds + SPARE_SECONDS, rows)
        seconds_per_pair = (time.monotonic() - began) / len(pairs)
        scores: dict[int, ScoreReply] = {}
        for row in rows:  # user code may have forged them
            index = row.get("index") if isinstance(row, dict) else None
            if not isinstance(index, int) or not 0 <= index < len(pairs):
                continue
            if index not in scores:
                scores[index] = {**score_in_row(row), "seconds": seconds_per_pair}
        return scores

    def team(self, count: int) -> "list[EnvProcess]":
        """Return `count` processes of the same environment, this one first.

        The others start with their first call and end with this one; all share one budget of judge
        calls.
        """
        while len(self._team_members) < count - 1:
            member = EnvProcess(
                self.source,
                python=self.python,
                limits=self._limits,
                secrets=self.secrets,
                log=self.log,
                sandbox=self.sandbox,
                upstreams=self.upstreams,
            )
            member.judge_budget = self.judge_budget
            self._team_members.append(member)
        return [self, *self._team_members[: count - 1]]

    def perturb(self, task: TaskRow, kind: str, seed: int) -> TaskRow | None:
        """Return the task in other words, as the environment's own `perturb` rewords it.

        `kind` says what to change: "wording", "system", "tools" or "options"; `seed` selects one of
        the wordings. The result keeps the task's id and split. Returns None if the environment
        leaves rewording to the built-in rules, e.g. because it has no `perturb`. Raises EnvProblem
        if perturb() or the process fails.
        """
        with self._lock:
            try:
                if not self.describe().get("perturbs"):
                    return None
                body = {"task": task, "kind": kind, "seed": seed}
                row = self._call("perturb", body, self.limits.call_seconds)
            except Fault as fault:
                raise _as_problem(fault) from None
        if row is None:
            return None
        reworded = task_of_row(row, 0, "perturb()")
        return {**reworded.to_row(), "id": task["id"], "split": task["split"]}

    def start(self, task: Mapping[str, Any]) -> "Episode":
        """Begin an episode (one rollout) of `task` in a multi-turn environment.

        Raises EpisodeFailed if the environment or its process fails.
        """
        return Episode(self, task, next(self._episode_numbers))

    def close(self) -> None:
        """End the process, everything it started, and the other processes of its team. A later call
        would start a new process."""
        for member in self._team_members:
            member.close()
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """End the process at once, even while another thread waits for a call; that call then
        fails.

        `close` must still be called; without it the next call would start a new process.
        """
        pipe = self._pipe  # without the lock, which the waiting thread holds
        if pipe is not None:
            pipe.close_lifeline()
        for member in self._team_members:
            member.abandon()

    def __del__(self) -> None:
        """End the process if nobody has called `close`."""
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self.close()

    def _ask_for_score(self, op: str, body: Request) -> ScoreReply:
        """Send a request (`op` is score or finish) and return the score that answers it.

        A failure becomes a failed score. The score's `seconds` is how long the call took, including
        the start of the process if necessary.
        """
        began = time.monotonic()
        try:
            with self._lock:
                value = self._call(op, body, self.limits.call_seconds)
            score = checked_score(value)
        except Fault as fault:
            score = failure_of(fault)
        except EnvProblem as problem:
            score = failed_score(str(problem))
        score["seconds"] = time.monotonic() - began
        return score

    def _call(self, op: str, body: Request, seconds: float, rows: list[Any] | None = None) -> Any:
        """Send one request, starting the process if necessary, and return the value of its reply.

        `op` is the operation, such as "score", `body` its fields, `seconds` the time it may take.
        Rows that the process sends before the reply are appended to `rows`. Raises Fault if the
        call fails. If the process did not survive that, it is closed and the next call starts a new
        one.
        """
        self._ensure_started()
        assert self._pipe is not None  # _ensure_started raises otherwise
        with self._on_budget(self._pipe) as allowance:
            deadline = time.monotonic() + seconds
            try:
                return self._pipe.call(op, body | allowance, deadline, seconds, rows)
            except Fault as fault:
                if not fault.alive:
                    self._drop()
                raise

    @contextlib.contextmanager
    def _on_budget(self, pipe: Pipe) -> Iterator[Request]:
        """A context for one call: yields the part of the judge budget that the request may use, as
        a field for the request, and counts at its end what the call used."""
        budget = self.judge_budget
        if budget is None:
            yield {}
            return
        borrowed = budget.borrow()
        use_before = pipe.judge_use
        try:
            yield {"judge_left": borrowed}
        finally:
            budget.settle(borrowed, pipe.judge_use - use_before)

    def _ensure_started(self) -> None:
        """Start the process and load the environment, unless the process already runs.

        Raises Fault if that fails. A problem of the environment itself is remembered at once, any
        other failure after LOAD_ATTEMPTS (3) failed starts in a row; from then on every call raises
        it without another attempt.
        """
        if self._pipe is not None:
            return
        if self._problem is not None:
            raise Fault(str(self._problem), problem=self._problem)
        try:
            self._start_process()
        except EnvProblem as problem:
            self._drop()
            self._problem = problem
            raise Fault(str(problem), problem=problem) from None
        except (Fault, OSError) as error:  # OSError: no folder, pipe or process could be made
            fault = error if isinstance(error, Fault) else Fault(f"cannot be started: {error}")
            self._drop()
            self._failed_loads += 1
            # Remember the problem, or every further sample would wait for another failing start.
            if self._failed_loads >= LOAD_ATTEMPTS:
                self._problem = _as_problem(fault)
            raise fault from None

    def _start_process(self) -> None:
        """Start the process and wait until it has loaded the environment.

        Raises EnvProblem if the environment is faulty, Fault or OSError if the process is. The
        process may then be left half started, and the caller has to end it.
        """
        limits = self.limits
        # Models of the home that are not served yet are started now: a call has no time for that.
        for upstream in self.upstreams.values():
            upstream.address()
        self._pipe = Pipe(
            self.source,
            packages=packages_of(self.python),
            limits=limits,
            secrets=self.secrets,
            log=self.log,
            sandbox=self.sandbox,
            order=Relay(self.upstreams) if self.upstreams else None,
            reach=reach_of(self.source),
        )
        self._confinement, description = self._pipe.greet(limits.start_seconds)
        self._description = checked_description(description)
        self.generation += 1
        self._failed_loads = 0

    def _drop(self) -> None:
        """End the process if there is one. The caller holds the lock."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class Episode:
    """One rollout of a multi-turn environment. Made by `EnvProcess.start`.

    Args:
        process: the environment's process.
        task: the task as a stored row.
        number: the episode's number in that process.
    """

    def __init__(self, process: EnvProcess, task: Mapping[str, Any], number: int) -> None:
        """Begin the rollout of `task` (a stored row) under the `number` in `process`.

        Raises EpisodeFailed if the environment or its process fails.
        """
        self.process = process
        self.task = task
        self.number = number
        self._history: list[tuple[ChatMessage, Any]] = []  # (message sent, reply), to replay
        self._failed: EpisodeFailed | None = None  # why the episode has failed; None: it has not
        self._generation = -1  # the `generation` of the process that has this episode; -1: none yet
        with process._lock:
            self._begin()

    def step(self, message: Mapping[str, Any]) -> list[ChatMessage] | None:
        """Send one assistant message; return the environment's reply, or None if the rollout is
        over.

        Raises EpisodeFailed if the environment or its process fails; every later step then raises
        it again.
        """
        plain_message = Message.from_dict(message).to_dict()
        with self.process._lock:
            self._resume()  # the process may have been restarted since the last step
            reply = self._send("step", {"message": plain_message})
            self._history.append((plain_message, reply))
        return reply

    def score(self) -> ScoreReply:
        """Score the episode in its present state.

        A failed episode raises nothing: its score is a failed one, with the reason and 0 seconds.
        """
        if self._failed:
            failed = failed_score(str(self._failed), timed_out=self._failed.timed_out)
            return {**failed, "seconds": 0.0}
        with self.process._lock:
            try:
                self._resume()  # the process may have been restarted since the last step
            except EpisodeFailed as error:
                failed = failed_score(str(error), timed_out=error.timed_out)
                return {**failed, "seconds": 0.0}
            return self.process._ask_for_score("finish", {"episode": self.number})

    def close(self) -> None:
        """Make the process forget the episode's state.

        Does nothing if that process has ended, because the state is gone with it.
        """
        with self.process._lock:
            if self._state_is_in_process():
                with contextlib.suppress(Fault):  # the process has ended, and the state with it
                    body = {"episode": self.number}
                    self.process._call("drop", body, self.process.limits.call_seconds)

    def _state_is_in_process(self) -> bool:
        """Whether the running process has the episode's state."""
        return self._generation == self.process.generation and self.process._pipe is not None

    def _begin(self) -> None:
        """Start the episode in the present process. Raises EpisodeFailed if that fails."""
        self._send("start", {"task": self.task})
        # Read only now, because `_send` may have started a new process.
        self._generation = self.process.generation

    def _resume(self) -> None:
        """Replay the episode from its messages if the process that had its state has ended.

        Raises EpisodeFailed if the episode failed before, if the new process fails, or if the
        environment's replies differ from those that it gave the first time.
        """
        if self._failed:
            raise self._failed
        if self._state_is_in_process():
            return
        self._begin()
        for message, reply in self._history:
            if self._send("step", {"message": message}) != reply:
                self._failed = EpisodeFailed(
                    "the env process was restarted and the environment did not repeat itself"
                )
                raise self._failed

    def _send(self, op: str, body: Request) -> Any:
        """Send one request (`op` is start or step) about this episode.

        Returns the messages that answer a step; None for a start, or if the step ended the rollout.
        Any failure is kept in `_failed` and raised as EpisodeFailed.
        """
        try:
            seconds = self.process.limits.call_seconds
            value = self.process._call(op, body | {"episode": self.number}, seconds)
        except (Fault, EnvProblem) as fault:
            timed_out = isinstance(fault, Fault) and fault.timed_out
            self._failed = EpisodeFailed(str(fault), timed_out=timed_out)
            raise self._failed from None
        if op == "start" or value is None:
            return None
        try:
            return [Message.from_dict(message).to_dict() for message in value]
        except (TypeError, ValueError) as error:
            self._failed = EpisodeFailed(f"step() answered with no messages: {error}")
            raise self._failed from error


@functools.cache
def isolation_here(sandbox: Sandbox | None = None) -> Confinement:
    """Return the isolation that user code gets on this machine.

    To find out, a template environment is run; the result is cached for the life of this process.

    Args:
        sandbox: the isolation that must hold; None takes whatever works here.

    Raises EnvProblem: ENV_SANDBOX if this machine cannot give the required isolation, another code
    if no env process can be started.
    """
    folder = Path(__file__).resolve().parents[1] / "templates" / "single_turn"
    with EnvProcess(folder, sandbox=sandbox) as process:
        return process.confinement


def _as_problem(fault: Fault) -> EnvProblem:
    """Return the problem that the environment reported, or else ENV_IMPORT with the fault's
    text."""
    return fault.problem or EnvProblem(
        "ENV_IMPORT", str(fault), hint="Run the environment's code by itself to see why."
    )
