"""A batch cut into parts of about equal work, one for each rank.

Parts are runs of neighbours, so that the members of a group mostly stay together and read their
prompt once.
"""

from collections.abc import Sequence


def cut(costs: Sequence[float], ranks: int) -> list[range]:
    """The indices of each rank's part, in order: every item goes to the rank in whose share of the
    whole cost its middle lies. The first rank has at least one item where there is any, others may
    have none.

    Args:
        costs: of each item, such as its tokens; above 0.
    """
    total = sum(costs)
    ends = [0] * ranks  # the index after the last item of each rank
    before = 0.0
    for index, cost in enumerate(costs):
        rank = min(ranks - 1, int(ranks * (before + cost / 2) / total))
        if index == 0:  # however long it is: rank 0 always takes part
            rank = 0
        ends[rank] = index + 1
        before += cost
    parts: list[range] = []
    start = 0
    for end in ends:
        parts.append(range(start, max(start, end)))
        start = parts[-1].stop
    return parts
