"""`keep`, the share of replayed rows, as the remedy where a run of SFT forgot skills: its next
value, and the call that trains the run again with it. benchmarks/RESULTS.md has what it costs and
brings.
"""

from collections.abc import Sequence

from engine.core.hints import Call
from engine.evidence.verdict.regression import Battery, KeptSkills
from engine.records.known_settings import KnownSettings
from engine.records.run_config import RunConfig, SFTConfig

# The shares to try, one after the other, while skills are still lost.
_SHARES = (0.2, 0.35, 0.5)


def keep_settings(settings: KnownSettings, batteries: Sequence[Battery]) -> dict[str, object]:
    """The settings that replay what was lost of `batteries`, with the next larger share; {} where
    the share of the run with these `settings` is the largest already.

    Rows of an environment are replayed where nothing but its tasks were lost.
    """
    now = settings.keep or 0.0
    share = next((share for share in _SHARES if share > now), None)
    if share is None:
        return {}
    lost = [battery.battery for battery in batteries if battery.verdict == "forgotten"]
    replayed: dict[str, object] = {"keep": share}
    # A battery has the id of its environment as its name, or the name of a model's skills.
    if lost and all("@" in name for name in lost):
        replayed["keep_env"] = lost[0]
    return replayed


def again_with_keep(config: RunConfig | None, skills: KeptSkills | None) -> list[Call]:
    """The call that submits a run again with the next larger `keep`.

    [] unless it was SFT, forgot skills itself, and can replay more.
    """
    if not isinstance(config, SFTConfig) or skills is None or skills.verdict != "forgotten":
        return []
    replayed = keep_settings(KnownSettings.of(config.settings), skills.batteries)
    if not replayed:
        return []
    values = config.settings.model_dump()
    given = {name: values[name] for name, source in config.sources.items() if source == "user"}
    arguments = {"env_id": config.env_id, "model": config.model, "algorithm": "sft"}
    return [Call("submit_train", {**arguments, "settings": {**given, **replayed}})]
