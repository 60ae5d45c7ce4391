"""Checks that an environment suits an algorithm and that settings suit an environment, and the
look-up of the version that `keep_env` names."""

from engine.core.errors import UserError
from engine.environments.env_facts import EnvFacts
from engine.environments.registry import find_env
from engine.home.run_dir import Home
from engine.records.settings import GivenSettings, SFTSettings, TrainSettings


def check_env(algorithm: str, env: EnvFacts) -> None:
    """Raise UserError BAD_ARGUMENT if the algorithm cannot learn from the environment.

    Every algorithm needs train rows. SFT also needs reference answers, DPO pairs of a better and a
    worse answer, GRPO and distillation a score.
    """
    obstacle = _find_obstacle(algorithm, env)
    if obstacle is not None:
        problem, hint = obstacle
        raise UserError("BAD_ARGUMENT", f"{env.env_id} {problem}", hint=hint, field="algorithm")


def _find_obstacle(algorithm: str, env: EnvFacts) -> tuple[str, str] | None:
    """Return why the algorithm cannot learn from an environment, as (fault, what to do about it).

    The fault continues a sentence that begins with the environment's id, such as "has no train
    rows". Returns None if the algorithm can learn from it.
    """
    if env.train_rows == 0:
        hint = "Give rows with split = train."
        if env.scored and env.heldout_rows:
            hint = f'It is an exam: evaluate(env_id="{env.env_id}"). To train, {hint.lower()}'
        return "has no train rows", hint
    if env.kind == "preference" and algorithm != "dpo":
        return (
            f"holds preferences (chosen and rejected answers), which {algorithm} cannot use",
            'Use algorithm="dpo", or push the chosen answers as prompt and completion for sft.',
        )
    if algorithm == "distill" and env.kind == "command":
        return (
            "is played by a command, and a teacher reads the rollouts of one answer each",
            'Use algorithm="grpo", or evaluate the teacher and learn its rollouts with curate.',
        )
    if algorithm == "sft" and env.answered_rows == 0:
        return (
            "has no reference answers to imitate",
            'Set `answer` on its tasks, or use algorithm="grpo".',
        )
    if algorithm == "dpo" and env.paired_rows == 0:
        return (
            "has no pairs of a better and a worse answer",
            'Give rows `chosen` and `rejected`, or make pairs of runs: curate(select="pairs").',
        )
    if algorithm == "distill" and not env.scored:
        return (
            "has no score, so nothing shows whether the distilled model answers better",
            "Give the environment a `score` method; distillation trains on none of its scores.",
        )
    if algorithm == "grpo" and not env.scored:
        return (
            "has no score, so there is nothing to reinforce",
            'Use algorithm="sft", or give the environment a `score` method.',
        )
    return None


def check_turns(user_settings: GivenSettings, env: EnvFacts) -> None:
    """Raise UserError SETTING_NOT_APPLICABLE if the user's settings have max_turns and the
    environment has a single turn."""
    if "max_turns" in user_settings and not env.multi_turn:
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"max_turns is for multi-turn environments; {env.env_id} has a single turn",
            hint="Leave max_turns out.",
            field="settings.max_turns",
        )


def with_kept_version(home: Home, settings: TrainSettings) -> TrainSettings:
    """Replace the name in `keep_env` by the whole id of the environment version that it means now.

    Later pushes then do not change the run. Returns the new settings. Raises UserError
    ENV_NOT_FOUND or ENV_AMBIGUOUS if `keep_env` names no environment, or several.
    """
    if not isinstance(settings, SFTSettings) or not settings.keep_env:
        return settings
    try:
        record = find_env(home, settings.keep_env)
    except UserError as error:
        raise UserError(
            error.code,
            f"keep_env: {error.message}",
            hint=error.advice,
            field="settings.keep_env",
        ) from error
    return settings.model_copy(update={"keep_env": record.env_id})
