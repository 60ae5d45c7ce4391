"""An environment's rows in tokens: counted once, cut and summed as the trainer will."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_configs import dpo_settings, grpo_settings, sft_settings

from engine.core.files import append_line, write_json
from engine.environments import env_facts
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.environments.registry import EnvRecord
from engine.home.owner_marks import SEAL
from engine.home.run_dir import Home
from engine.records.audit import Audit
from engine.records.env_version import EnvVersion
from envs.config.settings import Limits
from tests import tiny_model

ROW = RowLengths(10, 30, ((10, 15), (20, 30)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model.write_model(tmp_path / "model")
    return tmp_path / "model"


def stored(home: Home, rows: list[dict[str, Any]], **changes: Any) -> EnvRecord:
    """A pushed version as the registry would hand it out."""
    folder = home.env("sums", "0" * 12)
    folder.mkdir(parents=True)
    for row in rows:
        append_line(folder / "tasks.jsonl", row)
    values = {
        "env_id": "sums@" + "0" * 12,
        "name": "sums",
        "hash": "0" * 12,
        "dir": folder,
        "audit": Audit(verdict="ok", headline="ok", score_seconds_p95=0.25),
    }
    version = {
        "kind": "single",
        "scored": True,
        "tools": [],
        "rows": {},
        "limits": Limits(),
        "secrets": (),
    }
    return EnvRecord(**values, version=EnvVersion(**(version | changes)))


def row(number: int, split: str = "train", answer: str | None = "4", **changes: Any) -> dict:
    prompt = [{"role": "user", "content": f"{number} + 2?"}]
    gold = [*prompt, {"role": "assistant", "content": answer}] if answer is not None else None
    values = {"id": str(number), "prompt": prompt, "answer": gold and gold[1:], "gold": gold}
    return values | {"split": split, "metadata": {}} | changes


def test_rows_are_counted_per_split_and_in_tokens(home: Home, model: Path):
    rows = [row(1), row(2, answer="1234"), row(3, answer=None), row(4, "heldout")]
    facts = env_facts.env_facts(home, stored(home, rows), model)
    assert (facts.train_rows, facts.heldout_rows, facts.answered_rows) == (3, 1, 2)
    opening = len("user\n1 + 2?\n") + 2 + len("assistant\n") + 1
    assert [length.prompt for length in facts.lengths] == [opening] * 3
    assert [length.answer for length in facts.lengths] == [2, 5, 0]  # the end token counts
    assert [length.total for length in facts.lengths] == [opening + 2, opening + 5, opening]
    assert (facts.longest_turn, facts.longest_total) == (5, opening + 5)
    assert facts.score_s == 0.25


def test_of_an_exam_the_heldout_rows_are_counted_in_tokens(home: Home, model: Path):
    """Without them an answer that thinks got the whole context, and no prompt fitted."""
    rows = [row(1, "heldout"), row(2, "heldout", answer="1234")]
    facts = env_facts.env_facts(home, stored(home, rows), model)
    opening = len("user\n1 + 2?\n") + 2 + len("assistant\n") + 1
    assert (facts.train_rows, facts.heldout_rows, facts.answered_rows) == (0, 2, 0)
    assert (facts.longest_prompt, facts.longest_turn) == (opening, 5)


def test_of_a_sealed_exam_no_lengths_are_told(home: Home, model: Path):
    record = stored(home, [row(1, "heldout"), row(2, "heldout", answer="1234")])
    assert env_facts.env_facts(home, record, model).longest_turn == 5
    write_json(record.dir / SEAL, {"looks": 3, "sealed": 1.0})
    facts = env_facts.env_facts(home, record, model)
    assert (facts.heldout_rows, facts.lengths, facts.cut_share(1)) == (2, (), 0.0)


def test_repeated_prompts_are_a_share_of_the_rows(home: Home, model: Path):
    rows = [row(1), row(1, id="b"), row(1, id="c"), row(2)]
    facts = env_facts.env_facts(home, stored(home, rows), model)
    assert facts.duplicate_share == 0.5


def test_rows_the_template_refuses_are_counted_with_its_words(home: Home, model: Path):
    broken = row(1, prompt=[{"role": "user", "content": None}])
    facts = env_facts.env_facts(home, stored(home, [broken, row(2)]), model)
    assert facts.refused == 1 and len(facts.lengths) == 1
    assert facts.refusal.startswith("row 1:")


def test_a_second_look_does_not_count_again(
    home: Home, model: Path, monkeypatch: pytest.MonkeyPatch
):
    record = stored(home, [row(1)])
    first = env_facts.env_facts(home, record, model)
    monkeypatch.setattr(env_facts.registry, "read_tasks", lambda *_: pytest.fail("read again"))
    assert env_facts.env_facts(home, record, model) == first


def test_another_template_is_counted_anew(home: Home, model: Path):
    record = stored(home, [row(1)])
    first = env_facts.env_facts(home, record, model)
    (model / "chat_template.jinja").write_text("xx" + tiny_model.TEMPLATE)
    second = env_facts.env_facts(home, record, model)
    assert second.longest_prompt == first.longest_prompt + 2


def test_a_damaged_cache_is_counted_anew(home: Home, model: Path):
    record = stored(home, [row(1)])
    first = env_facts.env_facts(home, record, model)
    for kept in (home.cache / "tokens").iterdir():
        kept.write_text("{")
    assert env_facts.env_facts(home, record, model) == first


def test_a_large_set_is_sampled(home: Home, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env_facts, "SAMPLE", 5)
    facts = env_facts.env_facts(home, stored(home, [row(n) for n in range(12)]), model)
    assert len(facts.lengths) == 5 and facts.train_rows == 12


def test_supervised_tokens_follow_loss_on_and_the_cut():
    assert [ROW.supervised(on) for on in ("assistant", "last", "all")] == [15, 10, 29]
    assert [ROW.supervised("assistant", cut) for cut in (10, 12, 20, 25, 99)] == [0, 2, 5, 10, 15]
    assert [ROW.supervised("last", cut) for cut in (20, 21)] == [0, 1]


def test_only_turns_after_the_prompt_are_answers():
    history = RowLengths(20, 30, ((5, 8), (20, 30)))
    assert (history.answer, history.answer_turns) == (10, 1)


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_longer_cut_never_supervises_less(shorter: int, more: int):
    for loss_on in ("assistant", "last", "all"):
        assert ROW.supervised(loss_on, shorter) <= ROW.supervised(loss_on, shorter + more)


def facts_of(*lengths: RowLengths, **changes: Any) -> EnvFacts:
    values = {
        "env_id": "e@1",
        "kind": "single",
        "scored": True,
        "train_rows": len(lengths),
        "heldout_rows": 9,
        "answered_rows": sum(bool(length.turns) for length in lengths),
        "lengths": lengths,
    }
    return EnvFacts(**(values | changes))


def test_statistics_of_sft_say_what_is_cut_and_what_is_lost():
    facts = facts_of(ROW, RowLengths(40, 50, ((40, 50),)), RowLengths(8, 8))
    found = env_facts.statistics(facts, sft_settings(max_length=32))
    assert found["counted"] == 2 and found["without_answer"] == 1
    assert found["truncated_share"] == 0.5
    assert found["dropped"] == 1  # all of its answer lies beyond the cut
    assert found["target"] == {"min": 10, "p50": 10, "p95": 15, "max": 15}


def test_an_answer_without_tokens_is_a_row_without_supervision():
    found = env_facts.statistics(
        facts_of(RowLengths(5, 5, ((5, 5),)), ROW), sft_settings(max_length=99, loss_on="last")
    )
    assert found["zero_supervision"] == 1


def test_statistics_of_grpo_say_which_prompts_leave_no_room():
    facts = facts_of(ROW, RowLengths(25, 30, ((25, 30),)))
    found = env_facts.statistics(facts, grpo_settings(max_length=32, max_tokens=8))
    assert found["dropped"] == 1
    assert found["truncated_share"] == 0.5  # the turn of ten tokens is longer than eight


def test_pairs_are_counted_with_the_length_of_the_worse_answer(home: Home, model: Path) -> None:
    rows = [
        row(1, metadata={"rejected": "four, I think, or five"}),
        row(2),
        row(3, metadata={"rejected": "4"}),  # the same as the better one
        row(4, split="heldout", metadata={"rejected": "five"}),
    ]
    facts = env_facts.env_facts(home, stored(home, rows), model)
    assert facts.paired_rows == 1 and facts.answered_rows == 3
    pair, plain, equal = facts.lengths
    assert pair.pair is not None and plain.pair is equal.pair is None
    chosen, rejected = pair.pair
    assert rejected > chosen == pair.total > pair.prompt
    assert (facts.longest_in_pairs, facts.longest_total) == (rejected, chosen)
    settings = dpo_settings(max_length=rejected - 1)
    found = env_facts.statistics(facts, settings)
    assert (found["counted"], found["truncated_share"], found["dropped"]) == (1, 1.0, 0)
    assert found["without_answer"] == 2


@pytest.mark.parametrize(("kind", "measured"), [("sft", 1), ("single", 2)])
def test_without_a_scorer_only_held_out_pairs_measure_a_run_of_dpo(
    home: Home, model: Path, kind: str, measured: int
) -> None:
    pair = {"metadata": {"rejected": "five"}}
    rows = [row(1, **pair), row(2, split="heldout", **pair), row(3, split="heldout")]
    record = stored(home, rows, kind=kind, scored=kind == "single")
    facts = env_facts.env_facts(home, record, model)
    assert facts.measured_rows(by_pairs=True) == measured
    assert facts.measured_rows(by_pairs=False) == 2


def test_the_pairs_of_a_dataset_of_preferences_are_counted_though_it_has_no_answers(
    home: Home, model: Path
) -> None:
    said = {
        key: [{"role": "assistant", "content": text}]
        for key, text in (("chosen", "four"), ("rejected", "5"))
    }
    rows = [row(n, answer=None, metadata=said) for n in range(3)]
    facts = env_facts.env_facts(home, stored(home, rows, kind="preference", scored=False), model)
    assert (facts.paired_rows, facts.answered_rows, facts.longest_total) == (
        3,
        0,
        facts.longest_prompt,
    )
    assert {length.pair for length in facts.lengths} == {
        (facts.longest_prompt + 5, facts.longest_prompt + 2)  # the end token counts
    }
    found = env_facts.statistics(facts, dpo_settings(max_length=facts.longest_prompt + 5))
    assert (found["counted"], found["truncated_share"], found["without_answer"]) == (3, 0.0, 0)
