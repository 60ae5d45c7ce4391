"""The thinking penalty against numbers computed by hand."""

from collections.abc import Sequence

import pytest

from engine.models.dialects.channels import HARMONY_THOUGHTS
from engine.models.reasoning import THINK, Span, ThoughtReader, tagged_thoughts, tags_of
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.rollouts.advantages import assign
from engine.worker.rollouts.shaping import penalise_thinking, thought_tokens

WORDS = {1: "<think>", 2: "</think>", 3: "so ", 4: "7", 5: "<th", 6: "ink>", 7: "</thi", 8: "nk>"}
# gpt-oss, Ministral, Gemma 4
WORDS |= {9: "<|start|>", 10: "assistant", 11: "<|channel|>", 12: "analysis", 13: "<|message|>"}
WORDS |= {
    14: "<|end|>",
    15: "final",
    16: "[THINK]",
    17: "[/THINK]",
    18: "<|channel>",
    19: "thought",
}
WORDS |= {20: "<channel|>", 21: "commentary", 22: " to=f"}


class Words:
    """Reads completions made of WORDS."""

    def __init__(self, thoughts: ThoughtReader, opened: bool = False) -> None:
        self.thoughts, self.opened = thoughts, opened

    def completion_text(self, ids: Sequence[int]) -> str:
        return "".join(WORDS[i] for i in ids)

    def thought_spans(self, text: str) -> list[Span]:
        return self.thoughts.spans(text, self.opened)


TAGS = tagged_thoughts((THINK,))
PLAIN = Words(TAGS)


@pytest.mark.parametrize(
    ("ids", "opened", "thought"),
    [
        ([1, 3, 3, 3, 2, 4], False, 3),
        ([3, 3, 2, 4], True, 2),  # the prompt opened the block
        ([1, 2, 4], False, 0),
        ([2, 4], True, 0),
        ([1, 3, 3], False, 2),  # cut before it was closed
        ([3, 3, 3], True, 3),
        ([3, 4], False, 0),  # nothing was thought
        ([5, 6, 3, 3, 7, 8, 4], False, 2),  # marks of several tokens
        ([1, 3, 2, 4, 3, 3], False, 1),  # what follows is the answer
        ([], True, 0),
    ],
)
def test_tokens_between_the_marks_are_counted(ids: list[int], opened: bool, thought: int) -> None:
    assert thought_tokens(ids, Words(TAGS, opened)) == thought


ANALYSIS, FINAL = [11, 12, 13], [11, 15, 13]
CALL = [11, 21, 22, 13]


@pytest.mark.parametrize(
    ("ids", "thought"),
    [
        ([*ANALYSIS, 3, 3, 14, 9, 10, *FINAL, 4], 2),
        ([*ANALYSIS, 3, 14, 9, 10, *ANALYSIS, 3, 3, 14, 9, 10, *FINAL, 4], 3),  # thought twice
        ([*ANALYSIS, 3, 3, 3], 3),  # cut
        ([*ANALYSIS, 3, 14, 9, 10, *CALL, 4], 1),
        ([*FINAL, 4, 3], 0),
        ([4], 0),  # no channel at all
    ],
)
def test_what_is_said_in_the_channel_of_thoughts_is_counted(ids: list[int], thought: int) -> None:
    assert thought_tokens(ids, Words(HARMONY_THOUGHTS)) == thought


@pytest.mark.parametrize(
    ("template", "ids", "opened", "thought"),
    [
        ("{# [THINK][/THINK] #}", [16, 3, 3, 17, 4], False, 2),
        ("{# [THINK][/THINK] #}", [3, 3, 3], True, 3),
        ("{# <|channel>thought <channel|> #}", [18, 19, 3, 20, 4], False, 1),
        ("", [16, 3, 3, 17, 4], False, 0),  # to this model they are words
    ],
)
def test_the_marks_are_those_that_the_template_names(
    template: str, ids: list[int], opened: bool, thought: int
) -> None:
    assert thought_tokens(ids, Words(tagged_thoughts(tags_of(template)), opened)) == thought


def rollout(ids: list[int], reward: float, mask: list[int] | None = None) -> Trajectory:
    return Trajectory(
        task_id="t",
        prompt=[],
        prompt_ids=[9],
        ids=list(ids),
        loss_mask=mask or [1] * len(ids),
        sampled_logprobs=[0.0] * len(ids),
        reward=reward,
    )


def test_the_penalty_is_the_share_of_max_tokens_times_the_coefficient() -> None:
    short, long = rollout([1, 3, 2, 4], 1.0), rollout([1, 3, 3, 3, 2, 4], 1.0)
    group = Group("t", [short, long])
    penalise_thinking([group], 0.5, 10, PLAIN)
    assert (short.penalty, long.penalty) == pytest.approx((0.5 * 1 / 10, 0.5 * 3 / 10))
    assert (short.reward, long.reward) == (1.0, 1.0)  # the environment's own stays
    assert group.rewards == pytest.approx([0.95, 0.85])
    assert long.metrics == {"thinking_tokens": 3.0, "thinking_penalty": pytest.approx(0.15)}


def test_equal_rewards_differ_once_one_member_thought_longer() -> None:
    group = Group("t", [rollout([1, 3, 2, 4], 1.0), rollout([1, 3, 3, 3, 2, 4], 1.0)])
    assert group.uniform
    penalise_thinking([group], 0.5, 10, PLAIN)
    assert not group.uniform
    assign([group], "group_center")
    assert [t.advantage for t in group.members] == pytest.approx([0.05, -0.05])


def test_turns_are_averaged_so_that_the_penalty_never_exceeds_the_coefficient() -> None:
    # Two turns of 3 and 1 thought tokens, what the environment said between them not counted.
    ids = [1, 3, 3, 3, 2, 3, 3, 1, 3, 2, 4]
    mask = [1] * 5 + [0] * 2 + [1] * 4
    played = rollout(ids, 1.0, mask)
    penalise_thinking([Group("t", [played])], 1.0, 8, PLAIN)
    assert played.penalty == pytest.approx((3 + 1) / (2 * 8))


def test_a_member_whose_scoring_failed_is_left_alone() -> None:
    failed = rollout([1, 3, 2], 0.0)
    failed.error = "boom"
    penalise_thinking([Group("t", [failed])], 1.0, 8, PLAIN)
    assert failed.penalty == 0.0 and not failed.metrics
