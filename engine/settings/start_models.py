"""The model that a run starts from or asks, which another run may have yet to train."""

from dataclasses import replace

from engine.core.errors import UserError
from engine.core.hints import Call, Hint
from engine.endpoints.references import find_endpoint, is_endpoint
from engine.home.rows import OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models import catalog
from engine.models.catalog import ModelRef


def model_to_train(home: Home, ref: str) -> ModelRef:
    """Return the model that a new run starts from.

    If `ref` names a training run that has not ended, this is the model that the run will have made
    at its end, unless `ref` names a step whose checkpoint exists already.

    Raises UserError MODEL_NOT_FOUND, MODEL_UNSUPPORTED, ADAPTER_MISMATCH, or RUN_STATE if that run
    is being stopped.
    """
    return _awaited_model(home, ref.strip()) or catalog.resolve_model(home, ref)


def model_to_ask(home: Home, ref: str) -> ModelRef:
    """Return the model that an evaluation asks.

    This is the model as it is now. If the run that `ref` names has no such checkpoint yet, it is
    the model that the run will have made at its end. `openai:NAME` is a model behind a URL.

    Raises UserError MODEL_NOT_FOUND, MODEL_UNSUPPORTED, ADAPTER_MISMATCH or ENV_SECRETS.
    """
    if is_endpoint(ref):
        return _behind_url(home, ref.strip())
    try:
        return catalog.resolve_model(home, ref)
    except UserError as error:
        awaited = _awaited_model(home, ref.strip()) if error.code == "MODEL_NOT_FOUND" else None
        if awaited is None:
            raise
        return awaited


def _behind_url(home: Home, ref: str) -> ModelRef:
    """Return the model behind a URL that `ref`, such as "openai:big", names.

    Raises UserError MODEL_NOT_FOUND if config.toml has no such endpoint, ENV_SECRETS if its key is
    not set.
    """
    endpoint = find_endpoint(home, ref)
    # The tokenizer of a model behind a URL is not known, so that of the built-in model counts
    # tokens.
    builtin = catalog.resolve_model(home, "pebble")
    facts = replace(builtin.facts, max_positions=endpoint.context)
    return replace(builtin, ref=ref, kind="endpoint", base_ref=ref, facts=facts, endpoint=endpoint)


def origin_text(model: ModelRef) -> str:
    """Say where a model's adapter comes from, as the end of a sentence; "" for a base model.

    For example ", continued from step_000020 of sums-grpo-3".
    """
    if model.waits_for:  # the id of the run that has yet to make it
        return f", continued from what {model.waits_for} is still to make; the run waits for it"
    if model.adapter is None:
        return ""
    return f", continued from {model.adapter.name} of {model.run_id or model.adapter.parent}"


def _awaited_model(home: Home, ref: str) -> ModelRef | None:
    """Return the model that the unfinished training run in `ref` will have made at its end.

    Returns None if `ref` names no unfinished run, or a step of it whose checkpoint exists already.
    Raises UserError RUN_STATE if the run is being stopped: it will have made no model at its end,
    but its last checkpoint can be named then.
    """
    run_id, _, checkpoint = ref.partition("@")
    open_row = _open_row(home, run_id)
    if open_row is None:
        return None
    names_step = checkpoint not in ("", "best")  # such as "step20"
    if names_step and home.run(run_id).resolve_checkpoint(checkpoint) is not None:
        return None
    if open_row.state == "stopping":
        raise UserError(
            "RUN_STATE",
            f"{run_id} is stopping; its last checkpoint is written in a moment",
            hint=Hint(
                "Wait for its end, then make this call again:",
                Call("wait_run", {"run_id": run_id, "until": "end"}),
            ),
            field="model",
        )
    return catalog.unmade(home, ref)  # the model that is not made yet


def _open_row(home: Home, run_id: str) -> RunRow | None:
    """Return the database row of the run with exactly the id `run_id`, if it has not ended; else
    None. There is no row if the home has no database yet."""
    if not home.db.is_file():
        return None
    with Store(home) as store:
        row = store.find_run(run_id)
    return row if row is not None and row.state in OPEN else None
