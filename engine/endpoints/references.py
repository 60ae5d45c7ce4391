"""Finds the endpoint (a model behind a URL) in config.toml that a reference `openai:NAME` means,
and checks whether it can be asked."""

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.home.user_config import PREFIX, Endpoint, key_of
from engine.records.run_config import EndpointEntry

_PER_MILLION = 1e6


def is_endpoint(ref: str) -> bool:
    """Tell whether a model reference names an endpoint (a model behind a URL): "openai:big"."""
    return ref.strip().startswith(PREFIX)


def find_endpoint(
    home: Home, ref: str, field: str = "models", *, with_key: bool = True
) -> Endpoint:
    """Find the endpoint that `ref`, such as "openai:big", names.

    Args:
        field: the argument of the request that names it, for error messages.
        with_key: whether its key must be set.

    Raises UserError MODEL_NOT_FOUND if config.toml has no such table, ENV_SECRETS if the endpoint's
    key is not set, SETTING_* if config.toml is damaged.
    """
    name = ref.strip().removeprefix(PREFIX)
    endpoints = home.user_config().endpoints
    endpoint = endpoints.get(name)
    if endpoint is None:
        known_refs = ", ".join(f"{PREFIX}{endpoint_name}" for endpoint_name in endpoints) or "none"
        raise UserError(
            "MODEL_NOT_FOUND",
            f"{home.config_file} has no [endpoints.{name[:60]}]; there are: {known_refs}",
            hint="Its owner writes there: [endpoints.NAME] with url, model, key_env, price_in and "
            "price_out.",
            field=field,
        )
    if with_key:
        require_key(home, endpoint.key_env, f"{PREFIX}{name}", field)
    return endpoint


def check_shared(home: Home, ref: str, field: str = "models") -> None:
    """Raise UserError FORBIDDEN if `ref` names an endpoint that only the owner may ask, since it
    may cost the owner's money, and MODEL_NOT_FOUND if there is no such endpoint. A `ref` that names
    no endpoint is not checked. `field` is the argument that names it."""
    if is_endpoint(ref) and not find_endpoint(home, ref, field).shared:
        name = ref.strip().removeprefix(PREFIX)
        raise UserError(
            "FORBIDDEN",
            f"{ref.strip()} may be asked by the owner of this home alone",
            hint=f"Ask the owner to set shared = true in [endpoints.{name}] of config.toml.",
            field=field,
        )


def require_key(home: Home, key_env: str, ref: str, field: str) -> None:
    """Raise UserError ENV_SECRETS if the endpoint needs a key (the variable `key_env`) that is not
    set. `ref` and `field` are for the message."""
    if key_env and not key_of(home.root, key_env):
        raise UserError(
            "ENV_SECRETS",
            f"the key of {ref} is not here: {key_env} is not set in this server's environment, nor "
            f"in {home.root}/.env",
            hint="Set it where the server is started, or in that file (never in a tool argument), "
            "then call again.",
            field=field,
            retryable=True,
        )


def entry_of(endpoint: Endpoint) -> EndpointEntry:
    """Make the entry that config.json of a run stores about an endpoint. With it, the run's prices
    stay those of the time it was submitted."""
    return EndpointEntry(**{name: getattr(endpoint, name) for name in EndpointEntry.model_fields})


def cost_of(endpoint: Endpoint | EndpointEntry, tokens_in: float, tokens_out: float) -> float:
    """Compute the money for these numbers of prompt and answer tokens. Tokens without a price cost
    nothing."""
    price_in, price_out = endpoint.price_in or 0.0, endpoint.price_out or 0.0  # per million tokens
    return (tokens_in * price_in + tokens_out * price_out) / _PER_MILLION


def is_priced(endpoint: Endpoint) -> bool:
    """Tell whether config.toml has prices of the endpoint for both prompts and answers."""
    return endpoint.price_in is not None and endpoint.price_out is not None
