"""Judges by the name of an endpoint: what an env process is given to ask them, and the judge of a
rubric file as the control side asks it itself."""

from collections.abc import Iterable
from pathlib import Path

from engine.endpoints.references import find_endpoint
from engine.home.run_dir import Home
from engine.home.user_config import PREFIX, Endpoint, key_of
from envs.config.endpoints import is_reference
from envs.judge import Judge, judge_hash
from envs.metering.relay import Upstream
from envs.rubric import read_rubric_file


def upstreams(home: Home, refs: Iterable[str]) -> dict[str, Upstream]:
    """Return name -> model for the endpoints that an environment may ask, such as "openai:big".

    Raises UserError MODEL_NOT_FOUND if config.toml lacks one, ENV_SECRETS if a key is not set,
    SETTING_* if config.toml is damaged.
    """
    endpoint_by_name = {
        ref.removeprefix(PREFIX): find_endpoint(home, ref, "env_id") for ref in refs
    }
    return {name: _upstream(home, endpoint) for name, endpoint in endpoint_by_name.items()}


def _upstream(home: Home, endpoint: Endpoint) -> Upstream:
    """Return what the relay of an env process needs to ask an endpoint."""
    return Upstream(
        url=endpoint.url,
        model=endpoint.model,
        key=key_of(home.root, endpoint.key_env),
        identity=judge_hash(endpoint.url, endpoint.model),
        price_in=endpoint.price_in or 0.0,
        price_out=endpoint.price_out or 0.0,
        timeout_s=endpoint.timeout_s,
        at_once=endpoint.max_concurrency,
    )


def judge_in(home: Home, rubric: Path, *, will_be_asked: bool = True) -> Judge:
    """Return the judge (a model that scores answers) that a rubric file names, to be asked outside
    an env process.

    `will_be_asked` False: the judge is only compared with other judges, so its key may be missing.
    Raises ValueError if the file names no judge that can be used. Raises UserError under the
    conditions of `upstreams` if the file names the judge by an endpoint of config.toml.
    """
    ref = read_rubric_file(rubric).get("judge")
    if not is_reference(ref):
        return Judge.from_file(rubric)
    endpoint = find_endpoint(home, str(ref), "rubric", with_key=will_be_asked)
    return Judge(
        endpoint.url,
        endpoint.model,
        key=key_of(home.root, endpoint.key_env) or None,
        timeout_s=endpoint.timeout_s,
        prompt_price=endpoint.price_in or 0.0,
        completion_price=endpoint.price_out or 0.0,
    )
