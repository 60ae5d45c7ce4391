"""The rows that need a transaction: runs and their leases, environments, deployments, estimates.

Growing data (metrics, rollouts, logs) is in files and not in the database. Only the modules
store*.py and database.py contain SQL.
"""

import heapq
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.hints import Call, Hint
from engine.home.recovery import OWNERS
from engine.home.rows import HOLDS_DEVICE, LOCAL, DeploymentRow, EnvRow, NewRun, RunRow
from engine.home.store_connection import (
    Connection,
    assignments,
    placeholders,
    shared_too_little,
)
from engine.home.store_runs import RunTable
from engine.home.team.fair_queue import take_turns
from engine.home.team.owners import Share
from engine.home.team.tables import ENVS, QUEUES, Queue, seen_envs

MOST_WITHOUT_DEVICE = 4  # runs at once that ask nothing but models behind a URL
_NEWEST_FIRST = "ORDER BY pushed DESC, version DESC"
_READ_AT_ONCE = 20  # queued runs; the first few usually have one that can start
_DEPLOYMENT_SETTABLE = frozenset(
    {"state", "url", "adapters", "serve_base", "memory_bytes", "ended", "message"}
)


class LeaseTable(RunTable):
    """Queued runs and the devices that they get; and runs that another machine put here."""

    def lease_next(
        self,
        devices: Sequence[str],
        claim: Callable[[RunRow], bool] | None = None,
        choose: Callable[[RunRow, Sequence[str]], str] | None = None,
        can_start: Callable[[RunRow], bool] | None = None,
        runs_per_device: int = 1,
        elsewhere: Mapping[str, int] | None = None,
    ) -> RunRow | None:
        """Assign free devices to the oldest queued run and set its state to "preparing".

        A run gets all of its `gpus` devices (at most those of the machine) or none. If fewer are
        free, they are kept for the run: no later run starts before it.

        Args:
            devices: ids of the devices that may be assigned.
            claim: takes the run's lock inside the transaction, so that nobody sees a run that is
                preparing while its lock is free. If it returns False, the run stays queued, and the
                next one is tried. None claims nothing.
            choose: returns the ids of the free devices for a run, separated by commas, or "" if
                none has room: the run then stays queued. None takes the first free devices.
            can_start: returns whether a run could start if enough devices were free; if not, no
                devices are kept for it. None means that every run could.
            runs_per_device: how many runs may hold a device. If it is more than 1, `choose` says
                whether a device has room for another run.
            elsewhere: other machines, as `compute` of a run names them -> how many runs each takes
                at once.

        A run that waits for others is passed over. A run on no device starts at once, as long as
        fewer than `MOST_WITHOUT_DEVICE` are under way. Returns the changed row; None if no device
        is free or no queued run can start.
        """
        with self._write():
            leased = self._lease_without_device(claim)
            leased = leased or self._lease_elsewhere(claim, elsewhere or {})
            if leased is not None:
                return leased
            runs_on_device = self.runs_on_devices()
            free_devices = [
                device for device in devices if runs_on_device[device] < runs_per_device
            ]
            if not free_devices:
                return None
            for row in self._runs_in_order("here"):
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

    def _lease_without_device(self, claim: Callable[[RunRow], bool] | None) -> RunRow | None:
        """Set the oldest queued run that needs no device to "preparing", and return its row; None
        if no such run can start. `claim` takes the run's lock; if it returns False, the next run is
        tried; None claims nothing."""
        for row in self._runs_in_order("without_device"):
            if self._count_without_device() >= MOST_WITHOUT_DEVICE:
                return None
            if claim is None or claim(row):
                return self._lease(row.run_id, device="")
        return None

    def _count_without_device(self) -> int:
        """Return how many runs that need no device are under way."""
        question_marks = placeholders(HOLDS_DEVICE)
        (count,) = self._db.execute(
            f"SELECT COUNT(*) FROM runs WHERE gpus = 0 AND state IN ({question_marks})",
            HOLDS_DEVICE,
        ).fetchone()
        return int(count)

    def _lease_elsewhere(
        self, claim: Callable[[RunRow], bool] | None, run_limits: Mapping[str, int]
    ) -> RunRow | None:
        """Set the oldest queued run that is to run on another machine with room to "preparing", and
        return its row; None if no such run can start.

        Args:
            claim: takes the run's lock; if it returns False, the next run is tried. None claims
                nothing.
            run_limits: machine -> how many runs it takes at once. A leased run has the machine as
                its device.
        """
        if not run_limits:
            return None
        runs_on_machine = self.runs_on_devices()
        machines_with_room = [
            machine for machine, limit in run_limits.items() if runs_on_machine[machine] < limit
        ]
        queues = [self._runs_in_order("elsewhere", machine) for machine in machines_with_room]
        oldest_first = heapq.merge(*queues, key=lambda row: (row.queued, row.rowid))
        for row in oldest_first:
            if claim is None or claim(row):
                return self._lease(row.run_id, row.compute)
        return None

    def _runs_in_order(self, queue: Queue, machine: str = "") -> Iterator[RunRow]:
        """Yield the runs of a queue in the order in which they will start; runs that wait for
        others are left out.

        Of the queue "elsewhere" only the runs for `machine` are yielded. The rows are read a few at
        a time, so whoever takes the first one does not pay for the length of the queue.
        """
        pairs = self._owners_and_priorities(queue, machine)
        if len(pairs) == 1:  # the usual case: the oldest run is next
            ((owner, priority),) = pairs
            yield from self._oldest_first(queue, machine, owner, priority)
            return
        runs_of_owner: dict[str, list[Iterator[RunRow]]] = {}  # one iterator for each priority
        for owner, priority in pairs:
            runs = self._oldest_first(queue, machine, owner, priority)
            runs_of_owner.setdefault(owner, []).append(runs)
        yield from take_turns(runs_of_owner, self._hours_used_lately() if pairs else {})

    def _owners_and_priorities(self, queue: Queue, machine: str) -> list[tuple[str, str]]:
        """Return (owner, priority) of the runs of a queue, each pair once.

        Of the queue "elsewhere" only the runs for `machine` count.
        """
        machine_values = (machine,) if queue == "elsewhere" else ()
        select = f"SELECT owner, priority FROM runs {QUEUES[queue]} AND"
        first = "ORDER BY owner, priority LIMIT 1"
        pairs: list[tuple[str, str]] = []
        owner, priority = "", ""
        # One pair after another is looked up in the index: DISTINCT would read the whole queue.
        while True:
            next_pairs = self._read(
                f"{select} owner = ? AND priority > ? {first}", (*machine_values, owner, priority)
            ) or self._read(f"{select} owner > ? {first}", (*machine_values, owner))
            if not next_pairs:
                return pairs
            owner, priority = next_pairs[0]
            pairs.append((owner, priority))

    def _oldest_first(
        self, queue: Queue, machine: str, owner: str, priority: str
    ) -> Iterator[RunRow]:
        """Yield the runs of an owner and a priority in a queue, the oldest first.

        Of the queue "elsewhere" only the runs for `machine` are yielded. The rows are read a few at
        a time.
        """
        queue_values = (machine, owner, priority) if queue == "elsewhere" else (owner, priority)
        last = (0.0, 0)  # time in the queue and row id of the last run that was read
        clauses = (
            f"{QUEUES[queue]} AND owner = ? AND priority = ? "
            "AND (queued, rowid) > (?, ?) ORDER BY queued, rowid LIMIT ?"
        )
        while True:
            rows = self._rows_of("runs", (), clauses, (*queue_values, *last, _READ_AT_ONCE))
            yield from rows
            if len(rows) < _READ_AT_ONCE:
                return
            last = (rows[-1].queued, rows[-1].rowid)

    def has_queued(self) -> bool:
        """Return whether any run is queued."""
        return bool(self._read("SELECT 1 FROM runs WHERE state = 'queued' LIMIT 1", ()))

    def has_ready(self) -> bool:
        """Return whether any queued run waits for no other run."""
        query = "SELECT 1 FROM runs WHERE state = 'queued' AND waits_for = '' LIMIT 1"
        return bool(self._read(query, ()))

    def waiting_runs(self) -> list[RunRow]:
        """Return the queued runs that wait for others, in the order in which they were queued."""
        clauses = "INDEXED BY queued_behind WHERE state = 'queued' AND waits_for != ''"
        return self._rows_of("runs", (), f"{clauses} ORDER BY queued, rowid", ())

    def _lease(self, run_id: str, device: str) -> RunRow:
        """Assign `device` (ids of devices, separated by commas) to a queued run, set its state to
        "preparing", and return its row."""
        self._change_state(run_id, old="queued", new="preparing", values={"device": device})
        return self._run(run_id)

    def runs_on_devices(self) -> Counter[str]:
        """Return device id -> how many runs hold the device now.

        Another machine counts as a device too; its id is the `compute` of its runs, e.g. "ssh:box".
        """
        query = f"SELECT device FROM runs WHERE state IN ({placeholders(HOLDS_DEVICE)})"
        leased = self._read(query, HOLDS_DEVICE)
        return Counter(device for (devices,) in leased for device in devices.split(","))

    def held_devices(self) -> int:
        """Return how many devices all runs hold together, here and on other machines."""
        query = (
            f"SELECT coalesce(sum(gpus), 0) FROM runs WHERE state IN ({placeholders(HOLDS_DEVICE)})"
        )
        ((total,),) = self._read(query, HOLDS_DEVICE)
        return int(total)

    def place_run(self, new: NewRun, run_id: str) -> RunRow:
        """Queue a run under the id that it has on another machine, and return its row."""
        with self._write():
            number = int(run_id.rpartition("-")[2])  # 3 for "sums-grpo-3"
            self._insert_queued(new, run_id, number)
            self._log_state(run_id, old="", new="queued")
            return self._run(run_id)

    def forget_run(self, run_id: str) -> None:
        """Delete the row of a run and its history, where there is one."""
        with self._write():
            for table in ("history", "requests", "runs"):
                self._db.execute(f"DELETE FROM {table} WHERE run_id = ?", (run_id,))


class EnvTable(Connection):
    """Versions of pushed environments."""

    def add_env(self, name: str, hash12: str, *, kind: str, info: Mapping[str, Any]) -> EnvRow:
        """Record a pushed version of an environment, and return its row.

        A version that was pushed before becomes the newest of its name again, and its `info` is
        replaced.

        Args:
            name: the environment's name.
            hash12: the first 12 digits of the hash of the version's files.
            kind: the version's kind, such as "single", "multi" or "sft".
            info: what lists of environments show of the version, as JSON values.
        """
        env_id = f"{name}@{hash12}"
        now = time.time()
        with self._write():
            self._db.execute(
                "INSERT INTO envs (env_id, name, hash, kind, created, pushed, info) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (env_id) DO UPDATE SET "
                "pushed = excluded.pushed, info = excluded.info",
                (env_id, name, hash12, kind, now, now, json.dumps(dict(info))),
            )
            self._db.execute(
                "INSERT INTO env_owners (env_id, owner, pushed) VALUES (?, ?, ?) "
                "ON CONFLICT (env_id, owner) DO UPDATE SET pushed = excluded.pushed",
                (env_id, self._owner, now),
            )
            rows = self._envs(ENVS, (), "WHERE env_id = ?", (env_id,))
        folder = self.home.env(name, hash12)
        owners = [row.owner for row in rows]
        # The owners are also written to a file, from which a lost database is filled again. Without
        # that file a version belongs to the local user ("").
        if owners != [""] and folder.is_dir():
            write_json(folder / OWNERS, {"owners": owners})
        return next(row for row in rows if row.owner == self._owner)

    def find_env(self, ref: str) -> list[EnvRow]:
        """Return the versions that `ref` may mean, the newest push first; [] if nothing matches.

        `ref` is looked for first as the id of a version, then as the name of versions, then as the
        beginning of ids. The first of these that matches counts. "" matches nothing. Of each, what
        the viewer owns comes before what others share; `OWNER/` before it means that of an owner,
        `local/` that of the local user.

        Raises UserError ENV_AMBIGUOUS if several others share what `ref` may mean, and FORBIDDEN if
        the viewer may only read what it means.
        """
        versions = self._matching_envs(ref, *self._seen_envs)
        if not versions and self._matching_envs(ref, *self._readable(seen_envs)):
            raise shared_too_little(ref, "env_id")
        return versions

    def sees_env(self, env_id: str) -> bool:
        """Return whether there is a version with exactly this id that the viewer sees."""
        return bool(self._envs(*self._seen_envs, "WHERE env_id = ?", (env_id,)))

    def _matching_envs(self, ref: str, source: str, values: Sequence[Any]) -> list[EnvRow]:
        """Return the versions in `source` that `ref` may mean, by the rules of `find_env`.

        `source` is the SQL that stands after FROM, `values` replace its question marks. Raises
        UserError ENV_AMBIGUOUS if others than the viewer own them, and not one and the same.
        """
        owner, slash, name = ref.rpartition("/")  # "OWNER/" is optional
        owner = "" if owner == LOCAL else owner  # rows of the local user have the owner ""
        if not name:  # otherwise "" would match all, because every id begins with it
            return []
        searches = (
            ("env_id = ?", (name,)),
            ("name = ?", (name,)),
            ("substr(env_id, 1, ?) = ?", (len(name), name)),  # the beginning of an id
        )
        for condition, condition_values in searches:
            clauses = f"WHERE {condition} {_NEWEST_FIRST}"
            versions = self._envs(source, values, clauses, condition_values)
            if slash:  # `ref` names the owner
                versions = [row for row in versions if row.owner == owner]
            if versions:  # what the viewer owns comes before what others share
                return self._of_one_owner(name, versions)
        return []

    def _of_one_owner(self, name: str, versions: list[EnvRow]) -> list[EnvRow]:
        """Return those of the versions that belong to the viewer, else those of their only owner.

        A single version that several others own is returned once. Raises UserError ENV_AMBIGUOUS if
        several others own different versions called `name`.
        """
        own = [row for row in versions if row.owner == self._owner]
        if own:
            return own
        is_one_version = len({row.env_id for row in versions}) == 1
        if is_one_version:
            return versions[:1]
        owners = sorted({row.owner for row in versions})
        if len(owners) == 1:
            return versions
        raise UserError(
            "ENV_AMBIGUOUS",
            f"{name} is the name of environments of {len(owners)} keys",
            hint="Name one: " + ", ".join(f"{owner or LOCAL}/{name}" for owner in owners[:5]) + ".",
            field="env_id",
        )

    def list_envs(self, limit: int = 1000, offset: int = 0) -> list[EnvRow]:
        """Return at most `limit` versions, the newest push first; skip the first `offset`.

        A version of several owners has a row for each. It is listed once, at the place of its
        newest push: with the viewer's own row if there is one, else with the newest.
        """
        source, source_values = self._seen_envs  # the versions that the viewer may see
        versions: dict[str, EnvRow] = {}  # by id; a dict keeps a replaced row's place
        for row in self._envs(source, source_values, _NEWEST_FIRST, ()):
            is_viewers_own = row.owner == self._owner
            if row.env_id not in versions or is_viewers_own:
                versions[row.env_id] = row
        return list(versions.values())[offset : offset + limit]

    def delete_env(self, env_id: str) -> bool:
        """Delete the row of a version, and return whether the row existed."""
        with self._write():
            self._db.execute("DELETE FROM env_owners WHERE env_id = ?", (env_id,))
            self._db.execute("DELETE FROM shares WHERE kind = 'env' AND name = ?", (env_id,))
            cursor = self._db.execute("DELETE FROM envs WHERE env_id = ?", (env_id,))
            return cursor.rowcount == 1

    def _envs(
        self, source: str, source_values: Sequence[Any], clauses: str, values: Sequence[Any]
    ) -> list[EnvRow]:
        """Return the versions, one for each owner, that a SELECT of `source` (what stands after
        FROM) with these SQL `clauses` finds. The values replace the question marks of each."""
        rows = self._read(
            "SELECT env_id, name, hash, kind, created, pushed, info, owner "
            f"FROM {source} {clauses}",
            (*source_values, *values),
        )
        return [EnvRow(*row[:6], info=json.loads(row[6]), owner=row[7]) for row in rows]


class DeploymentTable(Connection):
    """Serving processes, including those that have ended."""

    def add_deployment(
        self,
        *,
        base_name: str,
        base_path: str,
        adapters: Sequence[Mapping[str, str]],
        serve_base: bool,
        memory_bytes: int,
    ) -> DeploymentRow:
        """Record a deployment that is about to start, and return its row.

        The deployment's id is the last part of the base model's name and a number, such as
        "Qwen3-0.6B-2".

        Args:
            base_name, base_path: the name and the folder of the base model.
            adapters: the adapters to serve: {"name", "path"} each.
            serve_base: whether the base model itself can be asked too.
            memory_bytes: the bytes that the deployment is expected to need on its device.
        """
        with self._write():
            deployment_id = self._next_deployment_id(base_name)
            self._db.execute(
                "INSERT INTO deployments (deployment_id, base_name, base_path, adapters, "
                "serve_base, memory_bytes, created, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    deployment_id,
                    base_name,
                    base_path,
                    json.dumps([dict(item) for item in adapters]),
                    int(serve_base),
                    memory_bytes,
                    time.time(),
                    self._owner,
                ),
            )
        return self.get_deployment(deployment_id)

    def _next_deployment_id(self, base_name: str) -> str:
        """Return the next free id of a deployment of this base model, such as "Qwen3-0.6B-2"."""
        last_part = base_name.rstrip("/").rsplit("/", 1)[-1]
        # Characters that do not suit the name of a folder become "-".
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last_part) or "base"
        # The deployments of all base models of one owner are counted together.
        query = "SELECT count(*) FROM deployments WHERE owner = ?"
        (count,) = self._db.execute(query, (self._owner,)).fetchone()
        number = count + 1
        name = self._name_of_owner(name)
        # A folder may exist without a row, if the row was lost with a damaged database.
        while self.home.deployment(f"{name}-{number}").path.exists():
            number += 1
        return f"{name}-{number}"

    def get_deployment(self, deployment_id: str) -> DeploymentRow:
        """Return the deployment with this id. Raises UserError DEPLOYMENT_NOT_FOUND if there is
        none."""
        rows = self._deployments("WHERE deployment_id = ?", (deployment_id,))
        if not rows:
            raise UserError(
                "DEPLOYMENT_NOT_FOUND",
                f"there is no deployment {deployment_id!r}",
                hint=Hint("To list them:", Call("get_status", {"scope": "deployments"})),
            )
        return rows[0]

    def list_deployments(
        self, states: Sequence[str] | None = None, limit: int = 100
    ) -> list[DeploymentRow]:
        """Return at most `limit` deployments, the newest first.

        Only deployments in one of `states` are returned; None means any state.
        """
        condition = f"WHERE state IN ({placeholders(states)})" if states else ""
        return self._deployments(
            f"{condition} ORDER BY rowid DESC LIMIT ?", (*(states or ()), limit)
        )

    def update_deployment(self, deployment_id: str, **values: Any) -> None:
        """Set fields of a deployment's row. Raises ValueError if a field may not be changed, which
        is a bug of the caller."""
        unknown = set(values) - _DEPLOYMENT_SETTABLE
        if unknown:
            raise ValueError(f"no such deployment fields: {sorted(unknown)}")
        if "adapters" in values:
            values["adapters"] = json.dumps(values["adapters"])
        with self._write():
            self._db.execute(
                f"UPDATE deployments SET {assignments(values)} WHERE deployment_id = ?",
                (*values.values(), deployment_id),
            )

    def _deployments(self, clauses: str, values: Sequence[Any]) -> list[DeploymentRow]:
        """Return the deployments which the viewer sees that a SELECT with these SQL `clauses`
        finds; `values` replace its question marks."""
        columns = [item.name for item in fields(DeploymentRow)]
        source, source_values = self._seen_deployments
        value_rows = self._read(
            f"SELECT {', '.join(columns)} FROM {source} {clauses}", (*source_values, *values)
        )
        rows = []
        for row_values in value_rows:
            row = dict(zip(columns, row_values, strict=True))
            row["adapters"] = json.loads(row["adapters"])
            row["serve_base"] = bool(row["serve_base"])
            rows.append(DeploymentRow(**row))
        return rows


class ShareTable(Connection):
    """What owners let others see."""

    def add_share(self, share: Share) -> None:
        """Store a share; an earlier share of the same thing with the same grantee is replaced."""
        with self._write():
            self._db.execute(
                "INSERT INTO shares (kind, name, owner, grantee, may) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (kind, name, owner, grantee) DO UPDATE SET may = excluded.may",
                astuple(share),
            )

    def remove_shares(self, kind: str, name: str, owner: str, grantee: str = "") -> int:
        """Stop sharing something with `grantee`, or with everybody if that is "". Returns how many
        shares were removed."""
        condition, condition_values = ("AND grantee = ?", (grantee,)) if grantee else ("", ())
        with self._write():
            cursor = self._db.execute(
                f"DELETE FROM shares WHERE kind = ? AND name = ? AND owner = ? {condition}",
                (kind, name, owner, *condition_values),
            )
            return cursor.rowcount

    def list_shares(self) -> list[Share]:
        """Return the shares of the viewer, or those of all owners if the viewer sees everything."""
        viewer = self.home.viewer
        sees_all = viewer is None or viewer.sees_all
        condition, values = ("", ()) if sees_all else ("WHERE owner = ?", (self._owner,))
        rows = self._read(
            f"SELECT kind, name, owner, grantee, may FROM shares {condition} "
            "ORDER BY kind, name, owner, grantee",
            values,
        )
        return [Share(*row) for row in rows]


class EstimateTable(Connection):
    """The predicted and the actual device hours of finished runs."""

    def record_estimate(
        self, algorithm: str, features: Mapping[str, Any], predicted: float, actual: float
    ) -> None:
        """Store the predicted and the actual device hours of a finished run.

        Later estimates are corrected by them.

        Args:
            algorithm: the algorithm of the run, such as "grpo".
            features: the run's id, device and model, as JSON values, to find similar runs.
            predicted, actual: device hours.
        """
        with self._write():
            self._db.execute(
                "INSERT INTO estimates (at, kind, features, predicted, actual) "
                "VALUES (?, ?, ?, ?, ?)",
                (time.time(), algorithm, json.dumps(dict(features)), predicted, actual),
            )

    def calibration(self, algorithm: str, limit: int = 50) -> list[dict[str, Any]]:
        """Return the last `limit` records of an algorithm's finished runs, the newest first.

        Each record is {"features", "predicted", "actual", "at"}, as `record_estimate` stored it,
        with the time `at` in unix seconds.
        """
        rows = self._read(
            "SELECT features, predicted, actual, at FROM estimates WHERE kind = ? "
            "ORDER BY rowid DESC LIMIT ?",
            (algorithm, limit),
        )
        return [
            {"features": json.loads(features), "predicted": predicted, "actual": actual, "at": at}
            for features, predicted, actual, at in rows
        ]


class Store(LeaseTable, EnvTable, DeploymentTable, ShareTable, EstimateTable):
    """All tables of a home over one connection."""
