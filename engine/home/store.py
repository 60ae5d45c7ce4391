"""The rows that need a transaction: runs and their leases, environments, deployments, estimates.

What grows (metrics, rollouts, logs) is in files, not here. SQL stands in the modules store*.py and
in database.py alone.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.home.rows import DeploymentRow, EnvRow
from engine.home.store_connection import Connection, assignments, placeholders
from engine.home.store_runs import RunTable

_DEPLOYMENT_SETTABLE = frozenset(
    {"state", "url", "adapters", "serve_base", "memory_bytes", "ended", "message"}
)


class EnvTable(Connection):
    """Versions of pushed environments."""

    def add_env(self, name: str, hash12: str, *, kind: str, info: Mapping[str, Any]) -> EnvRow:
        """Record a pushed version. A version that was pushed before becomes the newest of its name
        again, and its `info` is replaced."""
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
        """The versions that `ref` may mean, newest first: the one with this id, else all of this
        name, else all whose id begins with `ref`. [] where nothing matches, and for ""."""
        newest_first = "ORDER BY pushed DESC, rowid DESC"
        for condition, value in (("env_id = ?", ref), ("name = ?", ref)):
            versions = self._envs(f"WHERE {condition} {newest_first}", (value,))
            if versions:
                return versions
        return (
            self._envs(f"WHERE substr(env_id, 1, ?) = ? {newest_first}", (len(ref), ref))
            if ref
            else []
        )

    def list_envs(self, limit: int = 1000, offset: int = 0) -> list[EnvRow]:
        """Versions, the last pushed first; `offset` of them are skipped."""
        return self._envs("ORDER BY pushed DESC, rowid DESC LIMIT ? OFFSET ?", (limit, offset))

    def delete_env(self, env_id: str) -> bool:
        """Delete the row of a version. Returns whether there was one."""
        with self._write():
            cursor = self._db.execute("DELETE FROM envs WHERE env_id = ?", (env_id,))
            return cursor.rowcount == 1

    def _envs(self, clauses: str, values: Sequence[Any]) -> list[EnvRow]:
        """The versions that the SQL `clauses` with their `values` select."""
        rows = self._read(
            f"SELECT env_id, name, hash, kind, created, pushed, info FROM envs {clauses}",
            tuple(values),
        )
        return [EnvRow(*row[:-1], info=json.loads(row[-1])) for row in rows]


class DeploymentTable(Connection):
    """Serving processes, those that ended too."""

    def add_deployment(
        self,
        *,
        base_name: str,
        base_path: str,
        adapters: Sequence[Mapping[str, str]],
        serve_base: bool,
        memory_bytes: int,
    ) -> DeploymentRow:
        """Record a deployment that is about to start. Its id is the base model's name and a
        number."""
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
        """Deployments, newest first, at most `limit`; only those in one of `states`, or all for
        None."""
        condition = f"WHERE state IN ({placeholders(states)})" if states else ""
        return self._deployments(
            f"{condition} ORDER BY rowid DESC LIMIT ?", (*(states or ()), limit)
        )

    def update_deployment(self, deployment_id: str, **values: Any) -> None:
        """Change fields of a deployment. Raises ValueError for a field that cannot be changed."""
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
        """The deployments that the SQL `clauses` with their `values` select."""
        columns = [item.name for item in fields(DeploymentRow)]
        value_rows = self._read(
            f"SELECT {', '.join(columns)} FROM deployments {clauses}", tuple(values)
        )
        rows = []
        for row_values in value_rows:
            row = dict(zip(columns, row_values, strict=True))
            row["adapters"] = json.loads(row["adapters"])
            row["serve_base"] = bool(row["serve_base"])
            rows.append(DeploymentRow(**row))
        return rows


class EstimateTable(Connection):
    """What was predicted of finished runs, and what came."""

    def record_estimate(
        self, kind: str, features: Mapping[str, Any], predicted: float, actual: float
    ) -> None:
        """Keep a finished run's predicted and actual device hours, so that later estimates are
        calibrated by them.

        Args:
            kind: the algorithm.
            features: what tells which runs are alike, as JSON values.
        """
        with self._write():
            self._db.execute(
                "INSERT INTO estimates (at, kind, features, predicted, actual) "
                "VALUES (?, ?, ?, ?, ?)",
                (time.time(), kind, json.dumps(dict(features)), predicted, actual),
            )

    def calibration(self, kind: str, limit: int = 50) -> list[dict[str, Any]]:
        """The last `limit` predictions of a kind with what came of them, newest first: {"features",
        "predicted", "actual", "at" (unix seconds)} each."""
        rows = self._read(
            "SELECT features, predicted, actual, at FROM estimates WHERE kind = ? "
            "ORDER BY rowid DESC LIMIT ?",
            (kind, limit),
        )
        return [
            {"features": json.loads(features), "predicted": predicted, "actual": actual, "at": at}
            for features, predicted, actual, at in rows
        ]


class Store(RunTable, EnvTable, DeploymentTable, EstimateTable):
    """All tables of a home over one connection."""
