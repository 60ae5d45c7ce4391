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
            versions = self._envs(f"WHERE {where} {newest}", (value,))
            if versions:
                return versions
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

    def _envs(self, tail: str, values: Sequence[Any]) -> list[EnvRow]:
        rows = self._read(
            f"SELECT env_id, name, hash, kind, created, pushed, info FROM envs {tail}",
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
        """Deployments, newest first."""
        where = f"WHERE state IN ({placeholders(states)})" if states else ""
        return self._deployments(f"{where} ORDER BY rowid DESC LIMIT ?", (*(states or ()), limit))

    def update_deployment(self, deployment_id: str, **values: Any) -> None:
        """Change fields of a deployment; ValueError for one that there is not."""
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

    def _deployments(self, tail: str, values: Sequence[Any]) -> list[DeploymentRow]:
        columns = [item.name for item in fields(DeploymentRow)]
        stored = self._read(f"SELECT {', '.join(columns)} FROM deployments {tail}", tuple(values))
        rows = []
        for row_values in stored:
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
        """Keep what was predicted and what came, so that later estimates are calibrated."""
        with self._write():
            self._db.execute(
                "INSERT INTO estimates (at, kind, features, predicted, actual) "
                "VALUES (?, ?, ?, ?, ?)",
                (time.time(), kind, json.dumps(dict(features)), predicted, actual),
            )

    def calibration(self, kind: str, limit: int = 50) -> list[dict[str, Any]]:
        """The last predictions of a kind, newest first: features, predicted, actual, at."""
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
