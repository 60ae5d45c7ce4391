"""Programs ask the policy over HTTP: what is recorded is what was sampled, and each costs its own
rollout alone. Real processes, real HTTP, pebble's own sampler."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor_play import boxed
from loops import PEBBLE
from reward_server import reward_server

from engine.worker.components import make_sampler
from engine.worker.core.trajectory import Group, Trajectory
from engine.worker.gateway.play import programs_of
from engine.worker.network.policy import Base, load_base, pick_device
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, collect
from engine.worker.rollouts.renderer import Renderer
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

pytestmark = [pytest.mark.worker, pytest.mark.timeout(90)]

HARBOR = Path(__file__).parents[4] / "envs" / "examples" / "harbor_tasks"
CLIENT = """
import json, os, sys, urllib.error, urllib.request

TASK = json.load(open(os.environ["HONESMITH_TASK"]))

def post(path, body, key=None, headers=None):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json",
         "Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def ask(messages, **fields):
    status, text = post("/chat/completions", {"messages": messages, **fields})
    assert status == 200, text
    return json.loads(text)["choices"][0]

def user(text):
    return {"role": "user", "content": text}
"""
ONCE = (
    CLIENT
    + """
choice = ask([user(os.environ["HONESMITH_PROMPT"])])
print(json.dumps({"reward": len(choice["message"]["content"]) / 100}))
"""
)
THRICE = (
    CLIENT
    + """
messages = [user(os.environ["HONESMITH_PROMPT"])]
for number in range(3):
    messages.append(ask(messages)["message"])
    messages.append(user(f"Add {number} and 11."))
print(1)
"""
)
UNRELATED = (
    CLIENT
    + """
ask([user("Add 12 and 13.")])
ask([user("Reverse stone.")])
ask([user("Add 12 and 13."), {"role": "assistant", "content": "made up"}, user("Say x.")])
print(0.5)
"""
)


@pytest.fixture(scope="module")
def base() -> Base:
    return load_base(Path(PEBBLE), pick_device("cpu"), precision="float32")


@pytest.fixture(scope="module")
def renderer(base: Base) -> Renderer:
    return Renderer(base.tokenizer, base.stop_ids)


@pytest.fixture(scope="module")
def sampler(base: Base, renderer: Renderer) -> Iterator[Sampler]:
    sampler = make_sampler(base, renderer)
    sampler.load(None)
    yield sampler
    sampler.close()


PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
TASKS: list[TaskRow] = [
    {
        "id": f"sum-{n}",
        "prompt": [{"role": "user", "content": f"Add {n} and 12."}],
        "answer": None,
        "split": "train",
        "metadata": {},
        "text": ["prompt"],
    }
    for n in (21, 34)
]


ENVIRONMENT = """
from envs import SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "Add 1 and 2.")]

def load_environment():
    return Sums()
"""


class Player:
    """Plays an agent's source against pebble."""

    def __init__(self, folder: Path, renderer: Renderer, sampler: Sampler) -> None:
        self.folder = folder
        self.renderer = renderer
        self.sampler = sampler
        self.max_turns = 8
        self.max_length = 512

    def play(self, source: str, tasks: list[TaskRow], n: int = 1, **rollout: Any) -> list[Group]:
        (self.folder / "agent.py").write_text(source)
        settings = {"reward": "stdout"} | rollout
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        text = "\n".join(['command = ["python3", "agent.py"]', "[rollout]", *lines])
        (self.folder / "environment.toml").write_text(text)
        (self.folder / "environment.py").write_text(ENVIRONMENT)
        with EnvProcess(self.folder, python=sys.executable) as process:
            context = RolloutContext(
                process,
                self.renderer,
                multi_turn=False,
                tools=[],
                max_length=self.max_length,
                max_turns=self.max_turns,
                play=programs_of(process),
            )
            groups, _ = collect(tasks, n, context, self.sampler, PARAMS)
        return groups

    def one(self, source: str, **rollout: Any) -> Trajectory:
        ((trajectory,),) = [group.members for group in self.play(source, TASKS[:1], **rollout)]
        return trajectory


@pytest.fixture
def player(tmp_path: Path, renderer: Renderer, sampler: Sampler) -> Player:
    return Player(tmp_path, renderer, sampler)


def check_recorded(trajectory: Trajectory, base: Base, renderer: Renderer) -> None:
    """The recorded ids are what the model read and wrote: under the same ids the trainer's forward
    gives the recorded log-probabilities of just the tokens that the mask names."""
    ids = trajectory.prompt_ids + trajectory.ids
    logprobs = base.network.logits(ids, None).log_softmax(-1)
    start = len(trajectory.prompt_ids)
    for place, (is_sampled, sampled) in enumerate(
        zip(trajectory.loss_mask, trajectory.sampled_logprobs, strict=True)
    ):
        if is_sampled:
            expected = float(logprobs[start + place - 1, ids[start + place]])
            assert sampled == pytest.approx(expected, abs=1e-4)


def test_a_program_is_told_the_version_of_its_environment(player: Player):
    folder = player.folder / "sums" / "0123456789abcdef" / "source"
    folder.mkdir(parents=True)
    player.folder = folder
    check = ONCE + 'assert os.environ["HONESMITH_ENV"] == "sums@0123456789ab"\n'
    assert player.one(check).error is None


@boxed
def test_harbor_tasks_are_played_by_the_policy_with_a_shell(
    player: Player, base: Base, renderer: Renderer
):
    with EnvProcess(HARBOR, python=sys.executable) as process:
        rows = process.tasks()
        play = programs_of(process)
        context = RolloutContext(
            process, renderer, multi_turn=False, tools=[], max_length=512, max_turns=3, play=play
        )
        groups, _ = collect(rows, 2, context, player.sampler, PARAMS)
    members = [trajectory for group in groups for trajectory in group.members]
    assert [trajectory.error for trajectory in members] == [None] * 6
    for trajectory in members:
        assert trajectory.reward == 0.0 and trajectory.metrics["sandbox_seconds"] > 0
        check_recorded(trajectory, base, renderer)


def test_a_program_asks_and_its_reward_is_read(player: Player, renderer: Renderer):
    groups = player.play(ONCE, TASKS, n=6)
    members = [trajectory for group in groups for trajectory in group.members]
    assert [t.error for t in members] == [None] * 12
    for trajectory in members:
        assert trajectory.prompt_ids == renderer.prompt(trajectory.prompt)
        assert trajectory.prompt[0]["content"] in ("Add 21 and 12.", "Add 34 and 12.")
        assert trajectory.reward == len(trajectory.completion) / 100
        assert renderer.completion_text(trajectory.ids) == trajectory.completion
        assert trajectory.loss_mask == [1] * len(trajectory.ids)
        assert len(trajectory.sampled_logprobs) == len(trajectory.ids)
    # The members of a group are drawn apart.
    drawn = [tuple(t.ids) for t in groups[0].members]
    assert len(set(drawn)) > 1, drawn


def test_a_server_is_told_what_was_played_and_says_what_it_earned(player: Player):
    with reward_server() as rewards:
        rewards.reply = b'{"reward": 0.75, "metrics": {"steps": 2}}'
        http = {"reward": "http", "reward_url": rewards.url}
        trajectory = player.one(THRICE, **http)
        assert (trajectory.error, trajectory.reward) == (None, 0.75)
        assert trajectory.metrics["steps"] == 2
        (told,) = rewards.asked
        assert told["task"]["id"] == "sum-21" and told["turns"] == 3
        assert [message["role"] for message in told["messages"]] == ["user", "assistant"] * 3
        assert told["messages"][-1]["content"] == trajectory.messages[-1]["content"]
        assert told["output"] == "1\n"
        silent = player.one("print(1)", **http)
        assert silent.error == "the command asked the model nothing"
        rewards.status = 500
        assert str(player.one(ONCE, **http).error).startswith(f"{rewards.url} answered 500")
        assert len(rewards.asked) == 2


def test_a_conversation_that_goes_on_is_one_trajectory(
    player: Player, base: Base, renderer: Renderer
):
    trajectory = player.one(THRICE)
    assert (trajectory.error, trajectory.turns, trajectory.branches) == (None, 3, [])
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["assistant", "user", "assistant", "user", "assistant"]
    assert 0 < sum(trajectory.loss_mask) < len(trajectory.ids)
    check_recorded(trajectory, base, renderer)


def test_a_conversation_that_cannot_be_stitched_is_trained_as_one_of_its_own(
    player: Player, base: Base, renderer: Renderer
):
    trajectory = player.one(UNRELATED)
    assert trajectory.error is None and trajectory.turns == 1
    assert [branch.prompt[0]["content"] for branch in trajectory.branches] == [
        "Reverse stone.",
        "Add 12 and 13.",
    ]
    trajectory.advantage = 0.75
    parts = trajectory.parts
    assert [part.advantage for part in parts] == [0.75] * 3
    assert sum(part.trained_tokens for part in parts) == trajectory.sampled_tokens
    for part in parts:
        check_recorded(part, base, renderer)


FAULTS = {
    "silent": ("print(1)", "the command asked the model nothing"),
    "crashes": (CLIENT + "ask([user('Say x.')])\n1 / 0", "the command left with exit status 1"),
    "hangs": (CLIENT + "ask([user('Say x.')])\nimport time; time.sleep(60)", "ran longer than 8 s"),
    "leaves": (CLIENT + "ask([user('Say x.')])\nimport os; os._exit(0)", "printed nothing"),
}


def test_a_program_that_fails_costs_its_own_rollout(player: Player):
    cases = "CASES = " + repr({name: source for name, (source, _) in FAULTS.items()})
    source = (
        f"{cases}\n{CLIENT}\n"
        + """
if TASK["id"] in CASES:
    exec(CASES[TASK["id"]])
else:
    ask([user("Say x.")])
    print(1)
"""
    )
    tasks = [{**TASKS[0], "id": name} for name in (*FAULTS, "works")]
    groups = player.play(source, tasks, seconds=8, at_once=5)
    results = {group.task_id: group.members[0] for group in groups}
    for name, (_, error) in FAULTS.items():
        assert error in str(results[name].error), name
        assert results[name].reward == 0.0
    assert results["hangs"].stop_reason == "timeout"
    assert (results["works"].error, results["works"].reward) == (None, 1.0)


def test_at_most_as_many_programs_run_at_once_as_the_environment_says(player: Player):
    source = (
        CLIENT
        + """
import time
began = time.time()
ask([user("Say x.")])
time.sleep(0.3)
print(json.dumps({"reward": 1, "metrics": {"began": began % 1e6, "ended": time.time() % 1e6}}))
"""
    )
    (group,) = player.play(source, TASKS[:1], n=5, at_once=2)
    spans = [(t.metrics["began"], t.metrics["ended"]) for t in group.members]
    assert all(t.error is None for t in group.members)
    for began, _ in spans:
        assert sum(start <= began < end for start, end in spans) <= 2


def test_the_run_decides_how_tokens_are_drawn_and_how_many(player: Player):
    player.max_turns = 2
    source = (
        CLIENT
        + """
long = ask([user("Repeat stone stone stone.")], max_tokens=2, temperature=0, seed=3)
ask([user("Say x.")], temperature=2.0, max_tokens=4000, stop=["q"])
status, text = post("/chat/completions", {"messages": [user("Say y.")]})
print(json.dumps({"reward": 1, "metrics": {
    "cut": int(long["finish_reason"] == "length"), "status": status,
    "named": int("max_turns" in text)}}))
"""
    )
    trajectory = player.one(source)
    assert trajectory.error is None
    assert trajectory.metrics == {"cut": 1.0, "status": 400.0, "named": 1.0}
    assert trajectory.stop_reason == "max_turns"
    assert len(trajectory.ids) == 2 and len(trajectory.branches[0].ids) <= 24


def test_a_conversation_without_room_for_an_answer_is_refused(player: Player):
    player.max_length = 64
    source = (
        CLIENT
        + """
ask([user("Say x.")])
status, text = post("/chat/completions", {"messages": [user("Say " + "x" * 200)]})
print(json.dumps({"reward": status, "metrics": {"named": int("context_length_exceeded" in text)}}))
"""
    )
    trajectory = player.one(source)
    assert (trajectory.reward, trajectory.metrics) == (400.0, {"named": 1.0})
    assert trajectory.stop_reason == "max_context"


def test_a29_a_key_is_of_one_rollout_and_opens_nothing_else(player: Player):
    source = (
        CLIENT
        + """
status, text = post("/chat/completions", {"messages": [user("Say x.")]}, key="hs-guessed")
none, _ = post("/chat/completions", {"messages": [user("Say x.")]}, headers={"Authorization": ""})
asked = {"messages": [user("Say x.")]}
host, _ = post("/chat/completions", asked, headers={"Host": "example.com"})
origin, _ = post("/chat/completions", asked, headers={"Origin": "http://example.com"})
lost, _ = post("/admin/adapters", {})
ask([user("Say x.")])
print(json.dumps({"reward": 1, "metrics": {
    "guessed": status, "none": none, "host": host, "origin": origin, "lost": lost}}))
"""
    )
    metrics = player.one(source).metrics
    assert metrics == {"guessed": 401, "none": 401, "host": 421, "origin": 403, "lost": 404}


STREAM = (
    CLIENT
    + """
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [user("Say x.")], "stream": True,
                "stream_options": {"include_usage": True}}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
text, finish, usage, done = "", None, 0, False
for line in urllib.request.urlopen(request).read().decode().split("\\n"):
    if line == "data: [DONE]":
        done = True
    elif line.startswith("data: "):
        piece = json.loads(line[6:])
        for choice in piece["choices"]:
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
        usage = (piece.get("usage") or {}).get("completion_tokens", usage)
assert done and finish in ("stop", "length") and usage > 0
print(json.dumps({"reward": len(text) / 100, "metrics": {"usage": usage}}))
""".replace("\\\\n", "\\n")
)


def test_a_stream_carries_the_whole_answer(player: Player):
    trajectory = player.one(STREAM)
    assert trajectory.error is None
    assert trajectory.reward == len(trajectory.completion) / 100
    assert trajectory.metrics["usage"] == len(trajectory.ids)
