"""Scoring stored answers in a process of the environment; answers of several turns are replayed.

At the end of a run a sample of the answers of its last evaluation is scored again, in a process
that has scored nothing else (envs/audit/rescore.py). This happens in a thread beside the worker's
own work, so that nobody waits for the process to start. The result is in `evals/rescored.json`;
engine/evidence/verdict/fresh_scores.py judges it.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.environments.registry import EnvRecord, open_process
from engine.evidence.stats.results import load_rows
from engine.home.run_dir import RunDir
from engine.records.lines.line_record import Line
from envs.audit.rescore import Scored, score_again
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess, EpisodeFailed
from envs.host.replies import failed_score
from envs.json_types import ScoreReply

MOST = 24  # the most answers that are scored again
SECONDS = 3.0  # after this time no further answer is started
PATIENCE = 10.0  # seconds that a run waits for the result when its own work is done
_REASON_CHARS = 300  # a longer text of an error is cut to this many characters
# Why a stored answer was not scored.
SKIPPED = {
    "no_answer": "no answer is stored",
    "other_turns": "an answer of several turns cannot be scored by a single-turn environment",
    "unrepeatable": "the environment answers otherwise than when this was played",
}
Task = Mapping[str, Any]
Begin = Callable[[Path, str, Mapping[str, Task]], None]


def score_stored(
    process: EnvProcess, task: Task, row: Mapping[str, Any], *, is_multi_turn: bool
) -> ScoreReply | str:
    """Score one stored answer in the environment's process.

    Returns the score, or a key of `SKIPPED`, such as "no_answer", that says why the answer cannot
    be scored.

    Args:
        process: the process of the environment that scores.
        task: the task that was answered.
        row: the line of an evaluation or of rollouts that holds the answer.
        is_multi_turn: whether the environment has several turns; if so, the conversation is played
            again.
    """
    # A row holds the whole conversation in `messages`, or only the answer's text in `completion`.
    completion = row.get("completion")
    messages = row.get("messages") or []
    model_turns = [message for message in messages if message.get("role") == "assistant"]
    if not model_turns and completion is None:
        return "no_answer"
    if is_multi_turn:
        single_turn = {"role": "assistant", "content": completion}  # a row without messages
        return score_replayed(process, task, messages or [single_turn])
    if len(model_turns) > 1:  # the environment that asked had several turns, this one has one
        return "other_turns"
    if completion is None:  # the row has only `messages`
        completion = model_turns[0].get("content")
    return process.score(task, str(completion))


def score_replayed(
    process: EnvProcess, task: Task, messages: Sequence[Mapping[str, Any]]
) -> ScoreReply:
    """Play a stored conversation again, turn by turn, and score it.

    Returns a failed score, with the reason as its error, if the episode fails, or if the
    environment now replies differently. In that case the stored turns after the reply no longer
    fit.

    Args:
        process: the process of the environment that plays and scores.
        task: the task that was answered.
        messages: the messages of the model and the environment after the prompt.
    """
    try:
        episode = process.start(task)
    except EpisodeFailed as error:
        return failed_score(str(error))
    try:
        position = 0  # index of the model's next turn in `messages`
        while position < len(messages):
            reply = episode.step(messages[position])
            stored_reply = _reply_after(messages, position)
            position += 1 + len(stored_reply)  # moves past the model's turn and the reply
            # The reply to the last turn was never stored, so there is nothing to compare.
            if position < len(messages) and reply != stored_reply:
                return failed_score(SKIPPED["unrepeatable"])
        return episode.score()
    except EpisodeFailed as error:
        return failed_score(str(error))
    finally:
        episode.close()


def _reply_after(messages: Sequence[Mapping[str, Any]], position: int) -> list[Mapping[str, Any]]:
    """Return the environment's reply to the model's turn at `position`: all messages after that
    turn and before the model's next turn."""
    following = messages[position + 1 :]
    reply = itertools.takewhile(lambda message: message.get("role") != "assistant", following)
    return [dict(message) for message in reply]


@contextlib.contextmanager
def rescoring(run: RunDir, record: EnvRecord, on_skip: Callable[[str], None]) -> Iterator[Begin]:
    """Context manager: score stored answers again in a thread beside the caller's own work.

    The result shows whether a fresh process of the environment gives the same rewards.

    Yields a function `rescore_sample(file, half, tasks)` that queues a sample of the answers in
    `file`. `half` is the half of the held-out tasks whose answers are taken: "select" (the tasks
    that choose the checkpoint), "report" (the others), or "" for both. Leaving the block waits up
    to `PATIENCE` seconds for the result, `evals/rescored.json` of the run.

    Args:
        run: the run whose answers are scored.
        record: the environment version that scores.
        on_skip: called with the reason if answers could not be scored; no exception is raised then.
    """
    if record.kind == "command":
        on_skip("the environment's command earns its rewards, and nothing scores a stored answer")
        yield lambda *_: None  # a `rescore_sample` that does nothing
        return
    fresh_process = _FreshProcess(record)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rescoring")
    futures: list[Future[None]] = []

    def rescore_sample(file: Path, half: str, tasks: Mapping[str, Task]) -> None:
        """Queue the rescoring of a sample of the answers in `file` that belong to `half`.

        `tasks` maps task ids to tasks; answers to other tasks are left out.
        """
        futures.append(
            executor.submit(_rescore, run, record, fresh_process, file, half, tasks, on_skip)
        )

    try:
        executor.submit(fresh_process.warm_up)  # starts the process while there are no answers yet
        yield rescore_sample
        if wait(futures, PATIENCE).not_done:
            on_skip(f"a fresh env process took longer than {PATIENCE:g} s")
    finally:
        fresh_process.abandon()  # makes a rescoring that still runs end at once, without a result
        executor.shutdown(cancel_futures=True)
        fresh_process.close()


class _FreshProcess:
    """Provides env processes (processes that run the environment) that have scored nothing.

    Each call of an instance ends the process that the last call returned, and returns a new one.
    """

    def __init__(self, record: EnvRecord) -> None:
        """Start no process yet; `record` is the environment version that the processes load."""
        self.record = record
        self.is_abandoned = False
        self._process: EnvProcess | None = None
        self._has_process_in_use = False

    def warm_up(self) -> None:
        """Start the process before it is needed, to save time later.

        Errors are ignored here, because `__call__` tries again and raises them.
        """
        with contextlib.suppress(UserError, EnvProblem, OSError):
            self._start()

    def __call__(self) -> EnvProcess:
        """Return a started process that has scored nothing; end the one that was returned before.

        Raises UserError or OSError if no process can be started, EnvProblem if the environment does
        not load or `abandon` was called.
        """
        if self._has_process_in_use:
            self.close()
        self._has_process_in_use = True
        return self._start()

    def abandon(self) -> None:
        """End the process, even while another thread uses it, and refuse to start another one."""
        self.is_abandoned = True
        if self._process is not None:
            self._process.abandon()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()

    def _start(self) -> EnvProcess:
        """Start the process, unless it runs already, and return it once the environment is loaded.

        Raises UserError or OSError if no process can be started, EnvProblem if the environment does
        not load or `abandon` was called.
        """
        if self.is_abandoned:
            raise EnvProblem("ENV_IMPORT", "nobody waits for it any more")
        self._process = self._process or open_process(self.record)
        self._process.describe()  # starts the process, also again after `close`, and waits for it
        return self._process


def _rescore(
    run: RunDir,
    record: EnvRecord,
    fresh_process: _FreshProcess,
    file: Path,
    half: str,
    tasks: Mapping[str, Task],
    on_skip: Callable[[str], None],
) -> None:
    """Score a sample of the answers in `file` again, and write `evals/rescored.json`.

    Args:
        record: the environment version that scores.
        fresh_process: provides the env process; if it is abandoned meanwhile, nothing is written.
        file: the stored answers.
        half: the half of the held-out tasks whose answers are taken, "select" or "report"; "" for
            both.
        tasks: the tasks by id; answers to other tasks are left out.
        on_skip: called with the reason if the answers could not be scored.
    """
    started_at = time.monotonic()

    def is_time_up() -> bool:
        """Return whether no further answer is to be scored. `score_again` calls this before each
        answer."""
        return fresh_process.is_abandoned or time.monotonic() - started_at > SECONDS

    try:
        answers = _sampled_answers(file, half, tasks, is_multi_turn=record.kind == "multi")
        result = score_again(answers, fresh_process, is_time_up)
        if fresh_process.is_abandoned:
            return
        seconds = round(time.monotonic() - started_at, 3)
        write_json(
            run.rescored, _identity_fields(record, file, half) | result | {"seconds": seconds}
        )
    except Exception as problem:  # noqa: BLE001 - no error in this thread may harm the run
        on_skip(f"{type(problem).__name__}: {problem}"[:_REASON_CHARS])


def _identity_fields(record: EnvRecord, file: Path, half: str) -> dict[str, object]:
    """Return the fields of `evals/rescored.json` that say which answers were scored again, by which
    environment version, and what of it may make scores differ.

    `half` is "select" or "report" for the answers to one half of the held-out tasks, "" for both.
    """
    return {
        "env_id": record.env_id,
        "file": file.name,
        "half": half,
        "deterministic": record.audit.deterministic,
        "network": record.limits.network,
    }


def _sampled_answers(
    file: Path, half: str, tasks: Mapping[str, Task], *, is_multi_turn: bool
) -> list[Scored]:
    """Draw a random sample of the answers in `file` for `score_again`.

    `file`, `half` and `tasks` are the arguments of `_sample`. `is_multi_turn` says whether the
    environment has several turns.
    """
    return [
        _scored_answer(tasks[row["task"]], row, is_multi_turn=is_multi_turn)
        for row in _sample(file, half, tasks)
    ]


def _sample(file: Path, half: str, tasks: Mapping[str, Task]) -> list[Line]:
    """Draw at most `MOST` of the answers in `file` at random, without those whose scoring failed.

    Args:
        file: the stored answers.
        half: "select" for answers to the held-out tasks that choose the checkpoint, "report" for
            answers to the other held-out tasks, "" for both.
        tasks: the tasks by id; answers to other tasks are not drawn.
    """
    rows = load_rows(file)
    if half:
        rows = [row for row in rows if row.get("half") == half]
    eligible = [
        row for row in rows if row.get("task") in tasks and "reward" in row and not row.get("error")
    ]
    # The seed is the number of answers, so that the same file always gives the same sample.
    return random.Random(len(eligible)).sample(eligible, min(MOST, len(eligible)))


def _scored_answer(task: Task, row: Mapping[str, Any], *, is_multi_turn: bool) -> Scored:
    """Convert a stored answer (`row`, a line of an evaluation) to `task` to a `Scored`, the form
    that `score_again` takes. `is_multi_turn` says whether the environment has several turns.

    A `Scored` holds the task's id and the attempt, the stored reward, and a function that scores
    the answer again in a given process.
    """

    def score_anew(process: EnvProcess) -> ScoreReply | str:
        """Score the answer again in `process`. Return the new score, or a key of `SKIPPED` that
        says why there is none."""
        score = score_stored(process, task, row, is_multi_turn=is_multi_turn)
        # `score_stored` returns a failed score for a conversation that cannot be repeated. Here the
        # answer is skipped instead, so that it does not count as a changed reward.
        if isinstance(score, dict) and score["error"] == SKIPPED["unrepeatable"]:
            return "unrepeatable"
        return score

    identity = {"task": row["task"], "attempt": row.get("attempt", 0)}
    return Scored(identity, float(row["reward"]), score_anew)
