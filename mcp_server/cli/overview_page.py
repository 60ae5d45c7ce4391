"""Writes one HTML page of all runs and environments of a home. The page opens offline and links the
report of each run."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import jinja2

from engine.core.errors import UserError
from engine.core.files import write_text
from engine.core.format import counted
from engine.core.reply import Reply
from engine.evidence.report.html_report import write_report
from engine.home.rows import LOCAL, TERMINAL, EnvRow, RunRow
from engine.home.run_dir import Home
from engine.home.sanitize import clean_value
from engine.home.store import Store
from mcp_server.api.replies import with_head

MAX_ROWS = 500  # of each table; the newest
NOTE_CHARS = 200

# The page allows no scripts and loads nothing: names of runs and environments are untrusted text.
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Honesmith</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
td { overflow-wrap: anywhere }
</style></head><body>
<h1>Honesmith</h1>
<p>{{ home }}, {{ now }}. Written anew by <code>honesmith ui</code>.</p>
<h2>Runs</h2>
<table><tr><th>run</th><th>state</th><th>verdict</th><th>environment</th><th>model</th>
<th>submitted</th><th>owner</th><th>note</th></tr>
{% for run in runs %}<tr>
<td>{% if run.report %}<a href="{{ run.report }}">{{ run.id }}</a>{% else %}{{ run.id }}{% endif %}
</td><td>{{ run.state }}</td><td>{{ run.verdict }}</td><td>{{ run.env }}</td>
<td>{{ run.model }}</td><td>{{ run.created }}</td><td>{{ run.owner }}</td>
<td>{{ run.note }}</td></tr>
{% else %}<tr><td colspan="8">No run was submitted here yet.</td></tr>{% endfor %}</table>
<h2>Environments</h2>
<table><tr><th>version</th><th>kind</th><th>train</th><th>held out</th><th>audit</th>
<th>owner</th></tr>
{% for env in envs %}<tr><td>{{ env.id }}</td><td>{{ env.kind }}</td><td>{{ env.train }}</td>
<td>{{ env.heldout }}</td><td>{{ env.audit }}</td><td>{{ env.owner }}</td></tr>
{% else %}<tr><td colspan="6">No environment was pushed here yet.</td></tr>{% endfor %}</table>
</body></html>
"""


def write_page(home: Home) -> Reply:
    """Write the page of all runs and environments, and a report for each ended run that has none.

    Returns a reply with `page` (the path of the page), `runs` and `envs` (how many it lists).
    """
    with Store(home) as store:  # the newest of each
        run_rows = store.list_runs(MAX_ROWS)
        envs = store.list_envs(MAX_ROWS)
    _write_missing_reports(home, run_rows)
    text = _page_text(home, run_rows, envs)
    home.page.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(home.page, text, fsync=False)  # a page lost in a crash can be written again
    reply = {"page": str(home.page), "runs": len(run_rows), "envs": len(envs)}
    return with_head(reply, f"The page of {counted(len(run_rows), 'run')} is {home.page}")


def _page_text(home: Home, run_rows: Sequence[RunRow], envs: Sequence[EnvRow]) -> str:
    """Fill the template of the page with these runs and environments, and return the HTML."""
    # autoescape: names and notes are untrusted text, which must not become HTML.
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_PAGE)
    context = {
        "runs": [_run_fields(home, row) for row in run_rows],
        "envs": [_env_fields(env) for env in envs],
        "home": str(home.root),
        "now": _utc_time(),
    }
    return page.render(**clean_value(context))


def _write_missing_reports(home: Home, rows: Sequence[RunRow]) -> None:
    """Write the report of each ended run that has none; a run whose files are damaged gets none."""
    for row in rows:
        # A damaged file can raise any of these errors; the page must still list the other runs.
        with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError):
            if row.state in TERMINAL and not home.run(row.run_id).report.exists():
                write_report(home, row.run_id)


def _env_fields(env: EnvRow) -> Mapping[str, object]:
    """Return what the page shows of an environment version: name in the template -> value.
    `train` and `heldout` are the numbers of its tasks in these two splits."""
    row_counts = env.info.get("rows", {})  # by split
    return {
        "id": env.env_id,
        "kind": env.kind,
        "train": row_counts.get("train", 0),
        "heldout": row_counts.get("heldout", 0),
        "audit": env.info.get("audit", ""),
        "owner": env.owner or LOCAL,  # "" is the local user
    }


def _run_fields(home: Home, row: RunRow) -> dict[str, str]:
    """Return what the page shows of a run: name in the template -> text."""
    return {
        "id": row.run_id,
        "state": row.state,
        "verdict": row.verdict.replace("_", " "),
        "env": row.env_id,
        "model": row.model,
        "created": _utc_time(row.created),
        "note": row.note[:NOTE_CHARS],
        "owner": row.owner or LOCAL,  # "" is the local user
        "report": _report_address(home, row),
    }


def _report_address(home: Home, row: RunRow) -> str:
    """Return the file:// address of a run's report; "" if the run goes on or has no report."""
    report: Path = home.run(row.run_id).report
    if row.state not in TERMINAL or not os.path.exists(report):
        return ""
    return report.as_uri()


def _utc_time(seconds: float | None = None) -> str:
    """Return a time, given in unix seconds, as "2026-07-28 12:00 UTC"; None is the present time."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")
