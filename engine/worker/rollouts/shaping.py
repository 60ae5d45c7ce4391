"""Computes what the trainer subtracts from a reward before it compares a group. Standard library
only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.models.reasoning import Span
from engine.worker.core.trajectory import Group, Trajectory

Decode = Callable[[Sequence[int]], str]


class ReadsThoughts(Protocol):
    """The methods of a `Renderer` that are needed here."""

    def completion_text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion's token ids."""
        ...

    def thought_spans(self, text: str) -> list[Span]:
        """Return (start, end), in characters, of each thought in a completion's text."""
        ...


def penalise_thinking(
    groups: Sequence[Group], coefficient: float, max_tokens: int, renderer: ReadsThoughts
) -> None:
    """Set the `penalty` of every scored trajectory: `coefficient` times the mean number of thought
    tokens per turn, as a share of `max_tokens`, the most tokens of a turn.

    The number of tokens in thoughts and the penalty are also added to the trajectory's metrics.
    """
    for group in groups:
        for trajectory in group.scored:
            tokens_by_turn = [thought_tokens(ids, renderer) for ids in _ids_by_turn(trajectory)]
            thinking_tokens = sum(tokens_by_turn)
            turns = max(1, len(tokens_by_turn))  # 0 if no token was sampled
            trajectory.penalty = coefficient * (thinking_tokens / (turns * max_tokens))
            trajectory.metrics["thinking_tokens"] = float(thinking_tokens)
            trajectory.metrics["thinking_penalty"] = trajectory.penalty


def thought_tokens(ids: Sequence[int], renderer: ReadsThoughts) -> int:
    """Count the tokens of a completion that are thought, without the tags around it."""
    decode = renderer.completion_text
    # Spans are in characters, so a span has the ids up to its end minus those up to its start.
    return sum(
        _ids_until(ids, end, decode) - _ids_until(ids, start, decode)
        for start, end in renderer.thought_spans(decode(ids))
    )


def _ids_until(ids: Sequence[int], characters: int, decode: Decode) -> int:
    """Find, by binary search, how many of the first ids give a text of at least `characters`
    characters. `decode` turns ids into text."""
    lower_bound, upper_bound = 0, len(ids)
    while lower_bound < upper_bound:
        middle = (lower_bound + upper_bound) // 2
        if len(decode(ids[:middle])) >= characters:
            upper_bound = middle
        else:
            lower_bound = middle + 1
    return lower_bound


def _ids_by_turn(trajectory: Trajectory) -> Iterator[list[int]]:
    """Yield the ids of each assistant turn of a trajectory. A turn is an unbroken run of trained
    tokens; the environment's tokens between turns are not trained."""
    turn_ids: list[int] = []
    for token, is_trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if is_trained:
            turn_ids.append(token)
        elif turn_ids:
            yield turn_ids
            turn_ids = []
    if turn_ids:  # the trajectory ends with a turn
        yield turn_ids
