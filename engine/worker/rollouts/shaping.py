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
    """Set the `penalty` of every scored trajectory: `coefficient` times the share of `max_tokens`
    that its think blocks take, averaged over its turns. Both the tokens and the penalty are also
    noted as metrics of the trajectory.

    Args:
        max_tokens: the most tokens of one completion.
        opened: whether the prompt itself opens the think block.
        decode: ids of a completion to text.
    """
    for group in groups:
        for trajectory in group.scored:
            tokens_by_turn = [thought_tokens(ids, opened, decode) for ids in _turns(trajectory)]
            thinking_tokens = sum(tokens_by_turn)
            share = thinking_tokens / (max(1, len(tokens_by_turn)) * max_tokens)
            trajectory.penalty = coefficient * share
            trajectory.metrics["thinking_tokens"] = float(thinking_tokens)
            trajectory.metrics["thinking_penalty"] = trajectory.penalty


def thought_tokens(ids: Sequence[int], opened: bool, decode: Callable[[list[int]], str]) -> int:
    """How many of a completion's tokens lie in its think block, the marks left out. A block that is
    never closed goes on to the end. 0 without a block.

    A token that holds part of a mark and other text counts as inside.

    Args:
        opened: whether the prompt has opened the block already.
        decode: ids to text.
    """
    text = decode(list(ids))
    start = text.find(OPEN)
    close = text.find(CLOSE)
    if start < 0 or (0 <= close < start):  # the completion does not open the block itself
        if not opened and close < 0:
            return 0
        start = 0
    else:
        start += len(OPEN)
    end = close if close >= start else len(text)
    return _ids_needed(ids, end, decode) - (_ids_needed(ids, start, decode) if start else 0)


def _ids_needed(ids: Sequence[int], characters: int, decode: Callable[[list[int]], str]) -> int:
    """The smallest number of leading ids whose text has at least so many characters, found by
    halving."""
    lower_bound, upper_bound = 0, len(ids)
    while lower_bound < upper_bound:
        middle = (lower_bound + upper_bound) // 2
        if len(decode(list(ids[:middle]))) >= characters:
            upper_bound = middle
        else:
            lower_bound = middle + 1
    return lower_bound


def _turns(trajectory: Trajectory) -> Iterator[list[int]]:
    """The ids of each assistant turn. The environment's tokens between them, which are not trained,
    separate the turns."""
    turn_ids: list[int] = []
    for token, trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if trained:
            turn_ids.append(token)
        elif turn_ids:
            yield turn_ids
            turn_ids = []
    if turn_ids:
        yield turn_ids
