"""What the trainer takes off a reward before it compares a group. Standard library only."""

from collections.abc import Callable, Iterator, Sequence

from engine.worker.core.trajectory import Group, Trajectory

OPEN, CLOSE = "<think>", "</think>"


def penalise_thinking(
    groups: Sequence[Group],
    coefficient: float,
    max_tokens: int,
    *,
    opened: bool,
    decode: Callable[[list[int]], str],
) -> None:
    """Set `penalty` of every scored trajectory to `coefficient` x (tokens inside its think blocks /
    `max_tokens`), the mean over its turns, and note both as named metrics.

    Args:
        opened: whether the prompt itself opens the block.
        decode: ids of a completion to text.
    """
    for group in groups:
        for trajectory in group.scored:
            turns = [thought_tokens(ids, opened, decode) for ids in _turns(trajectory)]
            thought = sum(turns)
            share = thought / (max(1, len(turns)) * max_tokens)
            trajectory.penalty = coefficient * share
            trajectory.metrics["thinking_tokens"] = float(thought)
            trajectory.metrics["thinking_penalty"] = trajectory.penalty


def thought_tokens(ids: Sequence[int], opened: bool, decode: Callable[[list[int]], str]) -> int:
    """Tokens between the marks of the think block, the marks left out; a block that is never
    closed goes on to the end.

    A token that straddles a mark counts as inside.
    """
    text = decode(list(ids))
    start = text.find(OPEN)
    close = text.find(CLOSE)
    if start < 0 or (0 <= close < start):
        if not opened and close < 0:
            return 0
        start = 0
    else:
        start += len(OPEN)
    end = close if close >= start else len(text)
    return _reach(ids, end, decode) - (_reach(ids, start, decode) if start else 0)


def _reach(ids: Sequence[int], characters: int, decode: Callable[[list[int]], str]) -> int:
    """The fewest leading ids whose text has at least so many characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(list(ids[:middle]))) >= characters:
            high = middle
        else:
            low = middle + 1
    return low


def _turns(trajectory: Trajectory) -> Iterator[list[int]]:
    """The ids of each assistant turn: what the environment said stands between them."""
    turn: list[int] = []
    for token, trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if trained:
            turn.append(token)
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn
