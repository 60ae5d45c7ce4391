"""The search over our rollouts: gepa itself, a model that is a function, a server on loopback."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from fake_endpoint import Body, FakeEndpoint, Said, fake_endpoint

from engine.core.wording.prompt_texts import SYSTEM, Texts
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.run_config import EndpointEntry, ModelEntry, PromptConfig
from engine.records.settings import PromptSettings
from engine.runs.prompts.reflection import Reflection
from engine.runs.prompts.search import Round, Search, SearchResult, most_rounds
from engine.runs.prompts.tasks import SearchTasks
from envs.json_types import TaskRow

SETTINGS = PromptSettings(
    max_tokens=8,
    stop=[],
    thinking=False,
    max_turns=1,
    reflection="openai:big",
    max_rollouts=60,
    max_calls=6,
    max_cost=None,
    reflection_tokens=100,
    prompts_per_step=2,
    select_rows=4,
    tool_texts=True,
    eval_rows=4,
    max_length=100,
    seed=0,
    accept_reward_risk=False,
)
SECRET = "a-secret-that-answers-may-repeat"


def task(name: str) -> TaskRow:
    prompt = [{"role": "user", "content": f"Ask {name}?"}]
    return {"id": name, "prompt": prompt, "answer": [{"role": "assistant", "content": "yes"}]}


TASKS = SearchTasks([task(f"train-{n}") for n in range(6)], [task(f"choose-{n}") for n in range(4)])


def config_of(url: str, settings: PromptSettings) -> PromptConfig:
    return PromptConfig(
        run_id="r-1",
        kind="train",
        algorithm="prompt",
        env_id="e@1",
        env_dir="",
        sources={},
        models=[ModelEntry(ref="pebble", base_path="")],
        reflection=EndpointEntry(name="big", url=url, model="m", price_in=1000.0, price_out=1000.0),
        settings=settings,
    )


class Model:
    """Answers rightly in proportion to the words of `good` that the texts have."""

    def __init__(self, good: dict[str, str]) -> None:
        self.good, self.played = good, 0

    def play(self, tasks: Sequence[TaskRow], texts: Texts) -> list[EvaluationRow]:
        self.played += len(tasks)
        right = sum(text in texts[name] for name, text in self.good.items()) / len(self.good)
        return [
            EvaluationRow(
                model="pebble",
                task=each["id"],
                messages=[{"role": "assistant", "content": f"no {SECRET}"}],
                completion="no",
                reward=right,
                success=right == 1,
                reason=f"it lacks a word; {SECRET}",
            )
            for each in tasks
        ]


@contextmanager
def searching(
    home: Home,
    model: Model,
    answer: Callable[[Body], Said],
    settings: PromptSettings = SETTINGS,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Search, FakeEndpoint, list[Round]]]:
    run = home.run("r-1")
    run.create()
    rounds: list[Round] = []
    with fake_endpoint(answer) as fake:
        reflection = Reflection(run, config_of(fake.url, settings), threading.Event())
        search = Search(
            run.search,
            settings,
            TASKS,
            model.play,
            reflection,
            Redactor({"KEY": SECRET}),
            lambda done, _: rounds.append(done),
            is_stopping,
        )
        yield search, fake, rounds
        reflection.close()


def writing(*texts: str) -> Callable[[Body], Said]:
    left = list(texts)
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}  # 1.1 in money
    return lambda body: Said(f"```\n{left.pop(0) if len(left) > 1 else left[0]}\n```", usage=usage)


def test_a_search_ends_when_all_that_chooses_is_solved_and_hides_secrets(home: Home):
    model = Model({SYSTEM: "magic"})
    with searching(home, model, writing("plain", "magic")) as (search, fake, rounds):
        found = search.run({SYSTEM: ""})
    assert found.texts == {SYSTEM: "magic"} and found.is_new
    assert (found.chosen_by_before, found.chosen_by) == (0.0, 1.0)
    assert (found.rounds, len(fake.bodies), found.stopped_by) == (2, 2, "")
    assert [each.new_texts for each in rounds] == [{SYSTEM: "plain"}, {SYSTEM: "magic"}]
    assert rounds[0].chosen_by is None and rounds[1].chosen_by == 1.0
    assert rounds[1].before and rounds[1].after and rounds[1].after.mean == 1.0
    assert found.rollouts == model.played == 4 + (2 + 2) + (2 + 2 + 4)
    sent = json.dumps(fake.bodies)
    assert SECRET not in sent and "it lacks a word" in sent and "A right answer: yes" in sent
    assert "choose-" not in sent
    assert {body["max_tokens"] for body in fake.bodies} == {100}


def test_every_text_is_written_in_its_turn(home: Home):
    model = Model({SYSTEM: "one", "tool look": "two"})

    def answer(body: Body) -> Said:
        is_tool = "what tool look says of itself" in body["messages"][0]["content"]
        return Said("```\ntwo\n```" if is_tool else "```\none\n```")

    with searching(home, model, answer) as (search, _, _rounds):
        found = search.run({SYSTEM: "", "tool look": "Looks."})
    assert found.texts == {SYSTEM: "one", "tool look": "two"}


@pytest.mark.parametrize("caps", [{"max_calls": 3}, {"max_cost": 2.0}, {"max_rollouts": 25}])
def test_no_cap_is_passed(home: Home, caps: dict[str, Any]):
    model = Model({SYSTEM: "magic"})
    settings = SETTINGS.model_copy(update=caps)
    with searching(home, model, writing("a", "b"), settings) as (search, fake, _rounds):
        found = search.run({SYSTEM: ""})
        spent = search.reflection.use.cost
    ((name, value),) = caps.items()
    assert found.stopped_by == f"{name} = {value:g}" and not found.is_new
    assert model.played <= settings.max_rollouts
    assert len(fake.bodies) <= settings.max_calls
    assert settings.max_cost is None or spent <= settings.max_cost


def test_a_search_that_was_stopped_goes_on_and_asks_nothing_twice(home: Home):
    model = Model({SYSTEM: "magic"})
    stopping = [False]

    def answer(body: Body) -> Said:
        stopping[0] = True  # from now on the run is asked to stop
        return Said("```\nplain\n```")

    with searching(home, model, answer, is_stopping=lambda: stopping[0]) as (search, _, rounds):
        search.run({SYSTEM: ""})
    assert not rounds
    before = model.played
    with searching(home, model, writing("magic")) as (search, fake, rounds):
        found: SearchResult = search.run({SYSTEM: ""})
        calls = search.reflection.use.calls
    assert found.texts == {SYSTEM: "magic"}
    # Of the second attempt: a round, and its better prompt on the tasks that choose.
    assert model.played - before == 2 + 2 + 4
    assert (len(fake.bodies), calls) == (1, 2)
    assert [each.number for each in rounds] == [2]


def test_an_endpoint_that_refuses_ends_the_search_with_its_reason(home: Home):
    model = Model({SYSTEM: "magic"})
    with searching(home, model, lambda _: Said("no", status=401)) as (search, fake, _rounds):
        found = search.run({SYSTEM: ""})
        assert not found.is_new and "401" in str(search.reflection.failure)
    assert len(fake.bodies) == 1


def test_rounds_are_counted_as_if_none_found_anything():
    assert most_rounds(SETTINGS, 4) == (60 - 4) // 4
    assert most_rounds(SETTINGS.model_copy(update={"max_rollouts": 3}), 4) == 0
