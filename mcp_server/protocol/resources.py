"""Resources, which a client reads without a tool: playbook, runs, environments, this machine."""
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
MAX_NAMES = 100  # that the protocol allows in a completion
MAX_COMPLETED = 200  # newest runs or environments that are completed
MAX_FILE_CHARS = 6_000  # of each file in the source of an environment


def add_resources(server: MCPServer[Any], home: Home) -> None:
    """Register every resource on `server`, and the completion of their ids."""

    def add_resource(
        uri: str, title: str, description: str, mime_type: str, read: Callable[..., str]
    ) -> None:
        """Register `read` as the resource at `uri`, under the name of the function."""
        audience = FOR_AGENT if mime_type == JSON or uri.startswith("playbook") else FOR_BOTH
        server.resource(
            uri,
            name=read.__name__,
            title=title,
            description=description,
            mime_type=mime_type,
            annotations=audience,
        )(read)

    _add_playbook(add_resource)
    _add_runs(add_resource, home)
    _add_machine(add_resource, home)
    server.completion()(completer(home))


# Registers a resource: its address, title, description, MIME type, and the function that reads it.
Add = Callable[[str, str, str, str, Callable[..., str]], None]


def _add_playbook(add: Add) -> None:
    """Register the contents and the sections of the playbook."""

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
    """Register the metrics, settings, model card and report of a run."""

    def run_metrics(run_id: str) -> str:
        return _resource_text(
            lambda: _json(verbs.read_logs(home, _full_run_id(home, run_id), "metrics"))
        )

    def run_config(run_id: str) -> str:
        return _resource_text(lambda: _json(read_json(home.run(_full_run_id(home, run_id)).config)))

    def run_card(run_id: str) -> str:
        from engine.evidence.report import html_report

        return _resource_text(lambda: html_report.model_card(home, _full_run_id(home, run_id)))

    def run_report(run_id: str) -> str:
        from engine.evidence.report import html_report

        return _resource_text(lambda: html_report.report_markdown(home, _full_run_id(home, run_id)))

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
    """Register the sources of environments, the hardware and the settings."""

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
    """The completion handler for run ids, env ids and playbook sections.

    It returns at most `MAX_NAMES` that begin as the client has typed, and the number of all.
    """

    async def complete(
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        """The values for `argument` that begin as the client has typed."""
        names = await anyio.to_thread.run_sync(_names, home, argument.name)
        matches = [name for name in names if name.startswith(argument.value)]
        return Completion(
            values=matches[:MAX_NAMES], total=len(matches), has_more=len(matches) > MAX_NAMES
        )

    return complete


def _names(home: Home, argument: str) -> list[str]:
    """All values that the argument of this name can have, newest first; [] for others."""
    if argument == "section":
        import playbook

        return [slug for slug, _ in playbook.sections()]
    if argument in ("run_id", "env_id"):
        with Store(home) as store:
            if argument == "run_id":
                return [row.run_id for row in store.list_runs(MAX_COMPLETED)]
            return [row.env_id for row in store.list_envs(MAX_COMPLETED)]
    return []


def read_source(home: Home, env_id: str) -> str:
    """The files of a pushed environment as Markdown, environment.py first, within a result's size.

    Only the names and sizes are given of files that are not text, or too large for what is left of
    the result; long files are cut.

    Raises:
        UserError: ENV_NOT_FOUND or ENV_AMBIGUOUS.
    """
    from engine.environments import registry

    record = registry.find_env(home, env_id)
    source = Path(record.dir) / "source"
    files = sorted(path for path in source.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name != "environment.py")
    parts = [f"# {record.env_id}\n\n{counted(len(files), 'file')}\n"]
    chars_left = RESULT_CHARS - 400  # leaves space for the heading and the last note
    for path in files:
        part = _file_part(path.relative_to(source).as_posix(), path)
        if len(part) > chars_left:
            part = f"## {path.relative_to(source).as_posix()}\n\n{path.stat().st_size} bytes\n"
        if len(part) > chars_left:
            parts.append("More files are left out.\n")
            break
        parts.append(part)
        chars_left -= len(part) + 1
    return "\n".join(parts)


def _file_part(name: str, path: Path) -> str:
    """One file as a Markdown section: its text, cut to `MAX_FILE_CHARS`, or its size if no text."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_CHARS + 1)
    except UnicodeDecodeError:
        return f"## {name}\n\n{path.stat().st_size} bytes, not text\n"
    if len(text) > MAX_FILE_CHARS:
        text = text[:MAX_FILE_CHARS] + f"\n... ({path.stat().st_size} bytes in all)\n"
    # The fence must be longer than any row of backticks in the file, or the file could close it.
    fence = "`" * (3 + max((len(run) for run in text.split() if set(run) == {"`"}), default=0))
    return f"## {name}\n\n{fence}\n{text.rstrip()}\n{fence}\n"


def _full_run_id(home: Home, run_id: str) -> str:
    """The full id of a run. A client's text must pass here before it becomes part of a path.

    Raises:
        UserError: RUN_NOT_FOUND.
    """
    with Store(home) as store:
        return store.get_run(run_id).run_id


def _resource_text(read: Callable[[], str]) -> str:
    """What `read` returns, cleaned and cut to the size of a result.

    Raises:
        ResourceNotFoundError: the thing does not exist, or the run has not written the file yet.
        ResourceError: any other refusal, or a damaged file.
    """
    try:
        text = read()
    except UserError as error:
        kind = ResourceNotFoundError if error.code.endswith("_NOT_FOUND") else ResourceError
        raise kind(error_line(error)) from error
    except FileNotFoundError as error:
        raise ResourceNotFoundError("The run has not written that yet.") from error
    except (OSError, ValueError) as error:  # a damaged file: JSON or UTF-8 that cannot be read
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
