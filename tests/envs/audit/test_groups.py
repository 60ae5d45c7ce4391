"""What scores groups is audited as groups: the reference ahead, and no pay for a place."""

from collections.abc import Mapping, Sequence
from typing import Any

from envs.audit.groups import GroupFindings, audit_group
from envs.json_types import ScoreReply

ROW = {"id": "a"}
ANSWERS = {"gold": "4", "empty": "", "echo": "What is 2 + 2?", "off by one": "5"}


def audited(rewards: Any) -> GroupFindings:
    """The findings on one group whose texts `rewards` values as a list."""

    def score_group(row: Mapping[str, Any], texts: Sequence[str]) -> list[ScoreReply]:
        return [
            {"reward": reward, "success": None, "metrics": {}, "error": None}
            for reward in rewards(texts)
        ]

    found = GroupFindings()
    audit_group(found, score_group, ROW, ANSWERS)
    return found


def test_a_group_with_the_reference_ahead_is_well():
    found = audited(lambda texts: [float(text == "4") for text in texts])
    assert (found.groups, found.risks, found.problems) == (1, [], [])


def test_pay_for_a_place_is_a_risk():
    found = audited(lambda texts: [1.0 / (place + 1) for place, _ in enumerate(texts)])
    assert found.risks == ["group order"]
    assert found.problems == [
        "score_group gives other rewards in another order on 1 of 1 groups: a"
    ]


def test_pay_for_what_is_no_answer_is_a_risk():
    found = audited(lambda texts: [float(len(text)) for text in texts])
    assert found.risks == ["group without the reference ahead"]


def test_a_group_that_cannot_be_scored_is_named_with_its_error():
    def score_group(row: Mapping[str, Any], texts: Sequence[str]) -> list[ScoreReply]:
        error = "score_group() raised KeyError"
        return [{"reward": 0.0, "success": False, "metrics": {}, "error": error} for _ in texts]

    found = GroupFindings()
    audit_group(found, score_group, ROW, ANSWERS)
    assert found.risks == ["group fails"] and "raised KeyError" in found.problems[0]
