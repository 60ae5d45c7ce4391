"""Cuts a batch into parts of about equal work, one for each rank (process of a run).

A part is a run of neighbours, so that the members of a group (answers to one task) mostly stay
together and their prompt is read once.
"""

from collections.abc import Sequence


def cut(costs: Sequence[float], ranks: int) -> list[range]:
    """Cut the items into one part for each of `ranks` processes. Returns the range of indices of
    each part, in order.

    The total cost is divided into equal shares, one per rank; an item belongs to the rank in whose
    share the item's middle lies. The first rank has at least one item if there is any; others may
    have none.

    Args:
        costs: the cost of each item, such as its number of tokens; above 0.
    """
    total = sum(costs)
    ends = [0] * ranks  # the index after the last item of each rank
    before = 0.0
    for index, cost in enumerate(costs):
        rank = min(ranks - 1, int(ranks * (before + cost / 2) / total))
        if index == 0:  # even if its middle lies in a later share: rank 0 always takes part
            rank = 0
        ends[rank] = index + 1
        before += cost
    parts: list[range] = []
    start = 0
    for end in ends:
        parts.append(range(start, max(start, end)))
        start = parts[-1].stop
    return parts
