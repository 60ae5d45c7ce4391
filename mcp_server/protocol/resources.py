"""Resources, which a client reads without a tool: playbook, runs, environments, this machine."""
# ruff: noqa: PLC0415  engine modules are imported when first read: see mcp_server/api/verbs.py

from collections.abc import Callable
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
from engine.core.reply import RESULT_CHARS
from engine.home.run_dir import Home
from engine.home.sanitize import clean_text
from engine.home.store import Store
from mcp_server.access.log import log
from mcp_server.access.viewing import caller_view
from mcp_server.api import addresses, verbs
from mcp_server.api.replies import error_line

MARKDOWN = "text/markdown"
JSON = "application/json"
FOR_AGENT = Annotations(audience=["assistant"], priority=0.8)
FOR_BOTH = Annotations(audience=["assistant", "user"], priority=0.5)
MAX_NAMES = 100  # that the protocol allows in a completion
MAX_COMPLETED = 200  # newest runs or environments that are completed


def add_resources(server: MCPServer[Any], home: Home) -> None:
    """Register every MCP resource on `server`, and the completion of ids in their addresses."""

    def add_resource(
        uri: str, title: str, description: str, mime_type: str, read_resource: Callable[..., str]
    ) -> None:
        """Register `read_resource` as the resource at `uri`, under the function's name.

        The parameters of `read_resource` are the fields of `uri`; it returns the resource's text.
        """
        # Data and the playbook are for agents; the user may also like to read reports and sources.
        is_for_agent = mime_type == JSON or uri.startswith("playbook")
        server.resource(
            uri,
            name=read_resource.__name__,
            title=title,
            description=description,
            mime_type=mime_type,
            annotations=FOR_AGENT if is_for_agent else FOR_BOTH,
        )(read_resource)

    _add_playbook(add_resource)
    _add_runs(add_resource, home)
    _add_machine(add_resource, home)
    server.completion()(completer(home))


# Registers a resource: its address, title, description, MIME type, and the function that reads it.
Add = Callable[[str, str, str, str, Callable[..., str]], None]


def _add_playbook(add: Add) -> None:
    """Register the MCP resources of the playbook: its table of contents and its sections."""

    def playbook() -> str:
        """Return the table of contents."""
        return _resource_text(verbs.read_playbook)

    def playbook_section(section: str) -> str:
        """Return one section."""
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
    """Register the MCP resources of a run: its metrics, settings, model card and report."""

    def run_metrics(run_id: str) -> str:
        """Return the curves of a run as JSON."""
        return _resource_text(lambda: addresses.run_metrics(caller_view(home), run_id))

    def run_config(run_id: str) -> str:
        """Return the settings of a run as JSON."""
        return _resource_text(lambda: addresses.run_config(caller_view(home), run_id))

    def run_card(run_id: str) -> str:
        """Return the model card of a run, or of a base model, as Markdown."""
        return _resource_text(lambda: addresses.run_card(caller_view(home), run_id))

    def run_report(run_id: str) -> str:
        """Return the report of a run as Markdown."""
        return _resource_text(lambda: addresses.run_report(caller_view(home), run_id))

    add(
        "run://{run_id}/metrics",
        "Curves of a run",
        "Down-sampled metrics of a run; updates are published while it trains.",
        JSON,
        run_metrics,
    )
    # "What submit resolved": every setting of the run, also those that the user left out.
    add("run://{run_id}/config", "Settings of a run", "What submit resolved.", JSON, run_config)
    # Base model, data, settings and results of a trained model; skills of a base model.
    add("run://{run_id}/card", "Model card", "What the model is.", MARKDOWN, run_card)
    add("run://{run_id}/report", "Report", "Verdict and evidence.", MARKDOWN, run_report)


def _add_machine(add: Add, home: Home) -> None:
    """Register the MCP resources for sources of environments, the hardware and the settings."""

    def env_source(env_id: str) -> str:
        """Return the files of an environment version as Markdown."""
        return _resource_text(lambda: addresses.read_source(caller_view(home), env_id))

    def hardware() -> str:
        """Return the devices and their free memory as JSON."""
        return _resource_text(lambda: addresses.hardware(caller_view(home)))

    def settings() -> str:
        """Return the names of all settings as Markdown."""
        return _resource_text(addresses.settings)

    def settings_of(kind: str) -> str:
        """Return what each setting of one algorithm does, as Markdown."""
        return _resource_text(lambda: addresses.settings(kind))

    def skills() -> str:
        """Return the questions that runs ask before and after training, as Markdown."""
        return _resource_text(addresses.skills)

    add("env://{env_id}/source", "Source of an env", "Its files as pushed.", MARKDOWN, env_source)
    add("train://hardware", "Hardware", "Devices and free memory.", JSON, hardware)
    add("train://settings", "Settings", "The names of all settings.", MARKDOWN, settings)
    add(
        "train://settings/{kind}",
        "Settings of an algorithm",
        "What each setting of sft, dpo, grpo, distill or evaluate does.",
        MARKDOWN,
        settings_of,
    )
    add("train://skills", "Skills", "What models are asked before and after.", MARKDOWN, skills)


def completer(
    home: Home,
) -> Callable[[Any, CompletionArgument, CompletionContext | None], Any]:
    """Make the MCP handler that completes run ids, env ids and playbook sections while a client's
    user types them.

    It returns at most `MAX_NAMES` values that begin with what the client has typed, and the number
    of all such values.
    """

    async def complete(
        ref: PromptReference | ResourceTemplateReference,
        argument: CompletionArgument,
        context: CompletionContext | None,
    ) -> Completion | None:
        """Complete the value of `argument`, whichever prompt or resource (`ref`) it belongs to."""
        names = await anyio.to_thread.run_sync(_possible_values, caller_view(home), argument.name)
        matches = [name for name in names if name.startswith(argument.value)]
        return Completion(
            values=matches[:MAX_NAMES], total=len(matches), has_more=len(matches) > MAX_NAMES
        )

    return complete


def _possible_values(home: Home, argument: str) -> list[str]:
    """Return the values that the argument named `argument` of a prompt or resource can have:

    - section: the sections of the playbook, in their order.
    - run_id, env_id: the newest runs or environments, at most `MAX_COMPLETED`.
    - any other argument: [], because its values are not known.
    """
    if argument == "section":
        import playbook  # late: few clients ask for it

        return [slug for slug, _ in playbook.sections()]
    if argument in ("run_id", "env_id"):
        with Store(home) as store:
            if argument == "run_id":
                return [row.run_id for row in store.list_runs(MAX_COMPLETED)]
            return [row.env_id for row in store.list_envs(MAX_COMPLETED)]
    return []


def _resource_text(read_resource: Callable[[], str]) -> str:
    """Call `read_resource` and return its text, cleaned and cut to `RESULT_CHARS` characters.

    Every error is turned into an exception of the SDK, which sends the text of it to the client.

    Raises:
        ResourceNotFoundError: if no run, environment or section has this id, or if the run has not
            written the file yet.
        ResourceError: if `read_resource` raises any other UserError, or if a file is damaged.
    """
    try:
        text = read_resource()
    except UserError as error:
        if error.code.endswith("_NOT_FOUND"):
            raise ResourceNotFoundError(error_line(error)) from error
        raise ResourceError(error_line(error)) from error
    except FileNotFoundError as error:
        raise ResourceNotFoundError("The run has not written that yet.") from error
    except (OSError, ValueError) as error:  # ValueError: a damaged file, no JSON or no UTF-8
        log.exception("a resource cannot be read")
        damage_error = UserError(
            "HOME_UNUSABLE",
            f"that file of the home cannot be read ({type(error).__name__})",
            hint="`honesmith doctor` looks at the home; `honesmith verify` at a run's files.",
        )
        raise ResourceError(error_line(damage_error)) from error
    text = clean_text(text)
    if len(text) > RESULT_CHARS:
        # 60 characters are kept free for the note.
        text = text[: RESULT_CHARS - 60] + "\n\n(cut to 10,000 characters)\n"
    return text
