"""Guess a hidden number within a few turns: the smallest multi-turn environment.

Each turn the model says a number, and the environment answers `higher`, `lower` or ends the game.
An untuned `pebble` finds the number in about half of the games: it has seen games played well and
games played carelessly.
"""

import random
import re
from dataclasses import dataclass

from envs import Message, MultiTurnEnv, Score, Task


@dataclass
class Game:
    """The state of one game: its range and secret, and what has happened so far."""

    low: int
    high: int
    secret: int
    turns: int = 0
    found: bool = False
    valid: int = 0


class GuessNumber(MultiTurnEnv):
    """`max_guesses` turns for a range of `width` numbers; bisecting always suffices."""

    def __init__(self, games: int, width: int, max_guesses: int, seed: int) -> None:
        self.games = games
        self.width = width
        self.max_guesses = max_guesses
        self.seed = seed

    def tasks(self) -> list[Task]:
        """One task per game; its reference answer is a game played by halving the range."""
        rng = random.Random(self.seed)
        # The model reads the range, so the split goes by its start: no range is in both halves.
        tasks = []
        for index in range(self.games):
            low = rng.randrange(1, 80)
            high = low + self.width - 1
            secret = rng.randint(low, high)
            tasks.append(
                Task(
                    id=f"guess-{index}",
                    prompt=f"Guess my number from {low} to {high}.",
                    answer=[Message("assistant", str(g)) for g in bisect(low, high, secret)],
                    split="heldout" if low % 4 == 0 else "train",
                    metadata={"low": low, "high": high, "secret": secret},
                )
            )
        return tasks

    def start(self, task: Task) -> Game:
        """A new game with the task's range and secret."""
        return Game(task.metadata["low"], task.metadata["high"], task.metadata["secret"])

    def step(self, state: Game, completion: Message) -> list[Message] | None:
        """`higher` or `lower` after a wrong guess; None if the game is over.

        It is over after the right guess, a message that is not a number, or the last turn.
        """
        state.turns += 1
        match = re.fullmatch(r"\s*(\d{1,3})\.?\s*", completion.content)
        if match is None:
            return None
        guess = int(match.group(1))
        state.valid += state.low <= guess <= state.high
        if guess == state.secret:
            state.found = True
            return None
        if state.turns >= self.max_guesses:
            return None
        return [Message("user", "higher" if guess < state.secret else "lower")]

    def score(self, task: Task, state: Game) -> Score:
        """1 if the number was found, else 0."""
        return Score(
            reward=1.0 if state.found else 0.0,
            success=state.found,
            metrics={"turns": float(state.turns), "in_range": state.valid / max(1, state.turns)},
        )


def bisect(low: int, high: int, secret: int) -> list[int]:
    """The guesses of a player who halves the range every time, up to and with `secret`."""
    guesses = []
    while True:
        guess = (low + high) // 2
        guesses.append(guess)
        if guess == secret:
            return guesses
        if guess < secret:
            low = guess + 1
        else:
            high = guess - 1


def load_environment(
    games: int = 600, width: int = 15, max_guesses: int = 4, seed: int = 7
) -> GuessNumber:
    """Games over ranges of fifteen numbers: four halvings find any of them."""
    return GuessNumber(games, width, max_guesses, seed)
