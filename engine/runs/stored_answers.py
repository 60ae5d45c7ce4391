"""Stored answers scored by an env process: one at a time, replayed where they have several turns.

A run has a sample of its last exam scored again by a process that has scored nothing else
(envs/audit/rescore.py). This happens in a thread while the worker goes on, so that nobody waits for
that process to start. The result is in `evals/rescored.json`;
engine/evidence/verdict/fresh_scores.py judges it.
"""

import contextlib
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
from envs.host.process import EnvProcess, EpisodeFailed, failed_score
from envs.json_types import ScoreReply

MOST = 24  # answers that are scored again
SECONDS = 3.0  # no further answer is begun after this time
PATIENCE = 10.0  # seconds that a run which is otherwise done waits for the result
# Why a stored answer was not scored.
SKIPPED = {
    "no_answer": "no answer is stored",
    "other_turns": "an answer of several turns cannot be scored by a single-turn environment",
    "unrepeatable": "the environment answers otherwise than when this was played",
}
Task = Mapping[str, Any]
Begin = Callable[[Path, str, Mapping[str, Task]], None]


def score_stored(
    process: EnvProcess, task: Task, row: Mapping[str, Any], *, multi: bool
) -> ScoreReply | str:
    """The score of one stored answer, or the key in SKIPPED that says why it cannot be scored.

    Args:
        row: the line of an evaluation or rollout that holds the answer.
        multi: the environment has several turns, so the conversation is played again.
    """
    messages = row.get("messages") or []
    turns = [message for message in messages if message.get("role") == "assistant"]
    if not turns and row.get("completion") is None:
        return "no_answer"
    if multi:
        turns = turns or [{"role": "assistant", "content": row["completion"]}]
        return replayed(process, task, messages or turns)
    if len(turns) > 1:
        return "other_turns"
    text = row.get("completion")
    return process.score(task, str(turns[0].get("content") if text is None else text))


def replayed(process: EnvProcess, task: Task, messages: Sequence[Mapping[str, Any]]) -> ScoreReply:
    """The score of a stored conversation, played again turn by turn.

    `messages` are those of model and environment after the prompt. The score is a failed one, with
    the reason as its error, where the episode fails or where the environment answers differently
    than it did then: that would be another conversation.
    """
    try:
        episode = process.start(task)
    except EpisodeFailed as error:
        return failed_score(str(error))
    try:
        position = 0
        while position < len(messages):
            reply = episode.step(messages[position])
            position += 1
            stored_reply = []
            while position < len(messages) and messages[position].get("role") != "assistant":
                stored_reply.append(dict(messages[position]))
                position += 1
            if position < len(messages) and reply != stored_reply:
                return failed_score(SKIPPED["unrepeatable"])
        return episode.score()
    except EpisodeFailed as error:
        return failed_score(str(error))
    finally:
        episode.close()


@contextlib.contextmanager
def beside(run: RunDir, record: EnvRecord, skipped: Callable[[str], None]) -> Iterator[Begin]:
    """Rescore answers in a thread while the caller goes on.

    Yields `begin(file, half, tasks)`, which queues a sample of the answers in `file`: those of one
    half of the held-out tasks, or of both where `half` is ""; `tasks` by id. Leaving the context
    waits up to `PATIENCE` seconds for the result. The env process is started at once, and ended at
    once where the caller fails or is told to stop.

    Args:
        run: where `evals/rescored.json` is written.
        record: the environment version that scores.
        skipped: called with the reason where nothing could be scored; the run goes on without.
    """
    fresh = _FreshProcess(record)
    thread = ThreadPoolExecutor(1, "rescoring")
    futures: list[Future[None]] = []
    try:
        thread.submit(fresh.warm_up)
        yield lambda path, half, tasks: futures.append(
            thread.submit(_rescore, run, record, fresh, path, half, tasks, skipped)
        )
        if wait(futures, PATIENCE).not_done:
            skipped(f"a fresh env process took longer than {PATIENCE:g} s")
    finally:
        fresh.abandon()
        thread.shutdown(cancel_futures=True)
        fresh.close()


class _FreshProcess:
    """Gives an env process that has scored nothing: every call ends the last one for a new one."""

    def __init__(self, record: EnvRecord) -> None:
        self.record = record
        self.abandoned = False
        self._process: EnvProcess | None = None
        self._handed_out = False

    def warm_up(self) -> None:
        """Start the process before it is needed. `__call__` meets the same errors again."""
        with contextlib.suppress(UserError, EnvProblem, OSError):
            self._start()

    def __call__(self) -> EnvProcess:
        """A started process that has scored nothing. Raises UserError, EnvProblem or OSError."""
        if self._handed_out:
            self.close()
        self._handed_out = True
        return self._start()

    def abandon(self) -> None:
        """End the process even while another thread uses it, and start no other."""
        self.abandoned = True
        if self._process is not None:
            self._process.abandon()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()

    def _start(self) -> EnvProcess:
        """The process, started and answering.

        Raises UserError or OSError, or EnvProblem: it does not start, or it was abandoned.
        """
        if self.abandoned:
            raise EnvProblem("ENV_IMPORT", "nobody waits for it any more")
        self._process = self._process or open_process(self.record)
        self._process.describe()
        return self._process


def _rescore(
    run: RunDir,
    record: EnvRecord,
    fresh: _FreshProcess,
    path: Path,
    half: str,
    tasks: Mapping[str, Task],
    skipped: Callable[[str], None],
) -> None:
    """Score a sample of the answers in `path` in a fresh process and write `evals/rescored.json`.

    Nothing is written where it was abandoned meanwhile. `skipped` gets the error where it fails.
    """
    started_at = time.monotonic()
    multi = record.kind == "multi"
    try:
        result = score_again(
            [_to_score(tasks[row["task"]], row, multi) for row in _sample(path, half, tasks)],
            fresh,
            lambda: fresh.abandoned or time.monotonic() - started_at > SECONDS,
        )
        if fresh.abandoned:
            return
        identity = {
            "env_id": record.env_id,
            "file": path.name,
            "half": half,
            "deterministic": record.audit.deterministic,
            "network": record.limits.network,
        }
        seconds = round(time.monotonic() - started_at, 3)
        write_json(run.rescored, identity | result | {"seconds": seconds})
    except Exception as problem:  # noqa: BLE001 - no error in this thread may harm the run
        skipped(f"{type(problem).__name__}: {problem}"[:300])


def _sample(path: Path, half: str, tasks: Mapping[str, Task]) -> list[Line]:
    """Up to `MOST` of the answers that were scored, of one half or (`half` = "") of both.

    The seed is the number of answers, so the same file gives the same sample.
    """
    rows = load_rows(path)
    rows = [
        row
        for row in rows
        if (not half or row.get("half") == half)
        and not row.get("error")
        and "reward" in row
        and row.get("task") in tasks
    ]
    return random.Random(len(rows)).sample(rows, min(MOST, len(rows)))


def _to_score(task: Task, row: Mapping[str, Any], multi: bool) -> Scored:
    """The stored answer with its reward, and how to score it again, as the audit takes it."""

    def score_anew(process: EnvProcess) -> ScoreReply | str:
        """The new score, or the key in SKIPPED that says why there is none."""
        score = score_stored(process, task, row, multi=multi)
        # `score_stored` returns this reason as a failed score; here it is a reason to skip.
        if isinstance(score, dict) and score["error"] == SKIPPED["unrepeatable"]:
            return "unrepeatable"
        return score

    identity = {"task": row["task"], "attempt": row.get("attempt", 0)}
    return Scored(identity, float(row["reward"]), score_anew)
