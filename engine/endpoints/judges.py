"""Judges by name, `openai:NAME` or `model:REF`: what an env process is given to ask them, and the
judge of a rubric file as the control side asks it itself."""

from collections.abc import Iterable
from pathlib import Path

from engine.core.errors import UserError
from engine.endpoints.references import find_endpoint
from engine.home.run_dir import Home
from engine.home.user_config import key_of
from engine.models.served.judge import START_S, LocalJudge, is_local, local_judge, serve
from engine.records.manifest import JudgeUsed
from envs.config.endpoints import is_reference, path_name
from envs.judge import Judge, judge_hash
from envs.metering.relay import Address, NotServed, Upstream
from envs.rubric import read_rubric_file


def upstreams(home: Home, refs: Iterable[str], patience_s: float = START_S) -> dict[str, Upstream]:
    """Return name -> model for the models that an environment may ask, which `refs` names, such as
    "openai:big" and "model:pebble"; the name is that of `path_name`.

    A model of the home may take `patience_s` seconds until it is served. Raises UserError
    MODEL_NOT_FOUND if config.toml lacks an endpoint or the home a model, ENV_SECRETS if a key is
    not set, SETTING_* if config.toml is damaged.
    """
    return {path_name(ref): _upstream(home, ref, patience_s) for ref in refs}


def _upstream(home: Home, ref: str, patience_s: float) -> Upstream:
    """Return what the relay of an env process (which asks models for the environment) needs to ask
    the model that `ref` names. A model of the home may take `patience_s` seconds until it is
    served. Raises UserError as `upstreams` does."""
    if is_local(ref):
        return _local_upstream(home, local_judge(home, ref), patience_s)
    endpoint = find_endpoint(home, ref, "env_id")
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


def _local_upstream(home: Home, judge: LocalJudge, patience_s: float) -> Upstream:
    """Return what the relay of an env process (which asks models for the environment) needs to ask
    `judge`, a model of the home, which costs no money. It may take `patience_s` seconds until it is
    served."""

    def served_at() -> Address:
        """Return the address at which the model is served, which is started if it is not. Raises
        NotServed if it cannot be."""
        try:
            return serve(home, judge, patience_s)
        except UserError as error:
            raise NotServed(f"{error.code}: {error.message} {error.hint}") from error

    return Upstream(url="", model=judge.name, identity=judge.identity, serve=served_at)


def judges_used(home: Home, refs: Iterable[str]) -> list[JudgeUsed]:
    """Describe the models that an environment may ask (`refs`), for the manifest of a run. Nothing
    is asked of them, so a key may be missing; otherwise raises UserError as `upstreams` does."""
    return [_judge_used(home, ref) for ref in refs]


def _judge_used(home: Home, ref: str) -> JudgeUsed:
    """Describe the judge that `ref` names, a model behind a URL or one of the home, in the form of
    a run's manifest."""
    if not is_local(ref):
        endpoint = find_endpoint(home, ref, "env_id", with_key=False)
        identity = judge_hash(endpoint.url, endpoint.model)
        return JudgeUsed(ref=ref, identity=identity, served_as=endpoint.model)
    judge = local_judge(home, ref)
    return JudgeUsed(
        ref=ref,
        identity=judge.identity,
        served_as=judge.name,
        weights=judge.weights,
        adapter=judge.adapter,
    )


def judge_in(home: Home, rubric: Path, *, will_be_asked: bool = True) -> Judge:
    """Return the judge (a model that scores answers) that a rubric file names, to be asked by this
    process itself.

    With `will_be_asked` False, the judge is only compared with other judges: its key may be
    missing, and no model is served. Raises ValueError if the file names no judge that can be used.
    Raises UserError under the conditions of `upstreams` if the file names the judge by its name,
    and of `serve` if it is a model of the home that cannot be served.
    """
    ref = read_rubric_file(rubric).get("judge")
    if not is_reference(ref):
        return Judge.from_file(rubric)
    if is_local(str(ref)):
        judge = local_judge(home, str(ref), "rubric")
        return _local_judge(home, judge, will_be_asked=will_be_asked)
    endpoint = find_endpoint(home, str(ref), "rubric", with_key=will_be_asked)
    return Judge(
        endpoint.url,
        endpoint.model,
        key=key_of(home.root, endpoint.key_env) or None,
        timeout_s=endpoint.timeout_s,
        prompt_price=endpoint.price_in or 0.0,
        completion_price=endpoint.price_out or 0.0,
    )


def _local_judge(home: Home, judge: LocalJudge, *, will_be_asked: bool) -> Judge:
    """Return a model of the home as a judge. If it will be asked, it is served first; otherwise it
    has an address at which nobody answers."""
    address = serve(home, judge) if will_be_asked else Address("http://127.0.0.1/v1")
    return Judge.named(judge.ref, address.url, judge.name, judge.identity, address.key or None)
