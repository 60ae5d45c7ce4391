"""Stored answers scored by an env process: one at a time, replayed where they have several turns.

A run has a sample of its last exam scored again by a process that has scored nothing else
(envs/audit/rescore.py), beside what its worker is doing: nobody waits for that process to start.
What came of it stands in `evals/rescored.json`; engine/evidence/verdict/fresh_scores.py judges it.
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

MOST = 24  # answers
SECONDS = 3.0  # after which the rest is left; one call more may be under way
PATIENCE = 10.0  # seconds a run that is otherwise done waits for it
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
    """The score of the answer in a row of an evaluation, or why there is none (see SKIPPED)."""
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
    """The score of a stored conversation, played again.

    An environment that answers otherwise than it did makes another conversation of it: that is an
    error of the sample and not a score.
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
            heard = []
            while position < len(messages) and messages[position].get("role") != "assistant":
                heard.append(dict(messages[position]))
                position += 1
            if position < len(messages) and reply != heard:
                return failed_score(SKIPPED["unrepeatable"])
        return episode.score()
    except EpisodeFailed as error:
        return failed_score(str(error))
    finally:
        episode.close()


@contextlib.contextmanager
def beside(run: RunDir, record: EnvRecord, skipped: Callable[[str], None]) -> Iterator[Begin]:
    """Gives `begin(file, half, tasks)`: rescore answers of that file ("" for both halves), their
    tasks by id, while the caller goes on; leaving waits for it, `PATIENCE` at most. A process is
    started at once, and ended at once when the caller fails or is told to stop.

    Args:
        skipped: is told why when nothing could be scored: that costs the run nothing.
    """
    fresh = _Fresh(record)
    thread = ThreadPoolExecutor(1, "rescoring")
    given: list[Future[None]] = []
    try:
        thread.submit(fresh.warm_up)
        yield lambda path, half, tasks: given.append(
            thread.submit(_rescore, run, record, fresh, path, half, tasks, skipped)
        )
        if wait(given, PATIENCE).not_done:
            skipped(f"a fresh env process took longer than {PATIENCE:g} s")
    finally:
        fresh.abandon()
        thread.shutdown(cancel_futures=True)
        fresh.close()


class _Fresh:
    """A process that has scored nothing; a new one whenever it is asked for."""

    def __init__(self, record: EnvRecord) -> None:
        self.record = record
        self.abandoned = False
        self._process: EnvProcess | None = None
        self._given = False

    def warm_up(self) -> None:
        """Start it before it is needed; whoever asks for it is told why that fails."""
        with contextlib.suppress(UserError, EnvProblem, OSError):
            self._start()

    def __call__(self) -> EnvProcess:
        if self._given:
            self.close()
        self._given = True
        return self._start()

    def abandon(self) -> None:
        """End it, whatever another thread asks of it just now, and start no other."""
        self.abandoned = True
        if self._process is not None:
            self._process.abandon()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _start(self) -> EnvProcess:
        if self.abandoned:
            raise EnvProblem("ENV_IMPORT", "nobody waits for it any more")
        self._process = self._process or open_process(self.record)
        self._process.describe()
        return self._process


def _rescore(
    run: RunDir,
    record: EnvRecord,
    fresh: _Fresh,
    path: Path,
    half: str,
    tasks: Mapping[str, Task],
    skipped: Callable[[str], None],
) -> None:
    """Score a sample of the answers in `path` in a fresh process, and write what came of it."""
    began = time.monotonic()
    multi = record.kind == "multi"
    try:
        result = score_again(
            [_scored(tasks[row["task"]], row, multi) for row in _sample(path, half, tasks)],
            fresh,
            lambda: fresh.abandoned or time.monotonic() - began > SECONDS,
        )
        if fresh.abandoned:
            return
        about = {
            "env_id": record.env_id,
            "file": path.name,
            "half": half,
            "deterministic": record.audit.deterministic,
            "network": record.limits.network,
        }
        seconds = round(time.monotonic() - began, 3)
        write_json(run.rescored, about | result | {"seconds": seconds})
    except Exception as problem:  # noqa: BLE001 - whatever goes wrong beside a run, the run is whole
        skipped(f"{type(problem).__name__}: {problem}"[:300])


def _sample(path: Path, half: str, tasks: Mapping[str, Task]) -> list[Line]:
    """Up to `MOST` answers that were scored, the same ones for the same file."""
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


def _scored(task: Task, row: Mapping[str, Any], multi: bool) -> Scored:
    def again(process: EnvProcess) -> ScoreReply | str:
        score = score_stored(process, task, row, multi=multi)
        if isinstance(score, dict) and score["error"] == SKIPPED["unrepeatable"]:
            return "unrepeatable"
        return score

    about = {"task": row["task"], "attempt": row.get("attempt", 0)}
    return Scored(about, float(row["reward"]), again)
