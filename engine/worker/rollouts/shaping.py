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
        decode: turns ids of a completion into text.
    """
    for group in groups:
        for trajectory in group.scored:
            tokens_by_turn = [thought_tokens(ids, opened, decode) for ids in _turns(trajectory)]
            thinking_tokens = sum(tokens_by_turn)
            turns = max(1, len(tokens_by_turn))
            trajectory.penalty = coefficient * (thinking_tokens / (turns * max_tokens))
            trajectory.metrics["thinking_tokens"] = float(thinking_tokens)
            trajectory.metrics["thinking_penalty"] = trajectory.penalty


def thought_tokens(ids: Sequence[int], opened: bool, decode: Callable[[list[int]], str]) -> int:
    """How many of a completion's tokens lie in its think block, between <think> and </think>; 0
    without a block. A block that is never closed goes on to the end. A </think> without <think>
    before it closes a block that began before the completion.

    Args:
        opened: whether the prompt has opened the block already, so that no <think> is expected.
        decode: turns ids into text.
    """
    text = decode(list(ids))
    open_at = text.find(OPEN)  # -1 if there is none
    close_at = text.find(CLOSE)
    closes_earlier_block = close_at >= 0 and (open_at < 0 or close_at < open_at)
    if open_at >= 0 and not closes_earlier_block:
        start = open_at + len(OPEN)
    elif opened or closes_earlier_block:
        start = 0  # the block began before the completion
    else:
        return 0
    end = close_at if close_at >= start else len(text)
    tokens_before = _ids_needed(ids, start, decode) if start > 0 else 0
    return _ids_needed(ids, end, decode) - tokens_before


def _ids_needed(ids: Sequence[int], characters: int, decode: Callable[[list[int]], str]) -> int:
    """How many of the first ids are needed for a text of at least `characters` characters (a binary
    search)."""
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
    for token, is_trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        if is_trained:
            turn_ids.append(token)
        elif turn_ids:
            yield turn_ids
            turn_ids = []
    if turn_ids:
        yield turn_ids
