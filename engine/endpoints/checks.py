"""Checks what an evaluation may not ask of a model behind a URL, and warns of what is doubtful."""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.endpoints.references import is_priced
from engine.home.user_config import Endpoint
from engine.models.catalog import ModelRef
from engine.records.settings import GivenSettings, SamplingSettings

MOST_STOPS = 4  # OpenAI takes at most four stop texts


def check(
    models: Sequence[ModelRef], settings: GivenSettings, env_kind: str, *, rewords: bool
) -> None:
    """Raise UserError if models behind a URL cannot be asked for this evaluation.

    Args:
        models: all models that the evaluation asks.
        env_kind: kind of its environment, such as "multi".
        rewords: whether tasks are to be asked in other words too.

    The codes are BAD_ARGUMENT if local models stand beside them, if a command plays the tasks, or
    if tasks are reworded (`perturb`); SETTING_NOT_APPLICABLE for `thinking`, and for caps of
    requests if no model is behind a URL; SETTING_INVALID for `max_cost` if a price is missing.
    """
    behind_url = [model for model in models if model.endpoint is not None]
    if not behind_url:
        for name in ("max_calls", "max_cost"):
            if settings.get(name) is not None:
                raise UserError(
                    "SETTING_NOT_APPLICABLE",
                    f"{name} caps models behind a URL, and no model of this evaluation is",
                    hint=f"Leave {name} out; max_judge_calls and max_judge_cost cap judges.",
                    field=f"settings.{name}",
                )
        return
    ref = behind_url[0].ref
    if len(behind_url) < len(models):
        raise _bad_argument(
            "models",
            f"{ref} stands beside models that are loaded here",
            f"{ref} needs no device, the others do: evaluate them in two calls, then compare_runs "
            "with both ids; the tasks are the same.",
        )
    if env_kind == "command":
        raise _bad_argument(
            "models",
            f"{ref} cannot play this environment",
            "Its command asks a model over the gateway of a run, which leads to models here alone.",
        )
    if rewords:
        raise _bad_argument(
            "perturb", "perturb is given", f"{ref} is asked in the tasks' own words."
        )
    if settings.get("thinking"):
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"thinking switches a chat template; {ref} has one of its provider's",
            hint="Leave thinking out; raise max_tokens where the model thinks before it answers.",
            field="settings.thinking",
        )
    if settings.get("max_cost") is not None:
        for model in behind_url:
            require_price(model.endpoint)


def require_price(endpoint: Endpoint | None) -> None:
    """Raise UserError SETTING_INVALID if an endpoint has no price, because its cost cannot be
    capped then. None stands for a model that is loaded here and costs nothing."""
    if endpoint is None or is_priced(endpoint):
        return
    missing = "price_in" if endpoint.price_in is None else "price_out"
    raise UserError(
        "SETTING_INVALID",
        f"max_cost cannot be kept: [endpoints.{endpoint.name}] has no {missing}",
        hint="The owner of config.toml writes price_in and price_out there, money per million "
        "tokens (0 for a server of your own); or cap the requests: max_calls.",
        field="settings.max_cost",
    )


def _bad_argument(field: str, message: str, hint: str) -> UserError:
    """Make the error for an argument that a model behind a URL does not take."""
    return UserError("BAD_ARGUMENT", message, hint=hint, field=field)


def warnings(models: Sequence[ModelRef], settings: SamplingSettings) -> list[str]:
    """List what is doubtful about asking models behind a URL, one sentence each. The settings are
    the same for all of them, so each sentence names the first."""
    behind_url = [model for model in models if model.endpoint is not None]
    doubts = []
    if behind_url and settings.max_cost is None and settings.max_calls is None:
        doubts.append(f"nothing caps what {behind_url[0].ref} takes: settings max_cost, max_calls")
    if behind_url and len(settings.stop) > MOST_STOPS:
        doubts.append(f"{behind_url[0].ref} is given the first {MOST_STOPS} of the stop texts")
    return doubts
