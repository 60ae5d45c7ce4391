"""The rows that need a transaction: runs and their leases, environments, deployments, estimates.

The only SQL of the project. Several servers and supervisors share one database, so every write is
one BEGIN IMMEDIATE transaction (a deferred one that reads first fails at once, whatever the busy
timeout), the journal is a write-ahead log, and only the holder of a flock on `checkpoint.lock`
moves that log into the database. What grows (metrics, rollouts, logs) is in files, not here.
"""

import contextlib
import difflib
import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.core import crash
from engine.core.errors import UserError
from engine.core.files import take_lock
from engine.home.database import damaged, intact, mend, open_database, unusable
from engine.home.rows import (
    HOLDS_DEVICE,
    OPEN,
    TERMINAL,
    TRANSITIONS,
    DeploymentRow,
    EnvRow,
    NewRun,
    RunRow,
)
from engine.home.run_dir import Home

_WAL_LIMIT = 4_000_000  # bytes of write-ahead log after which a writer tries to checkpoint


_RUN_COLUMNS = tuple(item.name for item in fields(RunRow))
_SETTABLE = frozenset(_RUN_COLUMNS) - {"rowid", "run_id", "state", "created", "kind", "algorithm"}
_DEPLOYMENT_SETTABLE = frozenset(
    {"state", "url", "adapters", "serve_base", "memory_bytes", "ended", "message"}
)


class Store:
    """One connection to a home's database. A context manager; not for sharing between threads."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._db, self._lock = open_database(home)

    def close(self) -> None:
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- runs ------------------------------------------------------------------------------

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
                f"INSERT INTO runs ({', '.join(values)}) VALUES ({_marks(values)})",
                tuple(values.values()),
            )
            self._answer(new.request_id, new.body, run_id)
            self._log_state(run_id, "", "queued")
            crash.point("submit.inserted")
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
            where.append(f"state IN ({_marks(states)})")
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
        found = self._read(
            f"SELECT env_id, count(*), sum(state NOT IN ({_marks(TERMINAL)})), "
            "max(rowid), sum(attempt), max(ended) FROM runs GROUP BY env_id",
            TERMINAL,
        )
        return {env_id: tuple(marks) for env_id, *marks in found}

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
            marks = _marks(HOLDS_DEVICE)
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
        unknown = set(values) - _SETTABLE
        if unknown:
            raise ValueError(f"no such run fields: {sorted(unknown)}")
        with self._write():
            found = self._db.execute("SELECT state FROM runs WHERE run_id = ?", (run_id,))
            state = (found.fetchone() or [""])[0]
            if state not in only_from:
                return False
            self._change(run_id, state, to, values)
            return True

    def update_run(self, run_id: str, *, only_in: set[str], **values: Any) -> bool:
        """Change fields of a run without changing its state."""
        unknown = set(values) - _SETTABLE
        if unknown:
            raise ValueError(f"no such run fields: {sorted(unknown)}")
        with self._write():
            done = self._db.execute(
                f"UPDATE runs SET {_sets(values)} "
                f"WHERE run_id = ? AND state IN ({_marks(only_in)})",
                (*values.values(), run_id, *only_in),
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
        rows = self._rows(f"WHERE state IN ({_marks(OPEN)})", OPEN)
        ahead = (row.estimated_hours - (row.spent_hours - row.spent_before) for row in rows)
        return self.spent_hours() + sum(max(0.0, hours) for hours in ahead)

    # -- environments ----------------------------------------------------------------------

    def add_env(self, name: str, hash12: str, *, kind: str, info: Mapping[str, Any]) -> EnvRow:
        """Record a pushed version; pushing one again makes it the newest of its name."""
        env_id, now = f"{name}@{hash12}", time.time()
        with self._write():
            self._db.execute(
                "INSERT INTO envs (env_id, name, hash, kind, created, pushed, info) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (env_id) DO UPDATE SET "
                "pushed = excluded.pushed, info = excluded.info",
                (env_id, name, hash12, kind, now, now, json.dumps(dict(info))),
            )
        return self._envs("WHERE env_id = ?", (env_id,))[0]

    def find_env(self, ref: str) -> list[EnvRow]:
        """Versions `ref` may mean, newest first: one id, all of a name, or a prefix of ids."""
        newest = "ORDER BY pushed DESC, rowid DESC"
        for where, value in (("env_id = ?", ref), ("name = ?", ref)):
            found = self._envs(f"WHERE {where} {newest}", (value,))
            if found:
                return found
        return (
            self._envs(f"WHERE substr(env_id, 1, ?) = ? {newest}", (len(ref), ref)) if ref else []
        )

    def list_envs(self, limit: int = 1000, offset: int = 0) -> list[EnvRow]:
        """Versions, the last pushed first."""
        return self._envs("ORDER BY pushed DESC, rowid DESC LIMIT ? OFFSET ?", (limit, offset))

    def delete_env(self, env_id: str) -> bool:
        with self._write():
            done = self._db.execute("DELETE FROM envs WHERE env_id = ?", (env_id,))
            return done.rowcount == 1

    # -- deployments -----------------------------------------------------------------------

    def add_deployment(
        self,
        *,
        base_name: str,
        base_path: str,
        adapters: Sequence[Mapping[str, str]],
        serve_base: bool,
        memory_bytes: int,
    ) -> DeploymentRow:
        """Record a deployment that is about to start, under a readable id."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", base_name.rstrip("/").rsplit("/", 1)[-1]) or "base"
        with self._write():
            number = self._db.execute("SELECT count(*) FROM deployments").fetchone()[0] + 1
            while self.home.deployment(f"{name}-{number}").path.exists():  # of a row that was lost
                number += 1
            deployment_id = f"{name}-{number}"
            self._db.execute(
                "INSERT INTO deployments (deployment_id, base_name, base_path, adapters, "
                "serve_base, memory_bytes, created) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    deployment_id,
                    base_name,
                    base_path,
                    json.dumps([dict(item) for item in adapters]),
                    int(serve_base),
                    memory_bytes,
                    time.time(),
                ),
            )
        return self.get_deployment(deployment_id)

    def get_deployment(self, deployment_id: str) -> DeploymentRow:
        """The deployment with this id. Raises UserError DEPLOYMENT_NOT_FOUND."""
        found = self._deployments("WHERE deployment_id = ?", (deployment_id,))
        if not found:
            raise UserError(
                "DEPLOYMENT_NOT_FOUND",
                f"there is no deployment {deployment_id!r}",
                hint="get_status scope=deployments lists them.",
            )
        return found[0]

    def list_deployments(
        self, states: Sequence[str] | None = None, limit: int = 100
    ) -> list[DeploymentRow]:
        """Deployments, newest first."""
        where = f"WHERE state IN ({_marks(states)})" if states else ""
        return self._deployments(f"{where} ORDER BY rowid DESC LIMIT ?", (*(states or ()), limit))

    def update_deployment(self, deployment_id: str, **values: Any) -> None:
        unknown = set(values) - _DEPLOYMENT_SETTABLE
        if unknown:
            raise ValueError(f"no such deployment fields: {sorted(unknown)}")
        if "adapters" in values:
            values["adapters"] = json.dumps(values["adapters"])
        with self._write():
            self._db.execute(
                f"UPDATE deployments SET {_sets(values)} WHERE deployment_id = ?",
                (*values.values(), deployment_id),
            )

    # -- estimates -------------------------------------------------------------------------

    def record_estimate(
        self, kind: str, features: Mapping[str, Any], predicted: float, actual: float
    ) -> None:
        """Keep what was predicted and what came, so that later estimates are calibrated."""
        with self._write():
            self._db.execute(
                "INSERT INTO estimates (at, kind, features, predicted, actual) "
                "VALUES (?, ?, ?, ?, ?)",
                (time.time(), kind, json.dumps(dict(features)), predicted, actual),
            )

    def calibration(self, kind: str, limit: int = 50) -> list[dict[str, Any]]:
        """The last predictions of a kind, newest first: features, predicted, actual, at."""
        found = self._read(
            "SELECT features, predicted, actual, at FROM estimates WHERE kind = ? "
            "ORDER BY rowid DESC LIMIT ?",
            (kind, limit),
        )
        return [
            {"features": json.loads(features), "predicted": predicted, "actual": actual, "at": at}
            for features, predicted, actual, at in found
        ]

    # -- the database itself ---------------------------------------------------------------

    def checkpoint(self) -> bool:
        """Move the write-ahead log into the database, unless another process is doing so."""
        lock = take_lock(self.home.checkpoint_lock)
        if lock is None:
            return False
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return True
        finally:
            os.close(lock)

    def check(self) -> None:
        """Read every page; a damaged database is kept aside and made again from the folders.

        A scribbled page is found by nothing less, so a server does this when it starts. Raises
        UserError HOME_UNUSABLE where it cannot be mended now.
        """
        wrong = intact(self._db)
        if wrong:
            if self._lock < 0:  # a home for reading alone
                raise damaged(self.home, wrong)
            self.close()
            self._db, self._lock = mend(self.home, wrong)

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise unusable(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged(self.home, str(error)) from error
        self._checkpoint_if_long()

    def _read(self, query: str, values: Sequence[Any]) -> list[Any]:
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.OperationalError as error:
            raise unusable(self.home.db, error) from error
        except sqlite3.DatabaseError as error:
            raise damaged(self.home, str(error)) from error

    def _checkpoint_if_long(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):
            if os.stat(f"{self.home.db}-wal").st_size > _WAL_LIMIT:
                self.checkpoint()

    def _rows(self, tail: str, values: Sequence[Any]) -> list[RunRow]:
        columns = ", ".join(_RUN_COLUMNS)
        found = self._read(f"SELECT {columns} FROM runs {tail}", tuple(values))
        return [RunRow(*row) for row in found]

    def _run(self, run_id: str) -> RunRow:
        return self._rows("WHERE run_id = ?", (run_id,))[0]

    def _envs(self, tail: str, values: Sequence[Any]) -> list[EnvRow]:
        found = self._read(
            f"SELECT env_id, name, hash, kind, created, pushed, info FROM envs {tail}",
            tuple(values),
        )
        return [EnvRow(*row[:-1], info=json.loads(row[-1])) for row in found]

    def _deployments(self, tail: str, values: Sequence[Any]) -> list[DeploymentRow]:
        columns = [item.name for item in fields(DeploymentRow)]
        found = self._read(f"SELECT {', '.join(columns)} FROM deployments {tail}", tuple(values))
        rows = []
        for values_found in found:
            row = dict(zip(columns, values_found, strict=True))
            row["adapters"] = json.loads(row["adapters"])
            row["serve_base"] = bool(row["serve_base"])
            rows.append(DeploymentRow(**row))
        return rows

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
            f"UPDATE runs SET {_sets(changes)} WHERE run_id = ?", (*changes.values(), run_id)
        )
        self._log_state(run_id, old, new)

    def _log_state(self, run_id: str, old: str, new: str) -> None:
        self._db.execute(
            "INSERT INTO history (run_id, at, came_from, went_to) VALUES (?, ?, ?, ?)",
            (run_id, time.time(), old, new),
        )

    def _answered(self, request_id: str, body: Mapping[str, Any]) -> RunRow | None:
        if not request_id:
            return None
        rows = self._read(
            "SELECT run_id, body_hash FROM requests WHERE request_id = ?", (request_id,)
        )
        if not rows:
            return None
        found = rows[0]
        if found[1] != _hash(body):
            raise UserError(
                "REQUEST_CONFLICT",
                f"request_id {request_id!r} was already used for run {found[0]} "
                "with other arguments",
                hint="Use a new request_id for a different run.",
                field="request_id",
            )
        return self._run(found[0])

    def _answer(self, request_id: str, body: Mapping[str, Any], run_id: str) -> None:
        if request_id:
            self._db.execute(
                "INSERT INTO requests (request_id, body_hash, run_id, at) VALUES (?, ?, ?, ?)",
                (request_id, _hash(body), run_id, time.time()),
            )

    def _not_found(self, run_id: str, matches: list[str]) -> UserError:
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


_COPIED = tuple(item.name for item in fields(NewRun) if item.name not in ("name", "body"))


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _marks(values: Sequence[Any] | Mapping[str, Any] | set[str]) -> str:
    return ", ".join("?" * len(values))


def _sets(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = ?" for name in values)
