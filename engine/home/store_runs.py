"""The tables of runs, of what became of them, and of the requests that led to them."""

import difflib
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Hint
from engine.home.rows import HOLDS_DEVICE, OPEN, TERMINAL, TRANSITIONS, NewRun, RunRow
from engine.home.store_connection import Connection, assignments, placeholders

_RUN_COLUMNS = tuple(item.name for item in fields(RunRow))
# Columns that may change in the life of a run.
_SETTABLE = frozenset(_RUN_COLUMNS) - {"rowid", "run_id", "state", "created", "kind", "algorithm"}
_LISTED_RUNS = 6  # of a plan, in an error
MOST_WITHOUT_DEVICE = 4  # runs at once that ask nothing but models behind a URL
RESUMABLE = ("failed", "cancelled", "interrupted")
# What the row of a run says when a user has asked for a new attempt.
_NEW_ATTEMPT = {
    "ended": None,
    "continuations": 0,
    "reason_kind": "",
    "reason": "",
    "hint": "",
    "verdict": "",
}
# Makes a run of a plan, from the plan's id and the ids of the runs before it: what is stored of it,
# and the function that writes its folder when it is called with its id.
RunMaker = Callable[[str, list[str]], tuple[NewRun, Callable[[str], None]]]
# Fields that a row takes from a NewRun under the same name.
_COPIED = tuple(item.name for item in fields(NewRun) if item.name not in ("name", "body"))


def _not_resumable(row: RunRow) -> UserError:
    """The error for resuming a run that is done or has not ended."""
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
    """Runs: queued, leased to a device, changed by whoever runs them."""

    def insert_run(self, new: NewRun, prepare: Callable[[str], None] | None = None) -> RunRow:
        """Queue a run under the next free id, such as "sums-grpo-3", and return its row. If
        `new.request_id` was used before, nothing is queued and the run that it led to is returned.

        Args:
            prepare: called with the run's id before the row is inserted, to write the run's folder;
                when it raises, no row is inserted and the folder is removed.

        Raises UserError REQUEST_CONFLICT when the request_id was used with another body.
        """
        with self._folders_as_rows() as folders, self._write():
            earlier_run = self._run_of_request(new.request_id, new.body)
            if earlier_run is not None:
                return earlier_run
            run_id, number = self._next_free_id(new.name)
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
        used before, nothing is queued and the rows of that plan are returned.

        Args:
            name: the part of the plan's id before "-plan-" and its number.
            makers: one for each run: from the plan's id and the ids of the runs before it, the run
                and the function that writes its folder.

        Raises UserError REQUEST_CONFLICT when the request_id was used with another body.
        """
        with self._folders_as_rows() as folders, self._write():
            earlier_run = self._run_of_request(request_id, body)
            if earlier_run is not None:
                return self.plan_runs(earlier_run.plan)
            plan_id = self._next_plan_id(name)
            run_ids: list[str] = []  # of the runs that are queued so far
            for make in makers:
                new_run, write_folder = make(plan_id, run_ids)
                run_id, number = self._next_free_id(new_run.name)
                folders.append(run_id)
                write_folder(run_id)
                self._insert_queued(new_run, run_id, number)
                self._log_state(run_id, old="", new="queued")
                run_ids.append(run_id)
            self._remember_request(request_id, body, run_ids[0])
            return self.plan_runs(plan_id)

    @contextmanager
    def _folders_as_rows(self) -> Iterator[list[str]]:
        """A context around a transaction. Yields a list for the ids whose folders it begins to
        write; where it fails, those that have no row are removed again."""
        run_ids: list[str] = []
        try:
            yield run_ids
        except BaseException:
            # Until a folder is removed, no other process takes its id: see `_next_free_id`.
            for run_id in run_ids:
                with suppress(UserError):  # where nobody knows if there is a row, the folder stays
                    if not self._rows("WHERE run_id = ?", (run_id,)):
                        shutil.rmtree(self.home.run(run_id).path, ignore_errors=True)
            raise

    def plan_runs(self, plan_id: str) -> list[RunRow]:
        """The runs of a plan, in the order of its steps; [] where there is no such plan."""
        return self._rows("WHERE plan = ? AND plan != '' ORDER BY rowid", (plan_id,))

    def requested_run(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """The run that an earlier submit or resume with this request_id led to; None for a
        request_id that was never used, and for "".

        Raises UserError REQUEST_CONFLICT when the request_id was used with another body.
        """
        return self._run_of_request(request_id, body)

    def get_run(self, run_id: str) -> RunRow:
        """The run whose id is `run_id`; without one, the only run whose id begins with it.

        Raises UserError RUN_NOT_FOUND where no run or more than one matches; its hint names similar
        ids.
        """
        matches = self._rows("WHERE run_id = ?", (run_id,))
        if not matches and run_id:
            # Not LIKE, for which "_" and "%" in an id would be wildcards.
            matches = self._rows("WHERE substr(run_id, 1, ?) = ?", (len(run_id), run_id))
        if len(matches) == 1:
            return matches[0]
        raise self._not_found_error(run_id, [row.run_id for row in matches])

    def list_runs(
        self,
        limit: int = 20,
        before_rowid: int | None = None,
        states: Sequence[str] | None = None,
        kind: str | None = None,
    ) -> list[RunRow]:
        """At most `limit` runs, the newest first.

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
        """(run_id, state, attempt, ended) of every run of a kind, the newest first. A caller that
        keeps them can tell which runs have changed; they are read quickly even for thousands."""
        return self._read(
            "SELECT run_id, state, attempt, ended FROM runs WHERE kind = ? ORDER BY rowid DESC",
            (kind,),
        )

    def env_marks(self) -> dict[str, tuple[Any, ...]]:
        """A fingerprint of the runs of each environment version: env_id -> values that change
        whenever a run of that version is added, ends or is resumed.

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
        """The queued runs, in the order in which they will start."""
        return self._rows("WHERE state = 'queued' ORDER BY queued, rowid", ())

    def queue_position(self, run_id: str) -> int:
        """The place of a run in the queue: 1 for the run that starts next, 0 for a run that is not
        queued."""
        ids = [row.run_id for row in self.queue()]
        return ids.index(run_id) + 1 if run_id in ids else 0

    def lease_next(
        self,
        devices: Sequence[str],
        claim: Callable[[RunRow], bool] | None = None,
        choose: Callable[[RunRow, Sequence[str]], str] | None = None,
        can_start: Callable[[RunRow], bool] | None = None,
        runs_per_device: int = 1,
    ) -> RunRow | None:
        """Assign free devices to the oldest queued run and set its state to "preparing".

        A run gets as many as it is to have (`gpus`, at most all of the machine), all or none. Where
        fewer are free, they are kept for it: no later run starts before it.

        Args:
            devices: ids of the devices that may be assigned.
            claim: takes the run's lock inside the transaction, so that nobody sees a run that is
                preparing while its lock is free. A run for which it returns False stays queued,
                and the next one is tried. None claims nothing.
            choose: chooses among the free devices those for a run, with commas between them, or ""
                where none has room for it; the run then stays queued. None takes the first.
            can_start: whether a run for which too few devices are free could start otherwise; for
                one that could not none are kept. None: every one could.
            runs_per_device: how many runs may hold a device; with more than one `choose` says
                whether it has room for another.

        A run that waits for others is passed over. A run on no device starts at once, as long as
        fewer than `MOST_WITHOUT_DEVICE` are under way. Returns the changed row; None where no
        device is free or no queued run can start.
        """
        with self._write():
            row = self._next_without_device(claim)
            if row is not None:
                return row
            holders = self._holders()
            free_devices = [d for d in devices if holders[d] < runs_per_device]
            if not free_devices:
                return None
            for row in self.queue():
                if row.waits_for or row.gpus == 0:
                    continue
                count = min(row.gpus, len(devices))
                if count > len(free_devices):
                    if can_start is None or can_start(row):
                        return None  # the free devices are kept for this run
                    continue
                if choose is not None:
                    device = choose(row, free_devices)
                else:
                    device = ",".join(free_devices[:count])
                if device and (claim is None or claim(row)):
                    return self._lease(row.run_id, device)
        return None

    def _next_without_device(self, claim: Callable[[RunRow], bool] | None) -> RunRow | None:
        """Set the oldest queued run on no device to "preparing"; None where none can start."""
        waiting = [row for row in self.queue() if row.gpus == 0 and not row.waits_for]
        if not waiting:
            return None
        question_marks = placeholders(HOLDS_DEVICE)
        (count,) = self._db.execute(
            f"SELECT COUNT(*) FROM runs WHERE gpus = 0 AND state IN ({question_marks})",
            HOLDS_DEVICE,
        ).fetchone()
        if count >= MOST_WITHOUT_DEVICE:
            return None
        for row in waiting:
            if claim is None or claim(row):
                return self._lease(row.run_id, "")
        return None

    def _lease(self, run_id: str, device: str) -> RunRow:
        """Assign `device` (several ids with commas between them) to a queued run; returns its row,
        in the state "preparing"."""
        self._change_state(run_id, old="queued", new="preparing", values={"device": device})
        return self._run(run_id)

    def _holders(self) -> Counter[str]:
        """How many runs hold each device now."""
        question_marks = placeholders(HOLDS_DEVICE)
        leased = self._db.execute(
            f"SELECT device FROM runs WHERE state IN ({question_marks})", HOLDS_DEVICE
        )
        return Counter(device for (devices,) in leased for device in devices.split(","))

    def set_state(self, run_id: str, to: str, *, only_from: set[str], **values: Any) -> bool:
        """Set the state of a run to `to`, and the fields in `values`, if its state is one of
        `only_from`. Returns whether this call made the change.

        Raises ValueError, which is a fault of the caller, for a field that may not be changed, and
        for a change of state that TRANSITIONS does not allow.
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
            present_state = (cursor.fetchone() or [""])[0]  # "" where there is no such run
            if present_state not in only_from:
                return False
            self._change_state(run_id, old=present_state, new=to, values=columns)
            return True

    def update_run(self, run_id: str, *, only_in: set[str], **values: Any) -> bool:
        """Set the fields in `values` of a run if its state, which stays as it is, is one of
        `only_in`. Returns whether they were set. Raises ValueError for a field that may not be
        changed, which is a fault of the caller."""
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
        its row. If the request_id was used before, nothing is queued and the run that it led to is
        returned.

        Args:
            max_gpu_hours: the cap on device hours of the new attempt.
            body: the arguments that the request_id stands for.
            check: called inside the transaction; when it raises, nothing changes.

        Raises UserError RUN_STATE, and REQUEST_CONFLICT for a request_id used with another body.
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
        """Queue a new attempt of every run of a plan that did not get done, and return the rows of
        all its runs. If the request_id was used before, nothing is queued.

        `check` is called inside the transaction with each run that is to be queued; when it raises,
        nothing changes. Raises UserError RUN_STATE where no run of it can be resumed, and
        REQUEST_CONFLICT.
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
        """Queue a new attempt of a run that has ended, with this cap on device hours, which the
        other runs of its plan share from now on."""
        values = {
            "attempt": row.attempt + 1,
            "queued": self._queue_time(time.time()),
            "max_gpu_hours": max_gpu_hours,
            "spent_before": row.spent_hours,
            **_NEW_ATTEMPT,  # clears what the last attempt's end left
        }
        self._change_state(row.run_id, row.state, "queued", values)
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
        """Every change of state of a run, the oldest first: (unix seconds, old state, new state).
        The old state of the first one is ""."""
        return self._read(
            "SELECT at, came_from, went_to FROM history WHERE run_id = ? ORDER BY rowid", (run_id,)
        )

    def spent_hours(self, excluding: str = "") -> float:
        """Device hours spent by all runs of this home, except by the run with the id `excluding`
        ("" for no exception)."""
        rows = self._read(
            "SELECT coalesce(sum(spent_hours), 0) FROM runs WHERE run_id != ?", (excluding,)
        )
        (total,) = rows[0]
        return float(total)

    def committed_hours(self) -> float:
        """Device hours that all runs have spent, plus what open runs are still expected to spend:
        their estimate less what they spent since their last submit or resume."""
        rows = self._rows(f"WHERE state IN ({placeholders(OPEN)})", OPEN)
        hours_ahead = (row.estimated_hours - (row.spent_hours - row.spent_before) for row in rows)
        return self.spent_hours() + sum(max(0.0, hours) for hours in hours_ahead)

    def _rows(self, clauses: str, values: Sequence[Any]) -> list[RunRow]:
        """The runs that a SELECT with these SQL `clauses` finds; `values` are for its question
        marks."""
        columns = ", ".join(_RUN_COLUMNS)
        rows = self._read(f"SELECT {columns} FROM runs {clauses}", tuple(values))
        return [_run_row(row) for row in rows]

    def _run(self, run_id: str) -> RunRow:
        """The run with exactly this id, which must exist."""
        return self._rows("WHERE run_id = ?", (run_id,))[0]

    def _insert_queued(self, new: NewRun, run_id: str, number: int) -> None:
        """Insert the row of a run that is queued now. `number` is the one in its id."""
        now = time.time()
        values = {
            "run_id": run_id,
            "name": new.name,
            "number": number,
            "state": "queued",
            "created": now,
            "queued": self._queue_time(now),
            "attempt": 1,
            **{name: getattr(new, name) for name in _COPIED},  # what the submit gave
        }
        self._db.execute(
            f"INSERT INTO runs ({', '.join(values)}) VALUES ({placeholders(values)})",
            tuple(values.values()),
        )

    def _next_free_id(self, name: str) -> tuple[str, int]:
        """The next free id of a run called `name`, such as "sums-grpo-4" for "sums-grpo", and the
        number in it."""
        cursor = self._db.execute("SELECT max(number) FROM runs WHERE name = ?", (name,))
        number = (cursor.fetchone()[0] or 0) + 1
        # A submit that died half way has left a folder without a row. It is not used again.
        while self.home.run(f"{name}-{number}").path.exists():
            number += 1
        return f"{name}-{number}", number

    def _next_plan_id(self, name: str) -> str:
        """The next free id of a plan, such as "sums-plan-2" for the name "sums"."""
        rows = self._read("SELECT DISTINCT plan FROM runs WHERE plan != ''", ())
        numbers = [
            int(number)
            for (plan_id,) in rows
            for stem, _, number in [plan_id.rpartition("-plan-")]
            if stem == name
        ]
        return f"{name}-plan-{max(numbers, default=0) + 1}"

    def _queue_time(self, now: float) -> float:
        """The time to store for a run that is queued now. It is later than that of every other run,
        even if the clock was set back, so that the queue keeps its order."""
        last_queued = self._db.execute("SELECT coalesce(max(queued), 0) FROM runs").fetchone()[0]
        return max(now, last_queued + 1e-6)  # at least a microsecond later

    def _change_state(self, run_id: str, old: str, new: str, values: Mapping[str, Any]) -> None:
        """Set the state of a run to `new` and the columns in `values`, and note the change in its
        history. `old` is its state so far."""
        changes = {"state": new, **values}
        self._db.execute(
            f"UPDATE runs SET {assignments(changes)} WHERE run_id = ?", (*changes.values(), run_id)
        )
        self._log_state(run_id, old, new)

    def _log_state(self, run_id: str, old: str, new: str) -> None:
        """Note a change of state in the run's history; `old` is "" for a new run."""
        self._db.execute(
            "INSERT INTO history (run_id, at, came_from, went_to) VALUES (?, ?, ?, ?)",
            (run_id, time.time(), old, new),
        )

    def _run_of_request(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """The run that this request_id led to before; None for one that was never used, and for "".

        Raises UserError REQUEST_CONFLICT when it was used with another body.
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
        """Store which run a request led to, and a hash of its arguments (`body`), by which the same
        request is known again. Nothing is stored for a request_id of ""."""
        if request_id:
            self._db.execute(
                "INSERT INTO requests (request_id, body_hash, run_id, at) VALUES (?, ?, ?, ?)",
                (request_id, _body_hash(body), run_id, time.time()),
            )

    def _not_found_error(self, run_id: str, matches: list[str]) -> UserError:
        """The error RUN_NOT_FOUND for a `run_id` that does not name exactly one run. Its hint lists
        the ids that were probably meant.

        Args:
            matches: the ids of two or more runs that begin with `run_id`; [] where none does.
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
        # Only the newest 500 runs are searched: nobody means a much older one. A cutoff of 0.5
        # forgives a few wrong letters. Where no id is similar, the newest three are offered.
        ids = [row.run_id for row in self.list_runs(limit=500)]
        similar_ids = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.5) or ids[:3]
        return UserError(
            "RUN_NOT_FOUND",
            f"there is no run {run_id!r}",
            hint=f"Did you mean {', '.join(similar_ids)}?"
            if similar_ids
            else "No run was submitted here yet.",
            field="run_id",
        )


def _body_hash(body: Mapping[str, Any]) -> str:
    """A hash of a request's arguments. It is equal only for the same arguments, and so tells a
    repeated request from a different one with the same request_id."""
    text = json.dumps(body, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _run_row(values: Sequence[Any]) -> RunRow:
    """Build a RunRow from a row of the table, whose `values` are in the order of _RUN_COLUMNS."""
    columns = dict(zip(_RUN_COLUMNS, values, strict=True))
    columns["hint"] = Hint.load(columns["hint"])
    return RunRow(**columns)


def _columns(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert values of a run's fields to values of the table's columns: a Hint becomes text."""
    return {
        name: value.dump() if isinstance(value, Hint) else value for name, value in values.items()
    }
