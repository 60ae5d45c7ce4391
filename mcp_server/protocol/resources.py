"""What a client may read beside calling tools: the playbook, runs, environments, this machine."""
# ruff: noqa: PLC0415  engine modules are imported when first read: see mcp_server/api/verbs.py

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.types import (
    Annotations,
    Completion,
    CompletionArgument,
    CompletionContext,
    PromptReference,
    ResourceTemplateReference,
)

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.core.format import counted
from engine.core.reply import RESULT_CHARS
from engine.home.run_dir import Home
from engine.home.sanitize import clean_text
from engine.home.store import Store
from mcp_server.access.log import log
from mcp_server.api import verbs
from mcp_server.api.replies import clean, compact, cut_to_size, error_line

MARKDOWN = "text/markdown"
JSON = "application/json"
FOR_AGENT = Annotations(audience=["assistant"], priority=0.8)
FOR_BOTH = Annotations(audience=["assistant", "user"], priority=0.5)


def add_resources(server: MCPServer[Any], home: Home) -> None:
    """Register every resource, and completion for their ids, on `server`."""

    def add(uri: str, title: str, about: str, mime: str, read: Callable[..., str]) -> None:
        audience = FOR_AGENT if mime == JSON or uri.startswith("playbook") else FOR_BOTH
        server.resource(
            uri,
            name=read.__name__,
            title=title,
            description=about,
            mime_type=mime,
            annotations=audience,
        )(read)

    _add_playbook(add)
    _add_runs(add, home)
    _add_machine(add, home)
    server.completion()(completer(home))


Add = Callable[[str, str, str, str, Callable[..., str]], None]


def _add_playbook(add: Add) -> None:
    def playbook() -> str:
        return _resource_text(verbs.read_playbook)

    def playbook_section(section: str) -> str:
        return _resource_text(lambda: verbs.read_playbook(section))

    add(
        "playbook://TRAINING.md",
        "Playbook",
        "How to train well: the contents.",
        MARKDOWN,
        playbook,
    )
    add(
        "playbook://TRAINING.md/{section}",
        "Playbook section",
        "One section of the playbook.",
        MARKDOWN,
        playbook_section,
    )


def _add_runs(add: Add, home: Home) -> None:
    def run_metrics(run_id: str) -> str:
        return _resource_text(lambda: _json(verbs.read_logs(home, _known(home, run_id), "metrics")))

    def run_config(run_id: str) -> str:
        return _resource_text(lambda: _json(read_json(home.run(_known(home, run_id)).config)))

    def run_card(run_id: str) -> str:
        from engine.evidence.report import html_report

        return _resource_text(lambda: html_report.model_card(home, _known(home, run_id)))

    def run_report(run_id: str) -> str:
        from engine.evidence.report import html_report

        return _resource_text(lambda: html_report.report_markdown(home, _known(home, run_id)))

    add(
        "run://{run_id}/metrics",
        "Curves of a run",
        "Down-sampled metrics of a run; updates are published while it trains.",
        JSON,
        run_metrics,
    )
    add("run://{run_id}/config", "Settings of a run", "What submit resolved.", JSON, run_config)
    add("run://{run_id}/card", "Model card", "What the model is.", MARKDOWN, run_card)
    add("run://{run_id}/report", "Report", "Verdict and evidence.", MARKDOWN, run_report)


def _add_machine(add: Add, home: Home) -> None:
    def env_source(env_id: str) -> str:
        return _resource_text(lambda: read_source(home, env_id))

    def hardware() -> str:
        return _resource_text(lambda: _json(verbs.get_status(home, "hardware")))

    def settings() -> str:
        from engine.settings import resolution

        return _resource_text(resolution.settings_reference)

    add("env://{env_id}/source", "Source of an env", "Its files as pushed.", MARKDOWN, env_source)
    add("train://hardware", "Hardware", "Devices and free memory.", JSON, hardware)
    add("train://settings", "Settings", "Every training setting.", MARKDOWN, settings)


def completer(
    home: Home,
) -> Callable[[Any, CompletionArgument, CompletionContext | None], Any]:
    """The completion handler: run ids, env ids and playbook sections."""

    async def complete(
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        names = await anyio.to_thread.run_sync(_names, home, argument.name)
        matches = [name for name in names if name.startswith(argument.value)]
        return Completion(values=matches[:100], total=len(matches), has_more=len(matches) > 100)

    return complete


def _names(home: Home, argument: str) -> list[str]:
    """Everything that the argument of that name may be, newest first."""
    if argument == "section":
        import playbook

        return [slug for slug, _ in playbook.sections()]
    if argument in ("run_id", "env_id"):
        with Store(home) as store:
            if argument == "run_id":
                return [row.run_id for row in store.list_runs(200)]
            return [row.env_id for row in store.list_envs(200)]
    return []


def read_source(home: Home, env_id: str) -> str:
    """The files of a pushed environment as Markdown, environment.py first, within a result.

    Files that are not text are named only; the longest are cut.
    Raises UserError ENV_NOT_FOUND or ENV_AMBIGUOUS.
    """
    from engine.environments import registry

    record = registry.find_env(home, env_id)
    source = Path(record.dir) / "source"
    files = sorted(path for path in source.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name != "environment.py")
    parts = [f"# {record.env_id}\n\n{counted(len(files), 'file')}\n"]
    room = RESULT_CHARS - 400
    for path in files:
        part = _file_part(path.relative_to(source).as_posix(), path)
        if len(part) > room:
            part = f"## {path.relative_to(source).as_posix()}\n\n{path.stat().st_size} bytes\n"
        if len(part) > room:
            parts.append("More files are left out.\n")
            break
        parts.append(part)
        room -= len(part) + 1
    return "\n".join(parts)


def _file_part(name: str, path: Path) -> str:
    longest = 6_000
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(longest + 1)
    except UnicodeDecodeError:
        return f"## {name}\n\n{path.stat().st_size} bytes, not text\n"
    if len(text) > longest:
        text = text[:longest] + f"\n... ({path.stat().st_size} bytes in all)\n"
    # A fence longer than any in the file keeps the file inside it.
    fence = "`" * (3 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return f"## {name}\n\n{fence}\n{text.rstrip()}\n{fence}\n"


def _known(home: Home, run_id: str) -> str:
    """The full id of a run; never use a client's text as a path before this."""
    with Store(home) as store:
        return store.get_run(run_id).run_id


def _resource_text(read: Callable[[], str]) -> str:
    """What `read` returns, within the size of a result; its refusal as a resource error."""
    try:
        text = read()
    except UserError as error:
        kind = ResourceNotFoundError if error.code.endswith("_NOT_FOUND") else ResourceError
        raise kind(error_line(error)) from error
    except FileNotFoundError as error:
        raise ResourceNotFoundError("The run has not written that yet.") from error
    except (OSError, ValueError) as error:
        log.exception("a resource cannot be read")
        damaged = UserError(
            "HOME_UNUSABLE",
            f"that file of the home cannot be read ({type(error).__name__})",
            hint="`honesmith doctor` looks at the home; `honesmith verify` at a run's files.",
        )
        raise ResourceError(error_line(damaged)) from error
    text = clean_text(text)
    if len(text) > RESULT_CHARS:
        text = text[: RESULT_CHARS - 60] + "\n\n(cut to 10,000 characters)\n"
    return text


def _json(data: Any) -> str:
    return compact(cut_to_size(clean(data)))
