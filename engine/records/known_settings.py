"""The settings that readers of a run ask for by name, whatever its algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.records.settings import Settings


@dataclass(frozen=True)
class KnownSettings:
    """Settings of a run of any kind. A setting is None if this kind of run does not have it.

    Each attribute has the meaning and unit of the setting with the same name in
    engine/records/settings.py. Only `rows` is not there: it is how many tasks an evaluation asks,
    None for all.
    """

    learning_rate: float | None = None
    max_grad_norm: float | None = None
    max_length: int | None = None
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    prompts_per_step: int | None = None
    group_size: int | None = None
    eval_every: int | None = None
    eval_rows: int | None = None
    accept_reward_risk: bool | None = None
    gradient_checkpointing: bool | None = None
    kl_coef: float | None = None
    keep: float | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: list[str] | None = None
    thinking: bool | None = None  # whether the model is asked to think first
    thinking_length_penalty: float | None = None
    max_turns: int | None = None
    rows: int | None = None

    @staticmethod
    def of(settings: Settings | Mapping[str, object] | None) -> "KnownSettings":
        """Take the known settings from a run's `settings`; ignore the others.

        Args:
            settings: the typed settings of a run, or a mapping of names to values if its file comes
                from another version. None if the config is gone: then every setting is None.
        """
        if settings is None:
            return KnownSettings()
        values = settings if isinstance(settings, Mapping) else settings.model_dump()
        if "thinking" in values:
            # True or False; SFT has words instead, of which "require" has the model think.
            values = {**values, "thinking": values["thinking"] in (True, "require")}
        known_values = {name: values[name] for name in NAMES if name in values}
        return KnownSettings(**known_values)  # type: ignore[arg-type]


NAMES = tuple(field.name for field in fields(KnownSettings))
