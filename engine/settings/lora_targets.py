"""Translates `lora_targets` to projections of a model: groups become the model's own names."""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.core.hints import Change, Hint
from engine.models.model_files import ModelFacts
from engine.records.settings import ANY_MLP, ATTENTION, MLP, PROJECTIONS, GivenSettings


def with_own_targets(settings: GivenSettings, model: ModelFacts) -> GivenSettings:
    """Return the settings with `lora_targets`, if it is given, as projections that the model has.

    The names of a whole group (all, attention or MLP) stand for the model's own projections of that
    group. For example a Phi-3 has `qkv_proj` in place of `q_proj`, `k_proj` and `v_proj`. Raises
    UserError SETTING_INVALID if the model has no projection of a named group, or lacks a projection
    that is named singly.
    """
    given_names = settings.get("lora_targets")
    if not given_names:
        return settings
    return {**settings, "lora_targets": _projections_meant(given_names, model)}


def _projections_meant(given_names: Sequence[str], model: ModelFacts) -> list[str]:
    """Return the projections of the model that `given_names` (at least one) stand for.

    If the names are those of all projections, or of a whole group (attention or MLP), they stand
    for the model's own projections of that group. Any other names stand for themselves. Raises
    UserError SETTING_INVALID if the model has no projection of the group, or lacks one of the other
    names.
    """
    available = model.targets
    if set(given_names) == set(PROJECTIONS):
        return available
    projections = _group_or_names(given_names, available)
    if projections:
        return projections
    missing = [name for name in given_names if name not in available]
    raise UserError(
        "SETTING_INVALID",
        f"lora_targets names {', '.join(missing)}, which {model.architecture} does not have as "
        "layers of its own",
        hint=Hint(
            f"It has {', '.join(available)}; all-linear means all of them.",
            change=Change(without=("lora_targets",)),
        ),
        field="settings.lora_targets",
    )


def _group_or_names(given_names: Sequence[str], available: Sequence[str]) -> list[str]:
    """Return the available projections that `given_names` stand for; [] if one is not available.

    The names of a whole group (attention or MLP) stand for the available projections of that group.
    Other names stand for themselves, and must all be available.
    """
    if set(given_names) == set(ATTENTION):
        return [name for name in available if name not in ANY_MLP]
    if set(given_names) == set(MLP):
        return [name for name in available if name in ANY_MLP]
    if set(given_names) <= set(available):
        return list(given_names)
    return []
