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
from engine.home.owner_marks import own_part
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

KEEP = "keep"  # if the user has an environment of this name, its tasks are asked too


@dataclass(frozen=True)
class Lengths:
    """Tokens of a typical row or episode. They are averages, so they may be fractions.

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
        """Tokens of the whole episode: the prompt, all assistant turns, and a reply of the
        environment between any two turns. Not a whole number, as the parts are averages."""
        replies = max(0.0, self.turns - 1)
        reply_tokens = BETWEEN_TURNS * replies  # BETWEEN_TURNS: the assumed tokens of one reply
        return self.prompt + self.turn_tokens * self.turns + reply_tokens


@dataclass(frozen=True)
class Battery:
    """Questions about the skills a model should keep, asked at step 0 and at the end of a run.

    See engine/worker/evaluation/prior_skills.py.

    Attributes:
        tasks: number of questions.
        answer: lengths of a question and its answer.
        practice: number of other questions on the same skills; 0 if there are none. If the setting
            `keep` is on, some of them are asked before the first step, and the right answers are
            trained on again (replayed).
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
    """Return the batteries (sets of questions) by which a run on this base model measures what the
    model forgets.

    An estimate counts their work, so they must be the batteries that the worker chooses
    (engine/worker/evaluation/prior_skills.py).

    Args:
        home: the home, which may hold the user's own battery: the environment "keep".
        base_path: folder of the base model. If it is None (not known), the model is assumed to be
            pebble, and the environment "keep" is left out, because only the model's tokenizer could
            count its tokens.
        skill_rows: the setting: the most questions of each battery that are asked. It does not
            limit the practice questions.
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
    """Return a list with the battery of the user's environment "keep"; [] if it does not score.

    Raises UserError if no environment has a name that begins with "keep".
    """
    record = registry.find_env(own_part(home), KEEP)
    # `find_env` also accepts the beginning of a name, so this may be another environment.
    if record.name != KEEP or not record.scored:
        return []
    return [_keep_battery(env_facts.env_facts(home, record, base_path).lengths)]


def _keep_battery(rows: Sequence[RowLengths]) -> Battery:
    """Make the battery (set of questions) of the user's environment "keep" from the lengths of its
    rows."""
    if rows:
        mean_prompt = statistics.fmean([row.prompt for row in rows])
        mean_reference = statistics.fmean([row.total - row.prompt for row in rows])
    else:  # no rows were counted: usual lengths of a short question and its answer
        mean_prompt, mean_reference = 32.0, 16.0
    # A guess: a model writes half as much again as the reference answer.
    usual_answer = 1.5 * mean_reference
    lengths = Lengths(
        prompt=mean_prompt,
        turn_tokens=max(8.0, usual_answer),
        longest_turn=max(16.0, 2 * usual_answer),
    )
    return Battery(tasks=max(1, len(rows)), answer=lengths)


def _language_battery(tokenizer: tokens.ChatTokenizer) -> Battery:
    """Make the battery of questions in English, with lengths in tokens of the given tokenizer.

    A usual answer is assumed to have half of the tokens that an answer may have.
    """
    chat = tokenizer.format()
    questions = battery_of("").tasks  # "" stands for any base model except pebble
    prompts = [len(chat.prompt(task["prompt"])) for task in questions]
    lengths = Lengths(
        prompt=statistics.fmean(prompts),
        turn_tokens=LANGUAGE_TOKENS / 2,
        longest_turn=LANGUAGE_TOKENS,
    )
    return Battery(len(questions), lengths, practice=len(practice_of("").tasks))
