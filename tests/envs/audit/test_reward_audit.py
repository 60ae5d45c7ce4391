"""The audit flags rewards that pay for what is no answer, and passes those that do not."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from envs import Task
from envs.audit.audit_summary import headline
from envs.audit.reward_audit import audit, play
from envs.json_schema import schema_errors
from envs.rewards import choice, exact, json_value, last_number, number

NUMBERS = [Task(f"n{i}", f"What is {i} plus {i}?", str(2 * i)).to_row() for i in range(10, 50)]
MARKED = [Task(f"m{i}", f"Add {i} and 1.", f"Adding.\n#### {i + 1}").to_row() for i in range(30)]
WORDS = [
    Task(f"w{i}", f"What is the capital of land {i}?", name).to_row()
    for i, name in enumerate(["Rome", "Oslo", "Lima", "Bern", "Riga", "Kyiv", "Cairo", "Delhi"] * 3)
]
LETTERS = [Task(f"c{i}", f"Choose ({i}).", "ABCD"[i % 4]).to_row() for i in range(24)]
OBJECTS = [
    Task(f"j{i}", f"Order {i}", f'{{"count": {i}, "item": "hat{i}"}}').to_row()
    for i in range(2, 30)
]


class Scorer:
    """A scorer in this process, with the shape of an env process."""

    def __init__(self, reward: Callable[[Task, str], float], costs: bool = False) -> None:
        self.reward = reward
        self.costs = costs  # no yes or no, and 0 is the best there is

    def score(self, task: Any, completion: str) -> dict[str, Any]:
        try:
            reward, error = float(self.reward(Task.from_row(task), completion)), None
        except Exception as problem:  # noqa: BLE001 - as the env process does
            reward, error = 0.0, repr(problem)
        return {
            "reward": reward,
            "success": None if reward < 0 or self.costs else reward == 1.0,
            "metrics": {},
            "error": error,
            "seconds": 0.001,
        }

    def start(self, task: Any) -> Any:
        raise AssertionError("a single-turn audit starts no episode")


def verdict(
    reward: Callable[[Task, str], float], rows: list = NUMBERS, costs: bool = False
) -> dict[str, Any]:
    return audit(Scorer(reward, costs), rows, "single", budget_s=60)


def in_object(task: Task, completion: str) -> float:
    try:
        return float(json_value(completion) == json_value(task.answer_text))
    except ValueError:
        return 0.0


GOOD: dict[str, tuple[Callable[[Task, str], float], list]] = {
    "exact": (lambda task, text: exact(text, task.answer_text), WORDS),
    "exact number": (lambda task, text: exact(text, task.answer_text), NUMBERS),
    "number": (lambda task, text: number(text, task.answer_text), NUMBERS),
    "number after a mark": (
        lambda task, text: number(text, task.answer_text.split()[-1]),
        MARKED,
    ),
    "choice": (lambda task, text: choice(text, task.answer_text), LETTERS),
    "object": (in_object, OBJECTS),
    "tiers": (
        lambda task, text: (
            1.0
            if exact(text, task.answer_text)
            else 0.2
            if re.fullmatch(r"\d+", text.strip())
            else 0.0
        ),
        NUMBERS,
    ),
    "minus and plus": (
        lambda task, text: 1.0 if exact(text, task.answer_text) else -1.0 if text else 0.0,
        NUMBERS,
    ),
    "costs": (lambda task, text: 0.0 if exact(text, task.answer_text) else -1.0, NUMBERS),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_sound_reward_passes(name: str):
    reward, rows = GOOD[name]
    found = verdict(reward, rows, costs=name == "costs")
    assert (found["verdict"], found["risks"]) == ("ok", []), found["headline"]
    assert found["gold_failing"] == [] and found["headline"].startswith("ok: gold earns")


BAD: dict[str, tuple[Callable[[Task, str], float], list, set[str]]] = {
    "constant": (lambda task, text: 1.0, NUMBERS, {"all alike"}),
    "always nothing": (lambda task, text: 0.0, NUMBERS, {"all alike", "gold"}),
    "length": (lambda task, text: min(1.0, len(text) / 100), NUMBERS, {"filler"}),
    "brevity": (lambda task, text: 1.0 if len(text) < 5 else 0.0, NUMBERS, {"empty", "off by one"}),
    "substring": (
        lambda task, text: float(task.answer_text in text),
        NUMBERS,
        {"enumerated", "negated gold", "gold then wrong"},
    ),
    "substring of the answer": (
        lambda task, text: float(text in task.answer_text),
        WORDS,
        {"empty", "truncated gold"},
    ),
    "last number": (
        lambda task, text: float(last_number(text) == int(task.answer_text)),
        NUMBERS,
        {"negated gold"},
    ),
    "first number": (
        lambda task, text: float((re.findall(r"\d+", text) or [""])[0] == task.answer_text),
        NUMBERS,
        {"negated gold", "gold then wrong"},
    ),
    "format": (
        lambda task, text: float("####" in text),
        MARKED,
        {"format only", "off by one", "other gold", "enumerated"},
    ),
    "any object": (
        lambda task, text: float(not schema_errors(safe_json(text), {"type": "object"})),
        OBJECTS,
        {"format only", "off by one", "other gold"},
    ),
    "any known answer": (
        lambda task, text: float(text.strip() in {row["answer"][0]["content"] for row in WORDS}),
        WORDS,
        {"other gold"},
    ),
    "near enough": (
        lambda task, text: float(abs((last_number(text) or -99) - int(task.answer_text)) < 3),
        NUMBERS,
        {"off by one"},
    ),
    "echo": (
        lambda task, text: float(set(task.prompt_text.split()) <= set(text.split())),
        NUMBERS,
        {"prompt echo", "gold"},
    ),
    "manners": (
        lambda task, text: float(text.startswith("Sure") or text.strip() == task.answer_text),
        NUMBERS,
        {"opener only"},
    ),
    "half for anything": (
        lambda task, text: 1.0 if text == task.answer_text else 0.5,
        NUMBERS,
        {"empty", "junk", "filler"},
    ),
    "inverted": (
        lambda task, text: 0.0 if text == task.answer_text else 1.0,
        NUMBERS,
        {"gold", "empty", "junk"},
    ),
    "enumeration": (
        lambda task, text: float(task.answer_text in re.split(r"[ ,;]+", text)),
        NUMBERS,
        {"enumerated", "negated gold"},
    ),
    "raising": (lambda task, text: 1 / 0, NUMBERS, {"gold", "all alike", "raises"}),
    "raising on what is no number": (
        lambda task, text: float(int(text) == int(task.answer_text)),
        NUMBERS,
        {"raises"},
    ),
}
# Paid for what is nearly right, or failing on what is not: worth saying, no reason to refuse.
WEAK = {"any known answer", "raising on what is no number"}


def safe_json(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return None


@pytest.mark.parametrize("name", BAD)
def test_a_planted_fault_is_flagged_and_named(name: str):
    reward, rows, named = BAD[name]
    found = verdict(reward, rows)
    assert found["verdict"] == ("warn" if name in WEAK else "risk")
    assert named <= {*found["risks"], *found["weaknesses"]}, found["headline"]
    assert found["headline"].startswith(f"{found['verdict']}:")
    assert not {"truncated gold", "off by one", "other gold"} & set(found["risks"])


def test_a_reward_with_chance_in_it_is_flagged():
    calls = iter(range(10**6))
    found = verdict(
        lambda task, text: exact(text, task.answer_text) * (1 - 0.01 * (next(calls) % 5))
    )
    assert "unstable" in found["risks"] and not found["deterministic"]
    assert found["unstable"][0]["first"] != found["unstable"][0]["second"]
    assert not found["order_dependent"]


def test_a_reward_that_remembers_what_it_has_seen_is_flagged():
    seen: set[tuple[str, str]] = set()

    def novelty(task: Task, text: str) -> float:
        new = (task.id, text) not in seen
        seen.add((task.id, text))
        return float(new and text == task.answer_text)

    assert "unstable" in verdict(novelty)["risks"]


def test_a_reward_that_depends_on_what_came_before_is_flagged():
    """The same twice in a row, another once different answers were scored in between."""
    last: list[str] = [""]

    def praise_for_change(task: Task, text: str) -> float:
        if text != last[-1]:
            last.append(text)
        return exact(text, task.answer_text) * (1.0 if len(last) < 40 else 0.5)

    found = verdict(praise_for_change)
    assert "order dependent" in found["risks"] and found["order_dependent"]
    assert found["deterministic"]
    assert any("it keeps a state" in text for text in found["problems"])


class Stumbling(Scorer):
    """A scorer that is right, but for some calls of its process."""

    def __init__(self, wrong: set[int], error: str | None) -> None:
        super().__init__(lambda task, text: exact(text, task.answer_text))
        self.wrong, self.error, self.calls = wrong, error, 0

    def score(self, task: Any, completion: str) -> dict[str, Any]:
        self.calls += 1
        said = super().score(task, completion)
        failed = {"reward": 0.0, "success": False, "error": self.error}
        return said | failed if self.calls in self.wrong else said


@pytest.mark.parametrize(
    ("before", "afresh", "error"),
    [
        (set(), {2}, "score() did not answer within 10 s"),
        (set(), {2, 6, 9}, "score() did not answer within 10 s"),
        ({30}, set(), "score() did not answer within 10 s"),
        ({1}, {1}, None),  # its first call is slower than a limit of its own
    ],
)
def test_a_call_that_goes_wrong_once_makes_no_risk(before: set, afresh: set, error: str | None):
    scorer, fresh = Stumbling(before, error), lambda: Stumbling(afresh, error)
    found = audit(scorer, NUMBERS, "single", budget_s=60, fresh=fresh)
    assert (found["risks"], found["deterministic"], found["order_dependent"]) == ([], True, False)
    assert found["fresh_process"]["scored"] == 24 and found["fresh_process"]["differing"] == 0


def test_one_answer_that_is_random_itself_makes_no_risk():
    drawn = {"reward": 0.0}

    def mostly(task: Task, text: str) -> float:
        return (
            drawn["reward"] if task.id == "n10" and text == "20" else exact(text, task.answer_text)
        )

    def fresh() -> Scorer:
        drawn["reward"] += 0.3
        return Scorer(mostly)

    rows = NUMBERS[:2]
    found = audit(Scorer(mostly), rows, "single", budget_s=60, fresh=fresh)
    assert found["fresh_process"]["wavering"] == 1 and found["deterministic"]
    assert not {"unstable", "fresh process"} & set(found["risks"])


def test_a_reward_that_believes_the_first_answer_of_a_task_is_flagged():
    firsts: dict[str, str] = {}

    def first_wins(task: Task, text: str) -> float:
        return float(firsts.setdefault(task.id, text) == text)

    found = verdict(first_wins)
    assert "gold" in found["risks"], "every second row is scored with gold last"
    assert len(found["gold_failing"]) == 20


def test_near_misses_say_how_well_a_reward_separates():
    found = verdict(lambda task, text: exact(text, task.answer_text))
    assert found["separability"] == {"truncated gold": 1.0, "off by one": 1.0, "other gold": 1.0}

    def lax(task: Task, text: str) -> float:
        """Even right answers are told from their neighbours, odd ones are not."""
        right, said = int(task.answer_text), last_number(text)
        if said is None or abs(said - right) > 1:
            return 0.0
        return 1.0 if said == right or right % 4 == 0 else 0.25

    found = verdict(lax)
    assert found["separability"]["off by one"] == 0.75  # half of the rows tie, a tie is a half
    table = {line["probe"]: line for line in found["probes"]}
    assert (table["off by one"]["mean"], table["off by one"]["verdict"]) == (0.625, "warn")


def test_saturation_says_who_earns_the_top_reward():
    found = verdict(GOOD["tiers"][0])["saturation"]
    assert (found["top"], found["levels"], found["gold_at_top"]) == (1.0, 3, 1.0)
    assert found["others_at_top"] == 0.0
    flat = verdict(lambda task, text: 1.0)["saturation"]
    assert (flat["levels"], flat["others_at_top"]) == (1, 1.0)


def test_reference_answers_that_fail_are_listed():
    found = verdict(lambda task, text: float(text == task.answer_text and int(text) % 4 == 0))
    assert "gold" in found["risks"] and len(found["gold_failing"]) == 20
    few = verdict(lambda task, text: float(text == task.answer_text and text != "20"))
    assert few["verdict"] == "ok" and few["gold_failing"] == ["n10"]
    assert "1 of 40 reference answers fail: n10" in few["problems"]


def test_the_table_says_what_each_probe_earned():
    found = verdict(lambda task, text: float(task.answer_text in text))
    table = {line["probe"]: line for line in found["probes"]}
    assert table["gold"]["mean"] == 1.0 and table["gold"]["verdict"] == "info"
    assert table["wrong then gold"]["verdict"] == "info"
    assert table["negated gold"]["paid"] == 1.0
    assert table["negated gold"]["example"]["completion"].startswith("not ")
    assert table["empty"]["mean"] == 0.0 and "example" not in table["empty"]


def test_a_score_that_fails_on_a_probe_is_a_weakness_but_no_risk():
    found = verdict(lambda task, text: float(int(text) == int(task.answer_text)))
    assert (found["verdict"], found["weaknesses"]) == ("warn", ["raises"])
    assert any("score fails on empty (40 of 40): ValueError" in text for text in found["problems"])


def test_without_reference_answers_the_blind_probes_still_tell():
    rows = [Task(f"r{i}", f"Write about {i}").to_row() for i in range(10)]
    good = verdict(lambda task, text: 0.0, rows)
    assert good["verdict"] == "ok" and "no row has a reference answer" in good["problems"][0]
    assert "filler" in verdict(lambda task, text: float(len(text) > 50), rows)["risks"]


def test_time_limits_the_rows_and_the_share_is_stated():
    now = [0.0]

    def slow(task: Task, text: str) -> float:
        now[0] += 0.1
        return exact(text, task.answer_text)

    found = audit(Scorer(slow), NUMBERS, "single", budget_s=5.0, clock=lambda: now[0])
    assert found["rows_scored"] == 3 and found["share"] == 0.075
    assert "3 of 40 rows scored" in found["headline"]


def test_a_scorer_that_hangs_is_left_after_three_times_the_budget():
    now = [0.0]

    def hanging(task: Task, text: str) -> float:
        now[0] += 10.0
        return 0.0

    found = audit(Scorer(hanging), NUMBERS, "single", budget_s=5.0, clock=lambda: now[0])
    assert found["rows_scored"] == 1
    assert now[0] <= 3 * 5.0 + 10.0, "one call after the time was up, not one per probe"
    assert found["verdict"] == "risk" and "not every probe was tried" in found["problems"][-1]


def test_the_order_is_seeded():
    def order(seed: int) -> list[str]:
        seen: list[str] = []
        audit(Scorer(lambda t, c: seen.append(t.id) or 0.0), NUMBERS, "single", seed=seed)
        return list(dict.fromkeys(seen))

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(row["id"] for row in NUMBERS)


def test_a_dataset_has_nothing_to_audit():
    found = audit(Scorer(lambda t, c: 1 / 0), NUMBERS, "sft")
    assert (found["verdict"], found["rows_scored"]) == ("ok", 0)


GUESS = """
class Env(MultiTurnEnv):
    def tasks(self):
        return [
            Task(
                str(n),
                f"Guess {n % 5}.",
                [Message("assistant", "0"), Message("assistant", str(n))],
                metadata={"n": n},
            )
            for n in range(1, 30)
        ]

    def start(self, task):
        return {"n": task.metadata["n"], "found": False, "turns": 0}

    def step(self, state, completion):
        state["turns"] += 1
        state["found"] = completion.content == str(state["n"])
        return None if state["found"] else [Message("user", "no")]

    def score(self, task, state):
        return REWARD
"""


@pytest.mark.parametrize(
    ("reward", "risks"),
    [
        ("Score(float(state['found']), success=state['found'])", []),
        ("Score(1.0)", ["all alike"]),
        ("Score(float(state['turns'] > 0))", ["all alike"]),
    ],
)
def test_rollouts_are_audited_through_the_process(write_env, start, reward: str, risks: list):
    process = start(write_env(GUESS.replace("REWARD", reward)))
    rows = process.tasks()
    found = audit(process, rows, process.describe()["kind"], budget_s=30)
    assert found["risks"] == risks and found["rows_scored"] == len(rows)
    table = {line["probe"]: line for line in found["probes"]}
    assert table["last message only"]["verdict"] == "info"


SUMS = """
import random, re

class Env(SingleTurnEnv):
    seen = set()

    def tasks(self):
        return [Task(f"n{i}", f"What is {i} plus {i}?", str(2 * i)) for i in range(10, 50)]

    def score(self, task, completion):
        new = (task.id, completion) not in self.seen
        self.seen.add((task.id, completion))
        numbers = re.findall(r"[0-9]+", completion)
        right = completion.strip() == task.answer
        return Score(float(REWARD))
"""
PLANTED = {
    "sound": ("right", set()),
    "constant": ("1.0", {"all alike"}),
    "length": ("min(1.0, len(completion) / 100)", {"filler"}),
    "substring": ("task.answer in completion", {"enumerated", "negated gold"}),
    "enumeration": ("task.answer in numbers", {"enumerated", "negated gold"}),
    "last number": ("numbers[-1:] == [task.answer]", {"negated gold"}),
    "nondeterministic": ("right and random.random() < 0.7", {"unstable"}),
    "stateful": ("right and new", {"unstable"}),
    "raising": ("int(completion) == int(task.answer)", {"raises"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_planted_in_a_real_environment_is_flagged(write_env, start, name: str):
    reward, named = PLANTED[name]
    process = start(write_env(SUMS.replace("REWARD", reward)))
    found = audit(process, process.tasks(), "single", budget_s=30)
    assert named <= {*found["risks"], *found["weaknesses"]}, found["headline"]
    assert found["verdict"] == {"sound": "ok", "raising": "warn"}.get(name, "risk")
    assert found["rows_scored"] == 40


def test_a_rollout_that_cannot_start_is_a_failed_score(write_env, start):
    body = GUESS.replace("REWARD", "Score(1.0)").replace(
        'return {"n"', 'raise ValueError("no")\n        return {"n"'
    )
    process = start(write_env(body))
    score = play(process, process.tasks()[0], [{"role": "assistant", "content": "1"}])
    assert score["reward"] == 0.0 and "ValueError: no" in score["error"]


def test_pay_that_rises_with_the_length_of_nothing_is_a_weakness():
    def long_winded(task: Task, text: str) -> float:
        right = exact(text, task.answer_text)
        return 0.55 * right + min(0.27, 0.03 * len(text.split()))

    found = verdict(long_winded)
    assert "pays for length" in found["weaknesses"] and "pays for length" not in found["risks"]
    table = {line["probe"]: line for line in found["probes"]}
    assert table["long junk"]["mean"] == 0.27 > table["short junk"]["mean"] == 0.03
    only = verdict(lambda task, text: max(exact(text, task.answer_text), len(text) / 9000))
    assert only["weaknesses"] == ["pays for length"] and only["verdict"] == "warn"
    assert "pays for length (junk of one word 0.00, endless 0." in only["headline"]
    # A right answer that earns more for the words behind it.
    more = verdict(
        lambda task, text: (
            float(text.split()[:1] == [task.answer_text]) * (0.8 + 0.2 * (len(text) > 99))
        )
    )
    assert "pays for length" in more["weaknesses"]
    said = headline([], more["weaknesses"], more["probes"], (0, 40), "40 rows")
    assert "pays for length (gold 0.80, with junk behind it 1.00)" in said


def test_pay_for_any_words_at_all_is_no_pay_for_length():
    found = verdict(lambda task, text: max(exact(text, task.answer_text), 0.2 * bool(text)))
    assert "pays for length" not in found["weaknesses"]


def test_answers_up_to_any_token_limit_are_tried():
    longest: dict[str, int] = {}

    def watching(task: Task, text: str) -> float:
        longest[task.id] = max(longest.get(task.id, 0), len(text))
        return exact(text, task.answer_text)

    found = verdict(watching)
    assert {"long junk", "gold then junk"} <= {line["probe"] for line in found["probes"]}
    assert min(longest.values()) > 1500
    lax = verdict(lambda task, text: float(task.answer_text in text.split()))
    table = {line["probe"]: line for line in lax["probes"]}
    assert (table["gold then junk"]["mean"], table["gold then junk"]["verdict"]) == (1.0, "info")
    assert "long junk" in verdict(lambda task, text: float(len(text) > 1500))["risks"]


def test_the_headline_of_failing_gold_says_how_many_fail():
    class Half(Scorer):
        """Pays every reference answer in full, and calls every second one no success."""

        def score(self, task: Any, completion: str) -> dict[str, Any]:
            found = super().score(task, completion)
            return found | {"success": found["reward"] == 1.0 and int(task["id"][1:]) % 2 == 0}

    found = audit(Half(lambda t, text: exact(text, t.answer_text)), NUMBERS, "single", budget_s=60)
    assert found["risks"] == ["gold"]
    assert found["headline"] == (
        "risk: gold earns 1.00, but 20 of 40 reference answers fail (40 of 40 rows scored)"
    )
