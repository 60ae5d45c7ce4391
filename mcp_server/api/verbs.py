"""The verbs of Honesmith: each calls exactly one engine function and fills in what it left out.

The MCP tools and the command line are two faces of these functions. Engine modules are imported
inside them because a server must answer its first request before it needs any of them
(measured: the imports together cost more than the rest of the start-up that is ours).
"""
# ruff: noqa: PLC0415

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit.requests import EvaluationRequest, GivenSettings, TrainRequest
from mcp_server.access.keys import LOCAL, Key, agreed_by_owner
from mcp_server.api.replies import fit

MAX_WAIT_S = 50.0


def get_status(
    home: Home, scope: str = "all", limit: int = 20, cursor: str = "", key: Key = LOCAL
) -> Reply:
    """Devices, queue, runs, environments and models; with the limits of `key`, if it has any."""
    from engine.runs import lifecycle

    limits: Reply = {}
    if key.is_limited and scope in ("all", "runs"):
        from mcp_server.access import quotas

        limits = {"key": quotas.standing(home, key)}
    reply = fit(lambda count: lifecycle.overview(home, scope, count, cursor) | limits, limit)
    return filled(reply, f"Status of {scope}.")


def push_env(
    home: Home,
    path: str,
    name: str = "",
    install: bool = False,
    roots: Sequence[Path] | None = None,
    key: Key = LOCAL,
) -> Reply:
    """Store an environment as a version. Raises UserError, codes ENV_* and DATASET_INVALID."""
    from engine.environments import push

    if install:
        key.require("install", "push_env with install=true")
    place = path if roots is None else from_roots(path, roots)
    reply = push.push_env(
        home,
        place,
        name=name,
        install=install,
        roots=None if roots is None else list(roots),
        allowed=partial(agreed_by_owner, home, key),
    )
    return filled(
        reply.to_json(), f"Pushed {reply.env_id}.", suggest("dry_run", env_id=reply.env_id)
    )


def dry_run(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: GivenSettings | None = None,
    samples: int = 0,
    key: Key = LOCAL,
) -> Reply:
    """Check a plan without training; with `samples`, also try the model."""
    from engine import dry_run as engine_dry_run

    reply = engine_dry_run.dry_run(
        home, env_id, model, algorithm, dict(settings or {}), samples, _afford(home, key)
    )
    return filled(reply, f"Checked {algorithm} of {model} on {env_id}.")


def estimate_cost(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: GivenSettings | None = None,
) -> Reply:
    """What a run will take, from the same plan as a dry run."""
    from engine.cost import estimate

    reply = estimate.estimate_cost(home, env_id, model, algorithm, dict(settings or {}))
    return filled(reply, f"Estimated {algorithm} of {model} on {env_id}.")


def submit_train(home: Home, request: TrainRequest) -> Reply:
    """Queue a training run. Raises UserError when the plan cannot be trained."""
    from engine.runs import lifecycle

    reply = lifecycle.submit(home, request)
    run_id = reply.get("run_id", "")
    reply.setdefault("metrics_uri", f"run://{run_id}/metrics")
    return filled(
        reply, f"{run_id} is {reply.get('state', 'queued')}.", suggest("wait_run", run_id=run_id)
    )


def wait_run(
    home: Home,
    run_id: str,
    until: str = "end",
    timeout_s: float = 45.0,
    cursor: str = "",
    on_progress: Callable[[Reply], None] | None = None,
) -> Reply:
    """Wait at most `MAX_WAIT_S` seconds for a run; `on_progress` gets its status meanwhile."""
    from engine.runs import lifecycle

    timeout_s = min(max(timeout_s, 0.0), MAX_WAIT_S)
    reply = lifecycle.wait(home, run_id, until, timeout_s, cursor, on_progress=on_progress)
    run_id = reply.get("run_id", run_id)
    return filled(reply, f"{run_id} is {reply.get('state')}.", *_after_wait(run_id, until, reply))


def read_logs(
    home: Home,
    run_id: str,
    view: str = "metrics",
    keys: Sequence[str] = (),
    grep: str = "",
    limit: int = 50,
    cursor: str = "",
) -> Reply:
    """A page of metrics, events, console or the error of a run."""
    from engine.reading import logs

    def page(count: int) -> Reply:
        return logs.read_logs(home, run_id, view, list(keys), grep, count, cursor).to_json()

    reply = fit(page, limit)
    return filled(reply, f"{view} of {run_id}.")


def read_rollouts(
    home: Home,
    run_id: str,
    pick: str = "worst",
    step: int = -1,
    where: str = "",
    tokens: bool = False,
    limit: int = 3,
    max_chars: int = 1200,
    cursor: str = "",
) -> Reply:
    """A page of what the model of a run wrote and what it earned."""
    from engine.reading import rollouts
    from engine.reading.rollout_pages import RolloutQuery

    def page(count: int) -> Reply:
        query = RolloutQuery(run_id, pick, step, where, tokens, count, max_chars, cursor)
        return rollouts.read_rollouts(home, query).to_json()

    reply = fit(page, limit)
    return filled(reply, f"{pick} rollouts of {run_id}.")


def evaluate(home: Home, request: EvaluationRequest, key: Key = LOCAL) -> Reply:
    """Queue an evaluation. Raises UserError when it cannot be run."""
    from engine.runs import lifecycle

    reply = lifecycle.submit_evaluation(home, request, _afford(home, key))
    run_id = reply.get("run_id", "")
    return filled(
        reply, f"{run_id} is {reply.get('state', 'queued')}.", suggest("wait_run", run_id=run_id)
    )


def compare_runs(home: Home, ids: Sequence[str], env_id: str = "") -> Reply:
    """Models, runs or evaluations side by side on the same held-out tasks."""
    from engine.evidence.compare import compare

    return filled(compare.compare_runs(home, list(ids), env_id), f"Compared {', '.join(ids)}.")


def diagnose(home: Home, run_id: str) -> Reply:
    """What went wrong in a run, causes before effects."""
    from engine.evidence.detect import diagnose as engine_diagnose

    return filled(engine_diagnose.diagnose(home, run_id), f"Diagnosed {run_id}.")


def curate(
    home: Home,
    source_ids: Sequence[str],
    name: str,
    where: str = "",
    select: str = "correct",
    max_per_task: int = 1,
    pool_models: bool = False,
    preview: bool = True,
) -> Reply:
    """Stored answers as rows of a new SFT dataset; with `preview` nothing is stored."""
    from engine.curation import curate as engine_curate
    from engine.curation.curated import Choices

    choices = Choices(list(source_ids), where, select, max_per_task, pool_models)
    reply = engine_curate.curate(home, name, choices, preview)
    return filled(reply.to_json(), f"Curated {name}.")


def deploy(
    home: Home,
    run_id: str,
    action: str = "start",
    format: str = "adapter",
    path: str = "",
    roots: Sequence[Path] | None = None,
    key: Key = LOCAL,
) -> Reply:
    """Serve a trained model, stop serving it, or export it to `path` (inside `roots`)."""
    from engine.serving import service

    if action == "export" and path and roots is not None:
        path = str(inside_roots(path, roots))
    asker = service.Asker(key.name, key.max_deployments)
    reply = service.deploy(home, run_id, action, format, path, asker)
    after = [suggest("chat", model=reply.get("model", run_id), message="...")]
    return filled(reply, f"{action} {run_id}: done.", *(after if action == "start" else []))


def chat(
    home: Home,
    model: str,
    message: str,
    system: str = "",
    compare_to: str = "",
    max_tokens: int = 512,
    temperature: float = 0.0,
    key: Key = LOCAL,
) -> Reply:
    """Ask a model, and with `compare_to` another one; both are deployed where they are not."""
    from engine.serving import service

    asker = service.Asker(key.name, key.max_deployments)
    reply = service.chat(home, model, message, system, compare_to, max_tokens, temperature, asker)
    return filled(reply, f"{model} answered.")


def cancel_run(home: Home, run_id: str, reason: str = "") -> Reply:
    """Stop a run after a checkpoint. Raises UserError RUN_NOT_FOUND."""
    from engine.runs import lifecycle

    reply = lifecycle.cancel(home, run_id, reason)
    run_id = reply.get("run_id", run_id)
    return filled(
        reply, f"{run_id} is {reply.get('state')}.", suggest("submit_train", resume=run_id)
    )


def read_playbook(section: str = "") -> str:
    """A section of the playbook as Markdown; "" gives the contents."""
    import playbook

    return playbook.read(section)


def report(home: Home, run_id: str) -> Reply:
    """Write `report.html` of a run. Raises UserError RUN_NOT_FOUND."""
    from engine.evidence.report.html_report import write_report

    with Store(home) as store:
        run_id = store.get_run(run_id).run_id
    run = home.run(run_id)
    # Once a run's files are deleted, its report cannot be written again.
    only_report_left = run.deleted.exists() and run.report.exists()
    path = run.report if only_report_left else write_report(home, run_id)
    return filled({"run_id": run_id, "report": str(path)}, f"The report of {run_id} is {path}")


def verify(home: Home, run_id: str) -> Reply:
    """Compare a run's files with the hashes sealed at its end. Raises UserError RUN_NOT_FOUND."""
    from engine.evidence.verdict import provenance

    return filled(provenance.verify(home, run_id).to_json(), f"Verified {run_id}.")


def inspect_data(path: Path) -> Reply:
    """What is in a data file. Raises UserError DATASET_INVALID."""
    from engine.environments import datasets

    return filled(datasets.inspect(path).to_json(), f"Looked into {path}.")


def build_env(home: Home, folder: str) -> Reply:
    """Install what an environment's requirements.txt names. Raises UserError ENV_DEPS."""
    from engine.environments import versions

    return filled(versions.build(home, Path(folder)).to_json(), f"Built {folder}.")


def diff_envs(home: Home, before: str, after: str) -> Reply:
    """What two versions differ in. Raises UserError ENV_NOT_FOUND."""
    from engine.environments import versions

    return filled(versions.diff(home, before, after).to_json(), f"Compared {before} and {after}.")


def pull_env(home: Home, env_id: str, folder: Path) -> Reply:
    """Copy a version's files out. Raises UserError ENV_NOT_FOUND or BAD_ARGUMENT."""
    from engine.environments import versions

    return filled(versions.pull(home, env_id, folder).to_json(), f"Pulled {env_id}.")


def delete_env(home: Home, env_id: str, force: bool = False) -> Reply:
    """Throw a version away. Raises UserError ENV_NOT_FOUND or RUN_STATE."""
    from engine.environments import versions

    return filled(versions.delete(home, env_id, force).to_json(), f"Deleted {env_id}.")


def deletable_runs(home: Home, run_ids: Sequence[str], force: bool = False) -> Reply:
    """`run_ids` that may be deleted together, with warnings. Raises UserError RUN_STATE."""
    from engine.runs import deletion

    chosen, warnings = deletion.deletable(home, run_ids, force)
    return {"run_ids": chosen, "warnings": warnings}


def delete_run(home: Home, run_id: str) -> Reply:
    """Delete a run's large files. Raises UserError RUN_STATE."""
    from engine.runs import deletion

    return filled(deletion.delete_run(home, run_id), f"Deleted {run_id}.")


def suggest(tool: str, **arguments: Any) -> Reply:
    """One suggested call."""
    return Call(tool, arguments).to_json()


def filled(reply: Reply, summary: str, *after: Reply) -> Reply:
    """`reply` with `summary`, `next` and `warnings` first, filled where they are missing."""
    head = {
        "summary": reply.get("summary") or summary,
        "next": reply["next"] if reply.get("next") is not None else list(after),
        "warnings": reply.get("warnings") or [],
    }
    return head | {name: item for name, item in reply.items() if name not in head}


def from_roots(path: str, roots: Sequence[Path]) -> str:
    """A relative path as it stands in the folder that holds it: here, else in one of `roots`.

    Clients start servers anywhere, and an agent names folders as they lie in its project.
    """
    if not path or "\0" in path or Path(path).expanduser().is_absolute() or exists(Path(path)):
        return path
    return next((str(root / path) for root in roots if exists(root / path)), path)


def exists(path: Path) -> bool:
    """Whether `path` is there; a name longer than a file system takes is not."""
    try:
        return path.exists()
    except OSError:
        return False


def inside_roots(path: str, roots: Sequence[Path]) -> Path:
    """`path` resolved, links followed; a relative one in the root that has it, else in the first.

    Raises UserError PATH_OUTSIDE_ROOTS outside `roots`, BAD_ARGUMENT for what is no path.
    """
    if "\0" in path:
        raise UserError("BAD_ARGUMENT", "path has a NUL in it", hint="Name a folder.", field="path")
    given = Path(path).expanduser()
    choices = [given]
    if not given.is_absolute():
        placed = [root / given for root in roots]
        choices = [place for place in (given, *placed) if exists(place)] + placed
    for choice in choices:
        resolved = choice.resolve()
        if any(resolved.is_relative_to(root.resolve()) for root in roots):
            return resolved
    allowed = ", ".join(str(root) for root in roots) or "none"
    raise UserError(
        "PATH_OUTSIDE_ROOTS",
        f"{path} lies outside the folders this server may use ({allowed})",
        hint="Choose a path inside them, or start the server with another --root FOLDER.",
        field="path",
    )


def _afford(home: Home, key: Key) -> Callable[[float], float] | None:
    from mcp_server.access import quotas

    return quotas.afford_of(home, key)


def _after_wait(run_id: str, until: str, reply: Reply) -> list[Reply]:
    state = reply.get("state")
    look = suggest("read_rollouts", run_id=run_id)
    if state == "done":
        # An evaluation or a probe left no model to serve.
        trained = reply.get("kind", "train") == "train"
        return [look, suggest("deploy", run_id=f"{run_id}@best")] if trained else [look]
    if state == "failed":
        why = suggest("diagnose", run_id=run_id)
        return [suggest("read_logs", run_id=run_id, view="error"), why]
    if state == "cancelled":
        return [suggest("submit_train", resume=run_id)]
    first_came = until == "first_step" and bool(reply.get("reached"))
    again = {"run_id": run_id, "until": "end" if first_came else until}
    if reply.get("cursor"):
        again["cursor"] = reply["cursor"]
    on = suggest("wait_run", **again)
    if until == "alert" and bool(reply.get("reached")):
        return [suggest("diagnose", run_id=run_id), on]
    return [look, suggest("read_logs", run_id=run_id), on] if first_came else [on]
