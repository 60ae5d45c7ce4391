"""The batteries of a run: sets of questions that show what a model forgets."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.core.errors import UserError
from engine.cost import flops
from engine.cost.flops import Battery, Lengths
from engine.environments import env_facts, registry
from engine.environments.env_facts import RowLengths
from engine.home.run_dir import Home
from engine.models import catalog, tokens


def batteries(home: Home, base_path: Path | None, limit: int | None = None) -> tuple[Battery, ...]:
    """The sets of questions (batteries) by which a run on this base model measures what the model
    forgets. An estimate counts their work, so they must be those that the worker chooses
    (engine/worker/evaluation/prior_skills.py).

    If `base_path` is None (not known), the model is assumed to be pebble, and the user's own
    environment "keep" is left out: only the model's tokenizer could count its tokens.

    `limit` is the setting `skill_tasks`: the most questions of each; None for all.
    """
    chosen = []
    if base_path is None or base_path == catalog.BUILTIN["pebble"]:
        chosen.append(flops.PEBBLE_SKILLS)
    else:
        with contextlib.suppress(UserError):  # a tokenizer that cannot be read
            chosen.append(_language_battery(tokens.load(base_path)))
    if base_path is not None and home.db.is_file():  # without a database there are no environments
        with contextlib.suppress(UserError):  # usually there is no such environment
            chosen += _user_batteries(home, base_path)
    if limit is None:
        return tuple(chosen)
    trimmed = (replace(battery, tasks=min(battery.tasks, limit)) for battery in chosen)
    return tuple(battery for battery in trimmed if battery.tasks)


def _user_batteries(home: Home, base_path: Path) -> list[Battery]:
    """The battery (a set of tasks) of the user's environment "keep"; [] if that does not score
    answers. Raises UserError if no environment has a name that begins with "keep"."""
    record = registry.find_env(home, flops.KEEP)
    # The look-up also completes prefixes, so this may be another environment.
    if record.name != flops.KEEP or not record.scored:
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
    task_count = max(1, len(rows))
    return Battery(tasks=min(task_count, flops.KEEP_TASKS), answer=lengths)


def _language_battery(tokenizer: tokens.ChatTokenizer) -> Battery:
    """The battery of questions in English, with its lengths in tokens of one model; one question
    stands for all.

    A model may write 24 tokens, as the worker allows; a sentence of 12 is taken as usual.
    """
    question = [{"role": "user", "content": flops.LANGUAGE_QUESTION}]
    prompt = len(tokenizer.format().prompt(question))
    lengths = Lengths(prompt=prompt, turn_tokens=12, longest_turn=24)
    return Battery(flops.LANGUAGE_TASKS, lengths, practice=flops.LANGUAGE_PRACTICE)
