"""Whether a search for a prompt can be made: gepa, the endpoint, the tasks, the budget."""

import importlib.util
import sys
from pathlib import Path

from engine.core.errors import UserError
from engine.core.hints import Change, Hint
from engine.core.wording.prompt_texts import texts_of
from engine.endpoints.references import find_endpoint, is_endpoint
from engine.environments.registry import EnvRecord, read_tasks
from engine.home.run_dir import Home
from engine.home.user_config import PREFIX, Endpoint
from engine.records.settings import PromptSettings
from engine.runs.prompts.job import no_texts_error
from engine.runs.prompts.search import PACKAGE, rollouts_per_round
from engine.runs.prompts.tasks import SearchTasks

_TASKS_READ = 2000  # whose texts are looked at


def require_gepa(python: str = "") -> None:
    """Raise UserError BAD_ARGUMENT if the package gepa, which searches for prompts, is not
    installed for the interpreter at the path `python`; "" stands for the running one."""
    if not python or python == sys.executable:
        is_installed = importlib.util.find_spec(PACKAGE) is not None
    else:  # another interpreter: its folder is searched, which is faster than running it
        environment_folder = Path(python).parent.parent  # `python` is FOLDER/bin/python
        is_installed = any(environment_folder.glob(f"lib/python*/site-packages/{PACKAGE}"))
    if not is_installed:
        raise UserError(
            "BAD_ARGUMENT",
            f"algorithm prompt needs the package {PACKAGE}, which {python or sys.executable} has "
            "not",
            hint=f"Run `{python or sys.executable} -m pip install 'honesmith[prompt]'`, then call "
            "again.",
            field="algorithm",
        )


def reflecting_endpoint(home: Home, name: object) -> Endpoint:
    """Return the endpoint that the setting `reflection` names, with or without "openai:" before its
    name. This model behind a URL reads answers and writes new prompts.

    Raises UserError SETTING_INVALID if the setting is missing, MODEL_NOT_FOUND if config.toml lacks
    the endpoint, ENV_SECRETS if its key is not set.
    """
    if not name or not isinstance(name, str):
        endpoint_names = home.user_config().endpoints
        known_endpoints = ", ".join(f"{PREFIX}{known_name}" for known_name in endpoint_names)
        raise UserError(
            "SETTING_INVALID",
            "algorithm prompt has no endpoint that writes prompts",
            hint=f'Name one of config.toml, e.g. settings={{"reflection": "openai:big"}}; there '
            f"are: {known_endpoints or 'none'}.",
            field="settings.reflection",
        )
    return find_endpoint(home, as_reference(name), field="settings.reflection")


def as_reference(name: str) -> str:
    """Return the reference of an endpoint, such as "openai:big" for the name "big"; a reference is
    returned as it is."""
    return name.strip() if is_endpoint(name) else f"{PREFIX}{name.strip()}"


def check_env(env: EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT if no prompt can be searched for in the environment `env`; the
    message says why."""
    obstacle = ""
    if not env.scored:
        obstacle = "scores nothing, so no prompt is better than another"
    elif env.kind == "command":
        obstacle = "is played by a command, which writes its prompts itself"
    elif env.version.data:
        obstacle = "has data that stay where they are, of which no version can be made"
    elif env.rows.get("train", 0) < 2:
        obstacle = "has fewer than 2 train rows: one to reflect on and one to choose by"
    elif not texts_of(read_tasks(env)[:_TASKS_READ], env.tools, with_tools=True):
        raise no_texts_error(env.env_id)
    if obstacle:
        raise UserError(
            "BAD_ARGUMENT",
            f"{env.env_id} {obstacle}",
            hint="Use another environment, or another algorithm.",
            field="env_id",
        )


def check_budget(tasks: SearchTasks, settings: PromptSettings, env_id: str) -> None:
    """Check that a search can make at least one round with its tasks and rollouts.

    `env_id` is the environment, for the message.

    Raises UserError SETTING_INVALID if `max_rollouts` does not suffice for one round, BAD_ARGUMENT
    if there is no train task whose answers the endpoint may be shown.
    """
    if not tasks.reflected:
        # A sealed exam holds tasks that nobody may see; they are not sent to an endpoint.
        sealed_note = f": {tasks.sealed} hold tasks of a sealed exam" if tasks.sealed else ""
        raise UserError(
            "BAD_ARGUMENT",
            f"no train task of {env_id} may be shown to the endpoint{sealed_note}",
            hint="Push train rows of their own.",
            field="env_id",
        )
    choosing_count = len(tasks.choosing)
    needed_rollouts = choosing_count + rollouts_per_round(settings, choosing_count)
    if settings.max_rollouts < needed_rollouts:
        raise UserError(
            "SETTING_INVALID",
            f"max_rollouts = {settings.max_rollouts} does not suffice for one round: "
            f"{choosing_count} tasks that choose are answered before and after it, and "
            f"{settings.prompts_per_step} are tried with the old and the new prompt, "
            f"{needed_rollouts} in all",
            hint=Hint(
                "Raise it, or lower select_rows or prompts_per_step.",
                change=Change(settings={"max_rollouts": 4 * needed_rollouts}),
            ),
            field="settings.max_rollouts",
        )
