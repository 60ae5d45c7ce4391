"""Stored answers scored by an env process: one at a time, replayed where they have several turns.

A run has a sample of the answers of its last evaluation scored again by a process that has scored
nothing else (envs/audit/rescore.py). This happens in a thread while the worker goes on, so that
nobody waits for that process to start. The result is in `evals/rescored.json`;
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

MOST = 24  # answers that are scored again
SECONDS = 3.0  # no further answer is begun after this time
PATIENCE = 10.0  # seconds that a run which is otherwise done waits for the result
_REASON_CHARS = 300  # of the text of an error; a longer one is cut
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
    """Score one stored answer.

    Returns the score, or a key of `SKIPPED` that says why the answer cannot be scored.

    Args:
        process: the process of the environment that scores.
        task: the task that was answered.
        row: the line of an evaluation or of rollouts that holds the answer.
        is_multi_turn: whether the environment has several turns; the conversation is then played
            again.
    """
    # A row has the whole conversation in `messages`, or only the text of a single answer.
    completion = row.get("completion")
    messages = row.get("messages") or []
    model_turns = [message for message in messages if message.get("role") == "assistant"]
    if not model_turns and completion is None:
        return "no_answer"
    if is_multi_turn:
        single_turn = {"role": "assistant", "content": completion}  # a row without messages
        return score_replayed(process, task, messages or [single_turn])
    if len(model_turns) > 1:  # the environment had several turns then, and has one now
        return "other_turns"
    if completion is None:  # the row has only the conversation
        completion = model_turns[0].get("content")
    return process.score(task, str(completion))


def score_replayed(
    process: EnvProcess, task: Task, messages: Sequence[Mapping[str, Any]]
) -> ScoreReply:
    """Play a stored conversation again, turn by turn, and score it.

    Returns a failed score, with the reason as its error, if the episode fails, or if the
    environment now replies differently: the stored turns after that reply would not fit it.

    Args:
        messages: those of model and environment after the prompt.
    """
    try:
        episode = process.start(task)
    except EpisodeFailed as error:
        return failed_score(str(error))
    try:
        position = 0  # of the next turn of the model
        while position < len(messages):
            reply = episode.step(messages[position])
            stored_reply = _reply_after(messages, position)
            position += 1 + len(stored_reply)  # past the turn and the reply to it
            # At the last turn `position` is the end: the reply to it was not stored, so there is
            # nothing to compare.
            if position < len(messages) and reply != stored_reply:
                return failed_score(SKIPPED["unrepeatable"])
        return episode.score()
    except EpisodeFailed as error:
        return failed_score(str(error))
    finally:
        episode.close()


def _reply_after(messages: Sequence[Mapping[str, Any]], position: int) -> list[Mapping[str, Any]]:
    """Return what the environment replied to the model's turn at `position`.

    That is all messages after that turn and before the model's next one.
    """
    following = messages[position + 1 :]
    reply = itertools.takewhile(lambda message: message.get("role") != "assistant", following)
    return [dict(message) for message in reply]


@contextlib.contextmanager
def rescoring(run: RunDir, record: EnvRecord, on_skip: Callable[[str], None]) -> Iterator[Begin]:
    """Context manager: score stored answers again in a thread beside the caller's own work.

    It shows whether a fresh process of the environment gives the same rewards.

    Yields a function `begin(file, half, tasks)` that queues a sample of the answers in `file`, of
    one half of the held-out tasks ("select" or "report") or of both (""). Leaving the block waits
    up to `PATIENCE` seconds for the result, `evals/rescored.json` of the run.

    Args:
        run: the run whose answers are scored.
        record: the environment version that scores.
        on_skip: called with the reason where answers could not be scored; that is no error.
    """
    if record.kind == "command":
        on_skip("the environment's command earns its rewards, and nothing scores a stored answer")
        yield lambda *_: None
        return
    fresh = _FreshProcess(record)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rescoring")
    futures: list[Future[None]] = []

    def begin(file: Path, half: str, tasks: Mapping[str, Task]) -> None:
        """Queue the rescoring of a sample of the answers in `file` to `tasks` of one `half`."""
        futures.append(executor.submit(_rescore, run, record, fresh, file, half, tasks, on_skip))

    try:
        executor.submit(fresh.warm_up)  # while there are no answers yet
        yield begin
        if wait(futures, PATIENCE).not_done:
            on_skip(f"a fresh env process took longer than {PATIENCE:g} s")
    finally:
        fresh.abandon()  # a rescoring that still runs ends at once, without writing its result
        executor.shutdown(cancel_futures=True)
        fresh.close()


class _FreshProcess:
    """Hands out env processes that have scored nothing.

    Each call ends the process that was handed out before and returns a new one.
    """

    def __init__(self, record: EnvRecord) -> None:
        """Start no process yet; `record` is the environment version that they will load."""
        self.record = record
        self.is_abandoned = False
        self._process: EnvProcess | None = None
        self._has_process_in_use = False

    def warm_up(self) -> None:
        """Start the process before it is needed.

        Errors are ignored here: `__call__` tries again and raises them.
        """
        with contextlib.suppress(UserError, EnvProblem, OSError):
            self._start()

    def __call__(self) -> EnvProcess:
        """Return a started process that has scored nothing; end the one that was returned before.

        Raises UserError, EnvProblem or OSError.
        """
        if self._has_process_in_use:
            self.close()
        self._has_process_in_use = True
        return self._start()

    def abandon(self) -> None:
        """End the process, even while another thread uses it, and let no other be started."""
        self.is_abandoned = True
        if self._process is not None:
            self._process.abandon()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()

    def _start(self) -> EnvProcess:
        """Start the process, unless it runs already, and return it once it answers.

        Raises UserError or OSError; EnvProblem where it does not start or was abandoned.
        """
        if self.is_abandoned:
            raise EnvProblem("ENV_IMPORT", "nobody waits for it any more")
        self._process = self._process or open_process(self.record)
        self._process.describe()  # starts it, also anew after `close`
        return self._process


def _rescore(
    run: RunDir,
    record: EnvRecord,
    fresh: _FreshProcess,
    file: Path,
    half: str,
    tasks: Mapping[str, Task],
    on_skip: Callable[[str], None],
) -> None:
    """Score a sample of the answers in `file` again, and write `evals/rescored.json`.

    Args:
        record: the environment version that scores.
        fresh: gives the env process; if it is abandoned meanwhile, nothing is written.
        file: the stored answers.
        half: the half of the held-out tasks whose answers count, "select" or "report"; "" for both.
        tasks: the tasks by id; answers at other tasks do not count.
        on_skip: called with the reason where the answers could not be scored.
    """
    started_at = time.monotonic()

    def is_over() -> bool:
        """Whether no further answer is to be scored; asked before each of them."""
        return fresh.is_abandoned or time.monotonic() - started_at > SECONDS

    try:
        answers = _sampled_answers(file, half, tasks, is_multi_turn=record.kind == "multi")
        result = score_again(answers, fresh, is_over)
        if fresh.is_abandoned:
            return
        seconds = round(time.monotonic() - started_at, 3)
        write_json(run.rescored, _identity(record, file, half) | result | {"seconds": seconds})
    except Exception as problem:  # noqa: BLE001 - no error in this thread may harm the run
        on_skip(f"{type(problem).__name__}: {problem}"[:_REASON_CHARS])


def _identity(record: EnvRecord, file: Path, half: str) -> dict[str, object]:
    """Describe which answers were scored again, and by which environment version.

    The fields are a part of `evals/rescored.json`.
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
    """Draw a random sample of the answers in `file`, in the form that `score_again` takes.

    The arguments are those of `_sample`; `is_multi_turn` says whether the environment has several
    turns.
    """
    return [
        _scored_answer(tasks[row["task"]], row, is_multi_turn) for row in _sample(file, half, tasks)
    ]


def _sample(file: Path, half: str, tasks: Mapping[str, Task]) -> list[Line]:
    """Draw at most `MOST` of the answers in `file` at random, without those whose scoring failed.

    Args:
        file: the stored answers.
        half: "select" for answers at the held-out tasks that choose the checkpoint, "report" for
            those at the other held-out tasks, "" for both.
        tasks: the tasks by id; answers at other tasks are not drawn.
    """
    rows = load_rows(file)
    if half:
        rows = [row for row in rows if row.get("half") == half]
    eligible = [
        row for row in rows if row.get("task") in tasks and "reward" in row and not row.get("error")
    ]
    # Seeded by their number: the same file always gives the same sample.
    return random.Random(len(eligible)).sample(eligible, min(MOST, len(eligible)))


def _scored_answer(task: Task, row: Mapping[str, Any], is_multi_turn: bool) -> Scored:
    """Put a stored answer into the form that `score_again` takes.

    That form has its task and attempt, its stored reward, and a function that scores it again in a
    given process.
    """

    def score_anew(process: EnvProcess) -> ScoreReply | str:
        """Return the new score, or a key of `SKIPPED` that says why there is none."""
        score = score_stored(process, task, row, is_multi_turn=is_multi_turn)
        # A conversation that cannot be repeated comes as a failed score. Here it is skipped, so
        # that it does not count as a reward that changed.
        if isinstance(score, dict) and score["error"] == SKIPPED["unrepeatable"]:
            return "unrepeatable"
        return score

    identity = {"task": row["task"], "attempt": row.get("attempt", 0)}
    return Scored(identity, float(row["reward"]), score_anew)
