"""How long a question with its answer is, and how many questions a battery has: what estimates
count."""

from dataclasses import dataclass

from engine.skills.batteries import (
    PEBBLE_TOKENS,
    QUESTIONS_PER_SKILL,
    SKILLS,
    TASKS_PER_SKILL,
)

BETWEEN_TURNS = 32  # tokens that an environment says between two turns, as a guess
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
    Lengths(prompt=24, turn_tokens=8, longest_turn=PEBBLE_TOKENS),
    practice=len(SKILLS) * QUESTIONS_PER_SKILL,
)
