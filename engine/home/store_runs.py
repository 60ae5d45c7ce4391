"""The tables of runs, of what became of them, and of the requests that led to them."""

import difflib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Hint
from engine.home.rows import HOLDS_DEVICE, OPEN, TERMINAL, TRANSITIONS, NewRun, RunRow
from engine.home.store_connection import Connection, assignments, placeholders

_RUN_COLUMNS = tuple(item.name for item in fields(RunRow))
_SETTABLE = frozenset(_RUN_COLUMNS) - {"rowid", "run_id", "state", "created", "kind", "algorithm"}
_COPIED = tuple(item.name for item in fields(NewRun) if item.name not in ("name", "body"))


class RunTable(Connection):
    """Runs: queued, leased to a device, changed by whoever runs them."""

    def insert_run(self, new: NewRun, prepare: Callable[[str], None] | None = None) -> RunRow:
        """Queue a run under a readable id, or return the run this request_id already made.

        `prepare(run_id)` makes the run's folder durable before the row exists; when it raises
        there is no run. Raises UserError REQUEST_CONFLICT.
        """
        with self._write():
            known = self._answered(new.request_id, new.body)
            if known is not None:
                return known
            run_id, number = self._free_id(new.name)
            if prepare is not None:
                prepare(run_id)
            now = time.time()
            values = {
                "run_id": run_id,
                "name": new.name,
                "number": number,
                "state": "queued",
                "created": now,
                "queued": self._last_place(now),
                "attempt": 1,
                **{key: getattr(new, key) for key in _COPIED},
            }
            self._db.execute(
                f"INSERT INTO runs ({', '.join(values)}) VALUES ({placeholders(values)})",
                tuple(values.values()),
            )
            self._answer(new.request_id, new.body, run_id)
            self._log_state(run_id, "", "queued")
            return self._run(run_id)

    def requested_run(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """The run an earlier submit or resume with this request_id led to.

        Raises UserError REQUEST_CONFLICT when it was used with another body.
        """
        return self._answered(request_id, body)

    def get_run(self, run_id: str) -> RunRow:
        """The run with this id, or the only one whose id starts with it.

        Raises UserError RUN_NOT_FOUND naming the nearest ids.
        """
        found = self._rows("WHERE run_id = ?", (run_id,))
        if not found and run_id:
            found = self._rows("WHERE substr(run_id, 1, ?) = ?", (len(run_id), run_id))
        if len(found) == 1:
            return found[0]
        raise self._not_found(run_id, [row.run_id for row in found])

    def list_runs(
        self,
        limit: int = 20,
        before_rowid: int | None = None,
        states: Sequence[str] | None = None,
        kind: str | None = None,
    ) -> list[RunRow]:
        """Runs, newest first, older than `before_rowid` where given."""
        where, values = ["1"], []
        if before_rowid is not None:
            where.append("rowid < ?")
            values.append(before_rowid)
        if states is not None:
            where.append(f"state IN ({placeholders(states)})")
            values.extend(states)
        if kind is not None:
            where.append("kind = ?")
            values.append(kind)
        tail = f"WHERE {' AND '.join(where)} ORDER BY rowid DESC LIMIT ?"
        return self._rows(tail, (*values, limit))

    def run_marks(self, kind: str) -> list[tuple[str, str, int, float | None]]:
        """(run_id, state, attempt, ended) of every run of a kind, newest first: enough to tell
        whether a run is what it was at the last look, and cheap for thousands."""
        return self._read(
            "SELECT run_id, state, attempt, ended FROM runs WHERE kind = ? ORDER BY rowid DESC",
            (kind,),
        )

    def env_marks(self) -> dict[str, tuple[Any, ...]]:
        """For every environment version with runs, what changes whenever one of them does: how
        many there are and have not ended, the youngest, the sum of attempts, the last end."""
        rows = self._read(
            f"SELECT env_id, count(*), sum(state NOT IN ({placeholders(TERMINAL)})), "
            "max(rowid), sum(attempt), max(ended) FROM runs GROUP BY env_id",
            TERMINAL,
        )
        return {env_id: tuple(marks) for env_id, *marks in rows}

    def queue(self) -> list[RunRow]:
        """The queued runs in the order they will start."""
        return self._rows("WHERE state = 'queued' ORDER BY queued, rowid", ())

    def queue_position(self, run_id: str) -> int:
        """1 for the run that starts next, 0 for one that is not queued."""
        ids = [row.run_id for row in self.queue()]
        return ids.index(run_id) + 1 if run_id in ids else 0

    def lease_next(
        self, devices: Sequence[str], claim: Callable[[RunRow], bool] | None = None
    ) -> RunRow | None:
        """Give the oldest queued run a free device and make it preparing; None when there is none.

        `claim(row)` runs inside the transaction and takes the run's lock, so that nobody can see
        the row preparing and its lock free; a run it refuses is passed over.
        """
        with self._write():
            marks = placeholders(HOLDS_DEVICE)
            held = self._db.execute(
                f"SELECT device FROM runs WHERE state IN ({marks})", HOLDS_DEVICE
            )
            busy = {device for (device,) in held}
            free = [device for device in devices if device not in busy]
            if not free:
                return None
            for row in self.queue():
                if claim is None or claim(row):
                    self._change(row.run_id, "queued", "preparing", {"device": free[0]})
                    return self._run(row.run_id)
        return None

    def set_state(self, run_id: str, to: str, *, only_from: set[str], **values: Any) -> bool:
        """Change the state if it is one of `only_from`; True when this call changed it.

        A change that no row of TRANSITIONS allows is a fault of the caller: ValueError.
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
            state = (cursor.fetchone() or [""])[0]
            if state not in only_from:
                return False
            self._change(run_id, state, to, columns)
            return True

    def update_run(self, run_id: str, *, only_in: set[str], **values: Any) -> bool:
        """Change fields of a run without changing its state."""
        columns = _columns(values)
        unknown = set(columns) - _SETTABLE
        if unknown:
            raise ValueError(f"no such run fields: {sorted(unknown)}")
        with self._write():
            done = self._db.execute(
                f"UPDATE runs SET {assignments(columns)} "
                f"WHERE run_id = ? AND state IN ({placeholders(only_in)})",
                (*columns.values(), run_id, *only_in),
            )
            return done.rowcount == 1

    def resume_run(
        self,
        run_id: str,
        *,
        max_gpu_hours: float,
        request_id: str,
        body: Mapping[str, Any],
        check: Callable[[], None] | None = None,
    ) -> RunRow:
        """Queue a new attempt of a run that failed, was cancelled or was interrupted.

        `check` runs inside the transaction; when it raises nothing changes. Raises UserError
        RUN_STATE from any other state and REQUEST_CONFLICT.
        """
        with self._write():
            known = self._answered(request_id, body)
            if known is not None:
                return known
            if check is not None:
                check()
            row = self._run(run_id)
            if row.state not in ("failed", "cancelled", "interrupted"):
                raise UserError(
                    "RUN_STATE",
                    f"run {run_id} is {row.state}; only a failed, cancelled or interrupted run "
                    "can be resumed",
                    hint="Submit a new run with model=<this run> to train its result further."
                    if row.state == "done"
                    else "Wait for it, or cancel it first.",
                )
            values = {
                "attempt": row.attempt + 1,
                "queued": self._last_place(time.time()),
                "ended": None,
                "continuations": 0,
                "max_gpu_hours": max_gpu_hours,
                "spent_before": row.spent_hours,
                "reason_kind": "",
                "reason": "",
                "hint": "",
                "verdict": "",
            }
            self._change(run_id, row.state, "queued", values)
            self._answer(request_id, body, run_id)
            return self._run(run_id)

    def holding(self, run_id: str, act: Callable[[RunRow], None]) -> None:
        """Call `act` with the run's row while nobody else can change any row."""
        with self._write():
            act(self._run(run_id))

    def history(self, run_id: str) -> list[tuple[float, str, str]]:
        """Every change of state of a run: unix time, from, to."""
        return self._read(
            "SELECT at, came_from, went_to FROM history WHERE run_id = ? ORDER BY rowid", (run_id,)
        )

    def spent_hours(self, excluding: str = "") -> float:
        """Device hours spent by all runs of this home, but for the run `excluding`."""
        total = self._read(
            "SELECT coalesce(sum(spent_hours), 0) FROM runs WHERE run_id != ?", (excluding,)
        )
        return float(total[0][0])

    def committed_hours(self) -> float:
        """Device hours spent, and what open runs are still estimated to take."""
        rows = self._rows(f"WHERE state IN ({placeholders(OPEN)})", OPEN)
        ahead = (row.estimated_hours - (row.spent_hours - row.spent_before) for row in rows)
        return self.spent_hours() + sum(max(0.0, hours) for hours in ahead)

    def _rows(self, tail: str, values: Sequence[Any]) -> list[RunRow]:
        columns = ", ".join(_RUN_COLUMNS)
        rows = self._read(f"SELECT {columns} FROM runs {tail}", tuple(values))
        return [_run_row(row) for row in rows]

    def _run(self, run_id: str) -> RunRow:
        return self._rows("WHERE run_id = ?", (run_id,))[0]

    def _free_id(self, name: str) -> tuple[str, int]:
        last = self._db.execute("SELECT max(number) FROM runs WHERE name = ?", (name,))
        number = (last.fetchone()[0] or 0) + 1
        # A folder without a row is what a submit that died half way left: leave it alone.
        while self.home.run(f"{name}-{number}").path.exists():
            number += 1
        return f"{name}-{number}", number

    def _last_place(self, now: float) -> float:
        """When a run is said to have queued: after all others, even if the clock was set back."""
        last = self._db.execute("SELECT coalesce(max(queued), 0) FROM runs").fetchone()[0]
        return max(now, last + 1e-6)

    def _change(self, run_id: str, old: str, new: str, values: Mapping[str, Any]) -> None:
        changes = {"state": new, **values}
        self._db.execute(
            f"UPDATE runs SET {assignments(changes)} WHERE run_id = ?", (*changes.values(), run_id)
        )
        self._log_state(run_id, old, new)

    def _log_state(self, run_id: str, old: str, new: str) -> None:
        self._db.execute(
            "INSERT INTO history (run_id, at, came_from, went_to) VALUES (?, ?, ?, ?)",
            (run_id, time.time(), old, new),
        )

    def _answered(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        """The run that this request made before, None for a new one. Raises REQUEST_CONFLICT."""
        if not request_id:
            return None
        rows = self._read(
            "SELECT run_id, body_hash FROM requests WHERE request_id = ?", (request_id,)
        )
        if not rows:
            return None
        answered = rows[0]
        if answered[1] != _hash(body):
            raise UserError(
                "REQUEST_CONFLICT",
                f"request_id {request_id!r} was already used for run {answered[0]} "
                "with other arguments",
                hint="Use a new request_id for a different run.",
                field="request_id",
            )
        return self._run(answered[0])

    def _answer(self, request_id: str, body: Mapping[str, Any], run_id: str) -> None:
        if request_id:
            self._db.execute(
                "INSERT INTO requests (request_id, body_hash, run_id, at) VALUES (?, ?, ?, ?)",
                (request_id, _hash(body), run_id, time.time()),
            )

    def _not_found(self, run_id: str, matches: list[str]) -> UserError:
        """The error for an id that is none, with the ids that were probably meant."""
        if matches:
            return UserError(
                "RUN_NOT_FOUND",
                f"{run_id!r} is the beginning of {len(matches)} runs",
                hint=f"Write the whole id: {', '.join(sorted(matches)[:5])}.",
                field="run_id",
            )
        ids = [row.run_id for row in self.list_runs(limit=500)]
        near = difflib.get_close_matches(run_id, ids, n=3, cutoff=0.5) or ids[:3]
        return UserError(
            "RUN_NOT_FOUND",
            f"there is no run {run_id!r}",
            hint=f"Did you mean {', '.join(near)}?" if near else "No run was submitted here yet.",
            field="run_id",
        )


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _run_row(values: Sequence[Any]) -> RunRow:
    columns = dict(zip(_RUN_COLUMNS, values, strict=True))
    columns["hint"] = Hint.load(columns["hint"])
    return RunRow(**columns)


def _columns(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of a run as its columns hold them."""
    return {name: v.dump() if isinstance(v, Hint) else v for name, v in values.items()}
