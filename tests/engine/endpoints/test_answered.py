"""What was answered before, and what may be spent: nothing is asked twice, no cap is passed."""

import threading
from pathlib import Path

import pytest

from engine.endpoints.answered import AnswerLedger, OutOfBudget, most_tokens_in
from engine.endpoints.references import cost_of
from engine.records.lines.endpoint_call import EndpointCall
from engine.records.run_config import EndpointEntry

PRICED = EndpointEntry(name="x", url="http://h/v1", model="m", price_in=2.0, price_out=8.0)


def call(turn: int, cost: float = 0.25) -> EndpointCall:
    return EndpointCall(
        model="m",
        task="t",
        attempt=0,
        turn=turn,
        request=f"r{turn}",
        message={"role": "assistant", "content": "hi"},
        tokens_in=10,
        tokens_out=5,
        cost=cost,
    )


def test_an_answer_is_known_to_the_next_attempt_and_so_is_its_cost(tmp_path: Path):
    path = tmp_path / "calls.jsonl"
    first = AnswerLedger(path, None, 1.0)
    first.admit(0.5)
    first.keep(call(0), 0.5)
    first.close()
    again = AnswerLedger(path, None, 1.0)
    known = again.find(("m", "t", 0, 0), "r0")
    assert known is not None and known.message["content"] == "hi"
    assert again.find(("m", "t", 0, 0), "another request") is None
    assert again.find(("m", "t", 1, 0), "r0") is None
    assert (again.total.calls, again.total.cost, again.use["m"].tokens_in) == (1, 0.25, 10)
    with pytest.raises(OutOfBudget, match="max_cost = 1"):
        again.admit(0.8)
    again.close()


def test_what_is_under_way_counts_at_its_most_until_it_is_known(tmp_path: Path):
    answered = AnswerLedger(tmp_path / "calls.jsonl", None, 1.0)
    answered.admit(0.6)
    admitted = threading.Event()

    def second() -> None:
        answered.admit(0.6)
        admitted.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not admitted.wait(0.05)  # 1.2 would pass the cap
    answered.keep(call(0), 0.6)  # it cost a quarter
    assert admitted.wait(5)
    thread.join()
    answered.drop(0.6)
    answered.admit(0.75)
    answered.close()


def test_calls_are_capped_to_the_number(tmp_path: Path):
    answered = AnswerLedger(tmp_path / "calls.jsonl", 2, None)
    for turn in range(2):
        answered.admit(9.0)
        answered.keep(call(turn), 9.0)
    with pytest.raises(OutOfBudget, match="max_calls = 2"):
        answered.admit(0.0)
    assert answered.stopped_by == "max_calls = 2"
    answered.close()


def test_money_follows_from_tokens_and_prices_and_a_prompt_has_no_more_tokens_than_bytes():
    assert cost_of(PRICED, 1_000_000, 500_000) == 6.0
    request = {"messages": [{"role": "user", "content": "ü" * 50}], "tools": []}
    assert 100 < most_tokens_in(request) < 200
