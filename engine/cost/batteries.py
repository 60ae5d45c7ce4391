"""The batteries of a run: sets of questions that show what a model forgets, how many there are and
how long a question with its answer is."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.environments import env_facts, registry
from engine.environments.env_facts import RowLengths
from engine.home.run_dir import Home
from engine.models import catalog, tokens
from engine.settings.run_size import BETWEEN_TURNS
from engine.skills.batteries import (
    LANGUAGE_TOKENS,
    PEBBLE_TOKENS,
    QUESTIONS_PER_SKILL,
    SKILLS,
    TASKS_PER_SKILL,
    battery_of,
    practice_of,
)

KEEP = "keep"  # the tasks of a user's environment of this name are asked, too


@dataclass(frozen=True)
class Lengths:
    """Tokens of a typical row or episode.

    Attributes:
        prompt: tokens of the prompt.
        turn_tokens: tokens of an assistant turn.
        longest_turn: tokens of the longest assistant turn of a batch.
        turns: number of assistant turns.
    """

    prompt: float
    turn_tokens: float
    longest_turn: float
    turns: float = 1.0

    @property
    def total(self) -> float:
        """Tokens of the prompt and of all that policy and environment say."""
        environment_tokens = BETWEEN_TURNS * max(0.0, self.turns - 1)
        return self.prompt + self.turn_tokens * self.turns + environment_tokens


@dataclass(frozen=True)
class Battery:
    """Questions about the skills a model should keep, asked at step 0 and at the end of a run.

    See engine/worker/evaluation/prior_skills.py.

    Attributes:
        tasks: number of questions.
        answer: lengths of a question and its answer.
        practice: number of other questions of the same skills, of which `keep` asks as many as it
            needs, once, before the first step, to replay the right answers; 0 where there are none.
    """

    tasks: int
    answer: Lengths
    practice: int = 0


PEBBLE_SKILLS = Battery(
    len(SKILLS) * TASKS_PER_SKILL,
    Lengths(prompt=46, turn_tokens=11, longest_turn=PEBBLE_TOKENS),
    practice=len(SKILLS) * QUESTIONS_PER_SKILL,
)


def batteries(home: Home, base_path: Path | None, skill_rows: int) -> tuple[Battery, ...]:
    """The sets of questions (batteries) by which a run on this base model measures what the model
    forgets. An estimate counts their work, so they must be those that the worker chooses
    (engine/worker/evaluation/prior_skills.py).

    If `base_path` is None (not known), the model is assumed to be pebble, and the user's own
    environment "keep" is left out: only the model's tokenizer could count its tokens.

    Of each at most `skill_rows` questions are asked (a setting); without any nothing is, but rows
    are practised all the same.
    """
    chosen = []
    if base_path is None or base_path == catalog.BUILTIN["pebble"]:
        chosen.append(PEBBLE_SKILLS)
    else:
        with contextlib.suppress(UserError):  # a tokenizer that cannot be read
            chosen.append(_language_battery(tokens.load(base_path)))
    if base_path is not None and home.db.is_file():  # without a database there are no environments
        with contextlib.suppress(UserError):  # usually there is no such environment
            chosen += _user_batteries(home, base_path)
    return tuple(replace(battery, tasks=min(battery.tasks, skill_rows)) for battery in chosen)


def _user_batteries(home: Home, base_path: Path) -> list[Battery]:
    """The battery (a set of tasks) of the user's environment "keep"; [] if that does not score
    answers. Raises UserError if no environment has a name that begins with "keep"."""
    record = registry.find_env(home, KEEP)
    # The look-up also completes prefixes, so this may be another environment.
    if record.name != KEEP or not record.scored:
        return []
    return [_keep_battery(env_facts.env_facts(home, record, base_path).lengths)]


def _keep_battery(rows: Sequence[RowLengths]) -> Battery:
    """The questions of the user's environment "keep", from the lengths of its rows."""
    if rows:
        mean_prompt = statistics.fmean([row.prompt for row in rows])
        mean_reference = statistics.fmean([row.total - row.prompt for row in rows])
    else:  # no rows were counted: usual lengths of a short question and its answer
        mean_prompt, mean_reference = 32.0, 16.0
    # A model writes more than the reference answer.
    usual_answer = 1.5 * mean_reference
    lengths = Lengths(
        prompt=mean_prompt,
        turn_tokens=max(8.0, usual_answer),
        longest_turn=max(16.0, 2 * usual_answer),
    )
    return Battery(tasks=max(1, len(rows)), answer=lengths)


def _language_battery(tokenizer: tokens.ChatTokenizer) -> Battery:
    """The battery of questions in English, with the mean length of its prompts in tokens of one
    model. Half of what an answer may have is taken as usual."""
    chat = tokenizer.format()
    asked = battery_of("").tasks  # of any base but pebble
    prompts = [len(chat.prompt(task["prompt"])) for task in asked]
    lengths = Lengths(
        prompt=statistics.fmean(prompts),
        turn_tokens=LANGUAGE_TOKENS / 2,
        longest_turn=LANGUAGE_TOKENS,
    )
    return Battery(len(asked), lengths, practice=len(practice_of("").tasks))
