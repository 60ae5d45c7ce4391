"""The rows that need a transaction: runs and their leases, environments, deployments, estimates.

Growing data (metrics, rollouts, logs) is in files and not in the database. Only the modules
store*.py and database.py contain SQL.
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
        return self._envs("WHERE env_id = ?", (env_id,))[0]

    def find_env(self, ref: str) -> list[EnvRow]:
        """Return the versions that `ref` may mean, the newest push first; [] if nothing matches.

        `ref` is looked for first as the id of a version, then as the name of versions, then as the
        beginning of ids. The first of these that matches counts. "" matches nothing.
        """
        newest_first = "ORDER BY pushed DESC, rowid DESC"
        for column in ("env_id", "name"):
            versions = self._envs(f"WHERE {column} = ? {newest_first}", (ref,))
            if versions:
                return versions
        if not ref:  # otherwise "" would match all, because every id begins with it
            return []
        return self._envs(f"WHERE substr(env_id, 1, ?) = ? {newest_first}", (len(ref), ref))

    def list_envs(self, limit: int = 1000, offset: int = 0) -> list[EnvRow]:
        """Return at most `limit` versions, the newest push first; skip the first `offset`."""
        return self._envs("ORDER BY pushed DESC, rowid DESC LIMIT ? OFFSET ?", (limit, offset))

    def delete_env(self, env_id: str) -> bool:
        """Delete the row of a version, and return whether the row existed."""
        with self._write():
            cursor = self._db.execute("DELETE FROM envs WHERE env_id = ?", (env_id,))
            return cursor.rowcount == 1

    def _envs(self, clauses: str, values: Sequence[Any]) -> list[EnvRow]:
        """Return the versions that a SELECT with these SQL `clauses` finds; `values` replace its
        question marks."""
        rows = self._read(
            f"SELECT env_id, name, hash, kind, created, pushed, info FROM envs {clauses}",
            tuple(values),
        )
        return [EnvRow(*row[:-1], info=json.loads(row[-1])) for row in rows]


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

    def _next_deployment_id(self, base_name: str) -> str:
        """Return the next free id of a deployment of this base model, such as "Qwen3-0.6B-2"."""
        last_part = base_name.rstrip("/").rsplit("/", 1)[-1]
        # Characters that do not suit the name of a folder become "-".
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last_part) or "base"
        # The deployments of all base models are counted together.
        number = self._db.execute("SELECT count(*) FROM deployments").fetchone()[0] + 1
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
        """Return the deployments that a SELECT with these SQL `clauses` finds; `values` replace its
        question marks."""
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


class Store(RunTable, EnvTable, DeploymentTable, EstimateTable):
    """All tables of a home over one connection."""
