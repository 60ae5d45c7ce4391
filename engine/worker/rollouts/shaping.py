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
    that its think blocks take, averaged over its turns. The tokens and the penalty are also added
    to the trajectory's metrics, as `thinking_tokens` and `thinking_penalty`.

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
    """How many of a completion's tokens lie in its think block, between <think> and </think>; 0
    without a block. A block that is never closed goes on to the end. A token with part of such a
    mark and other text counts as inside.

    Args:
        opened: whether the prompt has opened the block already, so that no <think> is expected.
        decode: ids to text.
    """
    text = decode(list(ids))
    start = text.find(OPEN)
    close = text.find(CLOSE)
    if start < 0 or (0 <= close < start):  # the completion does not open the block itself
        if not opened and close < 0:
            return 0  # no mark at all
        start = 0  # </think> alone closes a block that began before the completion
    else:
        start += len(OPEN)
    end = close if close >= start else len(text)
    return _ids_needed(ids, end, decode) - (_ids_needed(ids, start, decode) if start else 0)


def _ids_needed(ids: Sequence[int], characters: int, decode: Callable[[list[int]], str]) -> int:
    """The smallest number of leading ids whose text has at least `characters` characters, found by
    binary search."""
    lower_bound, upper_bound = 0, len(ids)
    while lower_bound < upper_bound:
        middle = (lower_bound + upper_bound) // 2
        if len(decode(list(ids[:middle]))) >= characters:
            upper_bound = middle
        else:
            lower_bound = middle + 1
    return lower_bound


def _turns(trajectory: Trajectory) -> Iterator[list[int]]:
    """Yield the ids of each assistant turn of a trajectory. Turns are runs of trained tokens; the
    environment's tokens between them are not trained."""
    turn_ids: list[int] = []
    for token, trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if trained:
            turn_ids.append(token)
        elif turn_ids:
            yield turn_ids
            turn_ids = []
    if turn_ids:
        yield turn_ids
