"""What a packed token sees is what it would see had its row stood alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from varlen_loop import varlen_attn

from engine.worker.core.batch import Row
from engine.worker.ops import attention, causal
from engine.worker.ops.attention import Attention, VarlenPlan
from engine.worker.ops.packing import Packed, pack, prefix_buckets, suffix_buckets, token_count

CPU = torch.device("cpu")


@st.composite
def some_rows(draw: st.DrawFn) -> list[Row]:
    """Groups that share a prompt, ragged, some of one token, and rows that stand alone; every id
    is used once, so that what is seen can be told by its id."""
    rows: list[Row] = []
    fresh = 0

    def ids(count: int) -> list[int]:
        nonlocal fresh
        fresh += count
        return list(range(fresh - count, fresh))

    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            prompt = ids(draw(st.integers(1, 30)))
            for _ in range(draw(st.integers(1, 4))):
                length = draw(st.sampled_from([1, 1, 2, 3, 5, 9, 40]))
                mask = [1, *draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))]
                said = prompt + ids(length)
                rows.append(Row(said, [0] * len(prompt) + mask[:length], len(prompt)))
        else:
            length = draw(st.sampled_from([2, 3, 8, 20, 60]))
            mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
            rows.append(Row(ids(length), [0, *mask[1:-1], 1]))
    return draw(st.permutations(rows))


def seen_by(batch: Packed, plan: str, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """For every packed token the ids it attends to, from uniform attention over one-hot values."""
    count = len(batch.ids)
    dim = count + count % 2
    qkv = torch.zeros(count, 3, dim)
    qkv[torch.arange(count), 2, torch.arange(count)] = 1
    if plan == "varlen":
        patch.setattr(attention, "_varlen_kernel", lambda: (varlen_attn, True))
    if plan == "rectangles":
        patch.setattr(causal, "LONGEST", 0)
    attend = Attention(batch.layout, 1, 1, CPU, torch.float32, varlen=plan == "varlen")
    out = attend(qkv.flatten(1))
    assert out.shape == (count, dim)
    return [sorted(batch.ids[row[:count].nonzero()[:, 0]].tolist()) for row in out]


@pytest.mark.parametrize("plan", ["blocks", "rectangles", "varlen"])
@settings(deadline=None, max_examples=40)
@given(rows=some_rows())
def test_a_token_is_predicted_from_its_own_row_up_to_the_one_before(
    plan: str, rows: list[Row]
) -> None:
    batch = pack(rows)
    with pytest.MonkeyPatch.context() as patch:
        seen = seen_by(batch, plan, patch)
    at = 0
    for number, row in enumerate(rows):
        for place, trained in enumerate(row.loss_mask):
            if trained:
                source = int(batch.source[at])
                assert int(batch.labels[at]) == row.ids[place]
                assert int(batch.row[at]) == number
                assert int(batch.ids[source]) == row.ids[place - 1]
                assert int(batch.positions[source]) == place - 1
                assert seen[source] == sorted(row.ids[:place])
                at += 1
    assert at == len(batch.labels)


@settings(deadline=None, max_examples=40)
@given(rows=some_rows())
def test_each_prompt_is_run_once_and_last_tokens_never(rows: list[Row]) -> None:
    batch = pack(rows)
    prompts = {tuple(r.ids[: r.prefix_len]) for r in rows if r.prefix_len}
    own = sum(len(r.ids) - 1 - r.prefix_len for r in rows)
    assert len(batch.ids) == token_count(rows) == own + sum(map(len, prompts))
    assert len(set(batch.ids.tolist())) == len(batch.ids)
    assert not {r.ids[-1] for r in rows} & set(batch.ids.tolist())


@settings(deadline=None, max_examples=40)
@given(rows=some_rows())
def test_every_packed_token_stands_in_exactly_one_bucket(rows: list[Row]) -> None:
    layout = pack(rows).layout
    buckets = prefix_buckets(layout) + [b.suffixes for b in suffix_buckets(layout)]
    covered = [i for b in buckets for i in range(b.start, b.stop)]
    assert covered == list(range(sum(layout.prefix_lengths) + sum(layout.suffix_lengths)))
    for bucket in buckets:
        places = bucket.scatter_index
        assert places is None or len(set(places.tolist())) == bucket.stop - bucket.start
        assert places is None or int(places.max()) < bucket.rows * bucket.length


def test_hand_worked_group_of_two() -> None:
    # prompt 7 8, answers 1 2 and 3; the row 4 5 6 stands alone
    rows = [
        Row([7, 8, 1, 2], [0, 0, 1, 1], 2),
        Row([7, 8, 3], [0, 0, 1], 2),
        Row([4, 5, 6], [0, 1, 1]),
    ]
    batch = pack(rows)
    assert batch.layout.prefix_lengths == (2, 2)
    assert batch.ids.tolist() == [7, 8, 4, 5, 1]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.source.tolist() == [1, 4, 1, 2, 3]
    assert batch.labels.tolist() == [1, 2, 3, 5, 6]
    assert batch.row.tolist() == [0, 0, 1, 2, 2]


def test_a_prompt_that_two_groups_share_by_chance_is_one_prompt() -> None:
    rows = [Row([7, 8, 1], [0, 0, 1], 2), Row([9, 2], [0, 1], 1), Row([7, 8, 3], [0, 0, 1], 2)]
    assert sorted(pack(rows).layout.prefix_lengths) == [1, 2]


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        pack([Row([5, 6], [1, 1])])


def test_the_lengths_of_a_varlen_plan_count_the_prompt_for_each_suffix() -> None:
    rows = [Row([7, 8, 1, 2, 3], [0, 0, 1, 1, 1], 2), Row([7, 8, 4, 5], [0, 0, 1, 1], 2)]
    plan = VarlenPlan.for_layout(pack(rows).layout, CPU)
    assert plan.query_starts.tolist() == [0, 2, 3, 5]
    assert plan.key_starts.tolist() == [0, 2, 5, 9]
    assert plan.keys is not None and plan.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]
    assert (plan.longest_query, plan.longest_key) == (2, 4)
