"""The tables of runs, of the changes of their states, and of the requests that queued them."""

import difflib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Hint
from engine.home.rows import HOLDS_DEVICE, OPEN, TERMINAL, TRANSITIONS, NewRun, RunRow
from engine.home.store_connection import (
    Connection,
    assignments,
    placeholders,
    shared_too_little,
)
from engine.home.team.fair_queue import LEAST_H, LOOK_BACK_S, faded_hours, fair_order
from engine.home.team.tables import seen_runs

_RUN_COLUMNS = tuple(item.name for item in fields(RunRow))
_HINT = _RUN_COLUMNS.index("hint")
# Columns that may change in the life of a run.
_SETTABLE = frozenset(_RUN_COLUMNS) - {"rowid", "run_id", "state", "created", "kind", "algorithm"}
_LISTED_RUNS = 6  # the most runs of a plan that an error lists
RESUMABLE = ("failed", "cancelled", "interrupted")
# Columns that a new attempt clears, because they are about the end of the last attempt.
_NEW_ATTEMPT = {
    "ended": None,
    "continuations": 0,
    "reason_kind": "",
    "reason": "",
    "hint": "",
    "verdict": "",
}
# A function that makes a run of a plan. It takes the plan's id and the ids of the runs before, and
# returns what the row stores, and a function that writes the run's folder when given the run's id.
RunMaker = Callable[[str, list[str]], tuple[NewRun, Callable[[str], None]]]
# Fields that are copied from a NewRun to the column of the same name.
_COPIED = tuple(item.name for item in fields(NewRun) if item.name not in ("name", "body"))


def _not_resumable(row: RunRow) -> UserError:
    """Make the error for resuming a run that is done or has not ended."""
    if row.state == "done":
        hint = "Submit a new run with model=<this run> to train its result further."
    else:
        hint = "Wait for it, or cancel it first."
    return UserError(
        "RUN_STATE",
        f"run {row.run_id} is {row.state}; only a failed, cancelled or interrupted run "
        "can be resumed",
        hint=hint,
    )


class RunTable(Connection):
    """The table of runs, with their states, devices and requests."""

    def insert_run(self, new: NewRun, prepare: Callable[[str], None] | None = None) -> RunRow:
        """Queue a run under the next free id, such as "sums-grpo-3", and return its row. If
        `new.request_id` was used before, nothing is queued, and the first run's row is returned.

        Args:
            prepare: called with the run's id before the row is inserted, to write the run's folder.
                If it raises, no row is inserted and the folder is removed.

        Raises UserError REQUEST_CONFLICT if the request_id was used with another body.
        """
        with self._folders_as_rows() as folders, self._write():
            earlier_run = self._run_of_request(new.request_id, new.body)
            if earlier_run is not None:
                return earlier_run
            run_id, number = self._next_free_id(self._name_of_owner(new.name))
            folders.append(run_id)
            if prepare is not None:
                prepare(run_id)
            self._insert_queued(new, run_id, number)
            self._remember_request(new.request_id, new.body, run_id)
            self._log_state(run_id, old="", new="queued")
            return self._run(run_id)

    def insert_plan(
        self, name: str, request_id: str, body: Mapping[str, Any], makers: Sequence[RunMaker]
    ) -> list[RunRow]:
        """Queue the runs of a plan, all or none, and return their rows. If the `request_id` was
        used before, nothing is queued, and the rows of the first plan are returned.

        Args:
            name: the part of the plan's id before "-plan-" and its number.
            makers: a `RunMaker` for each run, in the order of the runs.

        Raises UserError REQUEST_CONFLICT if the request_id was used with another body.
        """
        with self._folders_as_rows() as folders, self._write():
            earlier_run = self._run_of_request(request_id, body)
            if earlier_run is not None:
                return self.plan_runs(earlier_run.plan)
            plan_id = self._next_plan_id(self._name_of_owner(name))
            run_ids: list[str] = []  # the runs that are queued so far
            for make in makers:
                new_run, write_folder = make(plan_id, run_ids)
                run_id, number = self._next_free_id(self._name_of_owner(new_run.name))
                folders.append(run_id)
                write_folder(run_id)
                self._insert_queued(new_run, run_id, number)
                self._log_state(run_id, old="", new="queued")
                run_ids.append(run_id)
            self._remember_request(request_id, body, run_ids[0])
            return self.plan_runs(plan_id)

    @contextmanager
    def _folders_as_rows(self) -> Iterator[list[str]]:
        """Context manager around a transaction: if it fails, remove folders of runs without a row.

        Yields a list, to which the block adds the id of each run whose folder it writes."""
        run_ids: list[str] = []
        try:
            yield run_ids
        except BaseException:
            # While a folder exists, no other process takes its id: see `_next_free_id`.
            for run_id in run_ids:
                with suppress(UserError):  # if the database cannot be read, the folder stays
                    if not self._rows("WHERE run_id = ?", (run_id,)):
                        shutil.rmtree(self.home.run(run_id).path, ignore_errors=True)
            raise

    def plan_runs(self, plan_id: str) -> list[RunRow]:
        """Return the runs of a plan, in the order of its steps; [] if there is no such plan."""
        return self._rows("WHERE plan = ? AND plan != '' ORDER BY rowid", (plan_id,))

    def requested_run(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """Return the run of an earlier submit or resume with this request_id; None if it was never
        used, or is "".

        Raises UserError REQUEST_CONFLICT if the request_id was used with another body.
        """
        return self._run_of_request(request_id, body)

    def get_run(self, run_id: str) -> RunRow:
        """Return the run whose id is `run_id`, or else the only run whose id begins with `run_id`.

        Raises UserError RUN_NOT_FOUND if no run that the viewer sees, or more than one, matches;
        the hint names similar ids. Raises FORBIDDEN if the viewer may only read about the run.
        """
        matches = self._rows("WHERE run_id = ?", (run_id,))
        if not matches and run_id:
            # Not by LIKE, which treats "_" and "%" in an id as wildcards.
            matches = self._rows("WHERE substr(run_id, 1, ?) = ?", (len(run_id), run_id))
        if len(matches) == 1:
            return matches[0]
        source, values = self._readable(seen_runs)
        if self._rows_of(source, values, "WHERE run_id = ?", (run_id,)):
            raise shared_too_little(run_id, "run_id")
        raise self._not_found_error(run_id, [row.run_id for row in matches])

    def find_run(self, run_id: str) -> RunRow | None:
        """Return the run with exactly this id; None if there is none."""
        rows = self._rows("WHERE run_id = ?", (run_id,))
        return rows[0] if rows else None

    def sees_run(self, run_id: str) -> bool:
        """Return whether there is a run with exactly this id that the viewer sees. Raises UserError
        FORBIDDEN if there is one about which the viewer may only read."""
        try:
            return self.get_run(run_id).run_id == run_id
        except UserError as error:
            if error.code == "FORBIDDEN":
                raise
            return False

    def list_runs(
        self,
        limit: int = 20,
        before_rowid: int | None = None,
        states: Sequence[str] | None = None,
        kind: str | None = None,
    ) -> list[RunRow]:
        """Return at most `limit` runs, the newest first.

        Args:
            before_rowid: only runs with a smaller row id, which are older; None for all.
            states: only runs in one of these states; None for all.
            kind: only runs of this kind (train, evaluate or probe); None for all.
        """
        conditions = ["1"]  # always true, so that WHERE is never empty
        values: list[Any] = []
        if before_rowid is not None:
            conditions.append("rowid < ?")
            values.append(before_rowid)
        if states is not None:
            conditions.append(f"state IN ({placeholders(states)})")
            values.extend(states)
        if kind is not None:
            conditions.append("kind = ?")
            values.append(kind)
        clauses = f"WHERE {' AND '.join(conditions)} ORDER BY rowid DESC LIMIT ?"
        return self._rows(clauses, (*values, limit))

    def run_marks(self, kind: str) -> list[tuple[str, str, int, float | None]]:
        """Return (run_id, state, attempt, ended) of every run of a kind, the newest first. From two
        such lists a caller can see which runs have changed; thousands are read quickly."""
        source, values = self._seen_runs
        return self._read(
            f"SELECT run_id, state, attempt, ended FROM {source} WHERE kind = ? "
            "ORDER BY rowid DESC",
            (*values, kind),
        )

    def env_marks(self) -> dict[str, tuple[Any, ...]]:
        """Return a fingerprint of the runs of each environment version: env_id -> values that
        change whenever a run of that version is added, ends or is resumed.

        The values are: number of runs, number of runs that have not ended, highest row id, sum of
        attempts, latest end.
        """
        rows = self._read(
            f"SELECT env_id, count(*), sum(state NOT IN ({placeholders(TERMINAL)})), "
            "max(rowid), sum(attempt), max(ended) FROM runs GROUP BY env_id",
            TERMINAL,
        )
        return {env_id: tuple(marks) for env_id, *marks in rows}

    def queue(self) -> list[RunRow]:
        """Return the queued runs that the viewer sees, in the order in which they will start."""
        order = self._queue_of_all()
        source, _ = self._seen_runs
        if source == "runs":  # the viewer sees the whole table
            return order
        seen_ids = {row.run_id for row in self._rows("WHERE state = 'queued'", ())}
        return [row for row in order if row.run_id in seen_ids]

    def _queue_of_all(self) -> list[RunRow]:
        """Return all queued runs, whoever owns them, in the order in which they will start."""
        clauses = "WHERE state = 'queued' ORDER BY queued, rowid"
        queued = self._rows_of("runs", (), clauses, ())
        # Runs of one owner and priority start in the order in which they were queued.
        keeps_order = len({(row.owner, row.priority) for row in queued}) < 2
        return queued if keeps_order else fair_order(queued, self._hours_used_lately())

    def _hours_used_lately(self) -> dict[str, float]:
        """Return owner -> device hours of its runs under way and of those that ended in the last
        days; the longer ago a run ended, the fewer of its hours count."""
        now = time.time()
        used: dict[str, float] = {}
        rows = self._read(
            "SELECT owner, spent_hours, estimated_hours, started, ended, gpus, state FROM runs "
            f"WHERE ended > ? OR state IN ({placeholders(HOLDS_DEVICE)})",
            (now - LOOK_BACK_S, *HOLDS_DEVICE),
        )
        for owner, hours, estimated_hours, started, ended, gpus, state in rows:
            if state in HOLDS_DEVICE:  # what the run will take counts at once
                hours_so_far = max(0.0, now - (started or now)) / 3600 * gpus
                hours = max(hours, hours_so_far, estimated_hours, LEAST_H)
            used[owner] = used.get(owner, 0.0) + faded_hours(hours, now - (ended or now))
        return used

    def queue_position(self, run_id: str) -> int:
        """Return the place of a run in the queue: 1 for the run that starts next, 0 for a run that
        is not queued."""
        ids = [row.run_id for row in self._queue_of_all()]
        return ids.index(run_id) + 1 if run_id in ids else 0

    def set_state(self, run_id: str, to: str, *, only_from: set[str], **values: Any) -> bool:
        """Set the state of a run to `to`, and the fields in `values`, if its state is one of
        `only_from`. Returns whether this call made the change.

        Raises ValueError, which is a bug of the caller, if a field may not be changed, or if
        TRANSITIONS does not allow the change of state.
        """
        for state in only_from:
            if to not in TRANSITIONS[state]:
                raise ValueError(f"no transition from {state} to {to}")
        columns = _columns(values)
        unknown = set(columns) - _SETTABLE
        if unknown:
            raise ValueError(f"no such run fields: {sorted(unknown)}")
        with self._write():
            cursor = self._db.execute("SELECT state FROM runs WHERE run_id = ?", (run_id,))
            present_state = (cursor.fetchone() or [""])[0]  # "" if there is no such run
            if present_state not in only_from:
                return False
            self._change_state(run_id, old=present_state, new=to, values=columns)
            return True

    def update_run(self, run_id: str, *, only_in: set[str], **values: Any) -> bool:
        """Set the fields in `values` of a run if its state is one of `only_in`; the state does not
        change. Returns whether the fields were set. Raises ValueError, which is a bug of the
        caller, if a field may not be changed."""
        columns = _columns(values)
        unknown = set(columns) - _SETTABLE
        if unknown:
            raise ValueError(f"no such run fields: {sorted(unknown)}")
        with self._write():
            cursor = self._db.execute(
                f"UPDATE runs SET {assignments(columns)} "
                f"WHERE run_id = ? AND state IN ({placeholders(only_in)})",
                (*columns.values(), run_id, *only_in),
            )
            return cursor.rowcount == 1

    def resume_run(
        self,
        run_id: str,
        *,
        max_gpu_hours: float,
        request_id: str,
        body: Mapping[str, Any],
        check: Callable[[], None] | None = None,
    ) -> RunRow:
        """Queue a new attempt of a run that failed, was cancelled or was interrupted, and return
        its row. If the request_id was used before, nothing is queued, and the run of that request
        is returned.

        Args:
            max_gpu_hours: the cap on device hours of the new attempt.
            body: the arguments that the request_id identifies.
            check: called inside the transaction; if it raises, nothing changes.

        Raises UserError RUN_STATE if the run is in another state, REQUEST_CONFLICT if the
        request_id was used with another body.
        """
        with self._write():
            earlier_run = self._run_of_request(request_id, body)
            if earlier_run is not None:
                return earlier_run
            if check is not None:
                check()
            row = self._run(run_id)
            if row.state not in RESUMABLE:
                raise _not_resumable(row)
            self._queue_again(row, max_gpu_hours)
            self._remember_request(request_id, body, run_id)
            return self._run(run_id)

    def resume_plan(
        self,
        plan_id: str,
        *,
        max_gpu_hours: float,
        request_id: str,
        body: Mapping[str, Any],
        check: Callable[[RunRow], None] | None = None,
    ) -> list[RunRow]:
        """Queue a new attempt of every unfinished run of a plan, and return the rows of all its
        runs. If the request_id was used before, nothing is queued.

        `check` is called inside the transaction with each run that is to be queued; if it raises,
        nothing changes. Raises UserError RUN_STATE if no run of the plan can be resumed,
        REQUEST_CONFLICT if the request_id was used with another body.
        """
        with self._write():
            if self._run_of_request(request_id, body) is None:
                rows = self.plan_runs(plan_id)
                ended = [row for row in rows if row.state in RESUMABLE]
                if not ended:
                    raise _not_resumable(rows[-1])
                for row in ended:
                    if check is not None:
                        check(row)
                    self._queue_again(row, max_gpu_hours)
                self._remember_request(request_id, body, rows[0].run_id)
            return self.plan_runs(plan_id)

    def _queue_again(self, row: RunRow, max_gpu_hours: float) -> None:
        """Queue a new attempt of a run that has ended. `max_gpu_hours` becomes the cap on device
        hours of the run, and of all other runs of its plan."""
        changes = {
            "attempt": row.attempt + 1,
            "queued": self._queue_time(time.time()),
            "max_gpu_hours": max_gpu_hours,
            "spent_before": row.spent_hours,
            **_NEW_ATTEMPT,
        }
        self._change_state(row.run_id, row.state, "queued", changes)
        self._db.execute(
            "UPDATE runs SET max_gpu_hours = ?, spent_before = spent_hours "
            "WHERE plan = ? AND plan != ''",
            (max_gpu_hours, row.plan),
        )

    def act_undisturbed(self, run_id: str, act: Callable[[RunRow], None]) -> None:
        """Call `act` with the run's row inside a transaction, so that no other process can change
        any row meanwhile."""
        with self._write():
            act(self._run(run_id))

    def history(self, run_id: str) -> list[tuple[float, str, str]]:
        """Return every change of a run's state, the oldest first: (unix seconds, old state, new
        state). The old state of the first change is ""."""
        return self._read(
            "SELECT at, came_from, went_to FROM history WHERE run_id = ? ORDER BY rowid", (run_id,)
        )

    def spent_hours(self, excluding: str = "") -> float:
        """Return the device hours that all runs of this home have spent, except the run with the id
        `excluding` ("" for no exception)."""
        rows = self._read(
            "SELECT coalesce(sum(spent_hours), 0) FROM runs WHERE run_id != ?", (excluding,)
        )
        ((total,),) = rows
        return float(total)

    def owned_runs(self, owner: str = "", project: str = "") -> list[RunRow]:
        """Return all runs of an owner, or else of a project, the oldest first."""
        column, value = ("project", project) if project else ("owner", owner)
        return self._rows_of("runs", (), f"WHERE {column} = ? ORDER BY rowid", (value,))

    def committed_hours(self) -> float:
        """Return the device hours that all runs have spent and open runs are still expected to
        spend: their estimates minus the hours since their last submit or resume."""
        rows = self._rows_of("runs", (), f"WHERE state IN ({placeholders(OPEN)})", OPEN)
        total = self.spent_hours()
        expected = 0.0
        for row in rows:
            spent_since_submit = row.spent_hours - row.spent_before
            expected += max(0.0, row.estimated_hours - spent_since_submit)
        return total + expected

    def _rows(self, clauses: str, values: Sequence[Any]) -> list[RunRow]:
        """Return the runs which the viewer sees that a SELECT with these SQL `clauses` finds;
        `values` replace its question marks."""
        return self._rows_of(*self._seen_runs, clauses, values)

    def _rows_of(
        self, source: str, source_values: Sequence[Any], clauses: str, values: Sequence[Any]
    ) -> list[RunRow]:
        """Return the runs that a SELECT of `source` (what stands after FROM) with these SQL
        `clauses` finds. `source_values` and `values` replace the question marks of each."""
        columns = ", ".join(_RUN_COLUMNS)
        rows = self._read(f"SELECT {columns} FROM {source} {clauses}", (*source_values, *values))
        return [_run_row(row) for row in rows]

    def _run(self, run_id: str) -> RunRow:
        """Return the run with exactly this id, which must exist, whoever owns it."""
        return self._rows_of("runs", (), "WHERE run_id = ?", (run_id,))[0]

    def _insert_queued(self, new: NewRun, run_id: str, number: int) -> None:
        """Insert the row of a run that is queued now. `number` is the number in its id."""
        now = time.time()
        viewer = self.home.viewer
        values = {
            "run_id": run_id,
            "name": run_id.rpartition("-")[0],
            "number": number,
            "state": "queued",
            "created": now,
            "queued": self._queue_time(now),
            "attempt": 1,
            **{name: getattr(new, name) for name in _COPIED},
            "owner": self._owner,
            "project": viewer.project if viewer else "",
            "priority": viewer.priority if viewer else "normal",
        }
        self._db.execute(
            f"INSERT INTO runs ({', '.join(values)}) VALUES ({placeholders(values)})",
            tuple(values.values()),
        )

    def _next_free_id(self, name: str) -> tuple[str, int]:
        """Return the next free id of a run called `name`, and the number in it: ("sums-grpo-4", 4)
        for "sums-grpo"."""
        cursor = self._db.execute("SELECT max(number) FROM runs WHERE name = ?", (name,))
        (last_number,) = cursor.fetchone()  # None if there is no such run
        number = (last_number or 0) + 1
        # A folder without a row was left by a submit that died. Its id is not used again.
        while self.home.run(f"{name}-{number}").path.exists():
            number += 1
        return f"{name}-{number}", number

    def _next_plan_id(self, name: str) -> str:
        """Return the next free id of a plan, such as "sums-plan-2" for the name "sums"."""
        rows = self._read("SELECT DISTINCT plan FROM runs WHERE plan != ''", ())
        # "sums-plan-1" -> ("sums", "-plan-", "1")
        parts = [plan_id.rpartition("-plan-") for (plan_id,) in rows]
        numbers = [int(number) for stem, _, number in parts if stem == name]
        return f"{name}-plan-{max(numbers, default=0) + 1}"

    def _queue_time(self, now: float) -> float:
        """Return the time to store for a run that is queued now: `now`, or slightly later.

        The time is later than that of every other run, even if the clock was set back, so that the
        queue keeps its order."""
        cursor = self._db.execute("SELECT coalesce(max(queued), 0) FROM runs")
        (last_queued,) = cursor.fetchone()
        return max(now, last_queued + 1e-6)  # at least a microsecond later than the last one

    def _change_state(self, run_id: str, old: str, new: str, values: Mapping[str, Any]) -> None:
        """Set the state of a run to `new` and the columns in `values`, and add the change to its
        history. `old` is the state before."""
        changes = {"state": new, **values}
        self._db.execute(
            f"UPDATE runs SET {assignments(changes)} WHERE run_id = ?", (*changes.values(), run_id)
        )
        self._log_state(run_id, old, new)

    def _log_state(self, run_id: str, old: str, new: str) -> None:
        """Add a change of state to the run's history; `old` is "" for a new run."""
        self._db.execute(
            "INSERT INTO history (run_id, at, came_from, went_to) VALUES (?, ?, ?, ?)",
            (run_id, time.time(), old, new),
        )

    def _run_of_request(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """Return the run of an earlier request with this id; None if it was never used, or is "".

        Raises UserError REQUEST_CONFLICT if the id was used with another body.
        """
        if not request_id:
            return None
        rows = self._read(
            "SELECT run_id, body_hash FROM requests WHERE request_id = ?", (request_id,)
        )
        if not rows:
            return None
        run_id, body_hash = rows[0]
        if body_hash != _body_hash(body):
            raise UserError(
                "REQUEST_CONFLICT",
                f"request_id {request_id!r} was already used for run {run_id} with other arguments",
                hint="Use a new request_id for a different run.",
                field="request_id",
            )
        return self._run(run_id)

    def _remember_request(self, request_id: str, body: Mapping[str, Any], run_id: str) -> None:
        """Store the run of a request, and a hash of its arguments (`body`) to recognise the same
        request later. Nothing is stored if `request_id` is ""."""
        if request_id:
            self._db.execute(
                "INSERT INTO requests (request_id, body_hash, run_id, at) VALUES (?, ?, ?, ?)",
                (request_id, _body_hash(body), run_id, time.time()),
            )

    def _not_found_error(self, run_id: str, matches: list[str]) -> UserError:
        """Make the error RUN_NOT_FOUND for a `run_id` that does not name exactly one run. Its hint
        lists the ids that were probably meant.

        Args:
            matches: the ids of two or more runs that begin with `run_id`; [] if no run does.
        """
        plan_rows = self.plan_runs(run_id)
        if plan_rows:
            ids = ", ".join(row.run_id for row in plan_rows[:_LISTED_RUNS])
            return UserError(
                "RUN_NOT_FOUND",
                f"{run_id} is a plan, not a run",
                hint=f"Name one of its runs: {ids}.",
                field="run_id",
            )
        if matches:
            return UserError(
                "RUN_NOT_FOUND",
                f"{run_id!r} is the beginning of {len(matches)} runs",
                hint=f"Write the whole id: {', '.join(sorted(matches)[:5])}.",
                field="run_id",
            )
        # Only the newest 500 runs are searched, because nobody means a much older one. The cutoff
        # of 0.5 allows a few wrong letters. If no id is similar, the newest three are suggested.
        ids = [row.run_id for row in self.list_runs(limit=500)]
        similar_ids = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.5) or ids[:3]
        hint = "No run was submitted here yet."
        if similar_ids:
            hint = f"Did you mean {', '.join(similar_ids)}?"
        message = f"there is no run {run_id!r}"
        return UserError("RUN_NOT_FOUND", message, hint=hint, field="run_id")


def _body_hash(body: Mapping[str, Any]) -> str:
    """Return a hash of a request's arguments. It shows whether a request with a known request_id is
    a repetition or a different request."""
    text = json.dumps(body, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _run_row(values: Sequence[Any]) -> RunRow:
    """Build a RunRow from a row of the table, whose `values` are in the order of _RUN_COLUMNS."""
    columns = list(values)
    columns[_HINT] = Hint.load(columns[_HINT])
    return RunRow(*columns)


def _columns(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert values of a run's fields to values of the table's columns: a Hint becomes text."""
    columns = dict(values)
    for name, value in values.items():
        if isinstance(value, Hint):
            columns[name] = value.dump()
    return columns
