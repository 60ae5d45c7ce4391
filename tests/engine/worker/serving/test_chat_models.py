"""The chat server: the offline greedy answer over real HTTP, many adapters, and what it refuses."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_server import KEY, chat_server
from loops import PEBBLE
from typed_settings import grpo_settings

from engine.home.run_dir import DeployDir, Home
from engine.worker.components import make_sampler
from engine.worker.core.trajectory import Completion
from engine.worker.gateway.chat_request import Refused, ends_in_partial_stop, parse_chat
from engine.worker.network.policy import Base, Policy
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.renderer import Renderer
from engine.worker.serving.chat_models import Served
from engine.worker.serving.own_models import OwnModels
from engine.worker.update import checkpoint
from engine.worker.update.schedule import make_optimizer
from tests.engine.worker.conftest import SETTINGS

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ASK = [{"role": "user", "content": "What is 4 + 3?"}]


def save_adapter(policy: Policy, home: Home, name: str) -> Path:
    run = home.run(name)
    run.create()
    optimizer = make_optimizer(policy.parameters(), grpo_settings({"learning_rate": 1e-3}))
    return checkpoint.save(run, policy, optimizer, checkpoint.Progress(1, {}), base_ref="pebble")


def chat(**more: Any) -> Any:
    return parse_chat({"model": "pebble", "messages": ASK, "temperature": 0, **more})


def test_base_and_adapters_answer_as_they_do_offline(
    pebble: Base, tuned: Callable[..., Policy], home: Home
) -> None:
    policy = tuned(pebble)
    adapter = save_adapter(policy, home, "one-sft-1")
    renderer = Renderer(pebble.tokenizer, pebble.stop_ids)
    ids = renderer.prompt(ASK)
    sampler = make_sampler(pebble, renderer)
    sampler.load(policy.adapter)
    ((tuned_offline,),) = sampler.generate([ids], 1, SamplingParams(512, 0.0))
    sampler.load(None)
    ((base_offline,),) = sampler.generate([ids], 1, SamplingParams(512, 0.0))

    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    served.add("one-sft-1", adapter)
    assert served.names() == ["pebble", "one-sft-1"]

    def answer(model: str) -> str:
        return served.complete(chat(model=model))["choices"][0]["message"]["content"]

    for _ in range(2):  # switching back and forth leaks nothing
        assert answer("pebble") == renderer.completion_text(base_offline.ids)
        assert answer("one-sft-1") == renderer.completion_text(tuned_offline.ids)


def test_an_adapter_that_changes_nothing_is_refused(pebble: Base, home: Home) -> None:
    untrained = Policy(pebble, grpo_settings(SETTINGS))
    adapter = save_adapter(untrained, home, "idle-sft-1")
    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    with pytest.raises(Refused, match="same logits") as caught:
        served.add("idle-sft-1", adapter)
    assert caught.value.status == 409
    assert served.names() == ["pebble"]
    assert served.complete(chat())["choices"][0]["message"]["content"]


def test_streamed_pieces_add_up_to_the_whole_answer() -> None:
    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    whole = served.complete(chat())["choices"][0]
    pieces = list(served.pieces(chat(stream=True, stream_options={"include_usage": True})))
    text = "".join(c["delta"].get("content", "") for piece in pieces for c in piece["choices"])
    assert text == whole["message"]["content"]
    assert pieces[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert pieces[-1]["usage"]["completion_tokens"] > 0


def test_an_answer_that_was_cut_goes_on_token_for_token() -> None:
    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    question = [{"role": "user", "content": "Repeat: the quick brown planet"}]
    asked = {"messages": question, "stream": True, "return_token_ids": True}

    def sampled(**more: Any) -> tuple[list[int], str]:
        choices = [p["choices"][0] for p in served.pieces(chat(**asked, **more)) if p["choices"]]
        ids = [each for choice in choices for each in choice.get("token_ids", [])]
        return ids, "".join(choice["delta"].get("content", "") for choice in choices)

    ids, text = sampled()
    assert len(ids) >= 4
    for length in range(1, len(ids)):
        begun_ids, begun_text = sampled(max_tokens=length)
        assert begun_ids == ids[:length] and text.startswith(begun_text)
        rest_ids, rest_text = sampled(begun_token_ids=begun_ids)
        assert (begun_ids + rest_ids, begun_text + rest_text) == (ids, text)
    with pytest.raises(Refused, match="does not know"):
        sampled(begun_token_ids=[10**6])


def test_a_stop_string_is_never_sent_not_even_its_beginning() -> None:
    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    text = served.complete(chat(messages=[{"role": "user", "content": "Repeat planet."}]))
    said = text["choices"][0]["message"]["content"]
    stop = said[2:4]
    asked = chat(messages=[{"role": "user", "content": "Repeat planet."}], stop=stop, stream=True)
    pieces = list(served.pieces(asked))
    sent = "".join(c["delta"].get("content", "") for p in pieces for c in p["choices"])
    assert sent == said[: said.index(stop)]
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert ends_in_partial_stop("abc<", ("</end>",)) and ends_in_partial_stop(
        "abc</en", ("</end>",)
    )
    assert not ends_in_partial_stop("abc", ("</end>",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [1]}]}, "content"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"stop": [""]}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2, "stream": True}, "n must be 1"),
        ({"begun_token_ids": [1]}, "needs stream"),
        ({"begun_token_ids": [-1], "stream": True}, "begun_token_ids"),
        ({"begun_token_ids": [True], "stream": True}, "begun_token_ids"),
        ({"begun_token_ids": "12", "stream": True}, "begun_token_ids"),
    ],
)
def test_what_would_be_ignored_or_cannot_work_is_refused_by_name(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said) as caught:
        parse_chat({"model": "pebble", "messages": ASK, **change})
    assert caught.value.status == 400


def test_names_of_sampling_that_vllm_takes_are_taken() -> None:
    params = parse_chat({"messages": ASK, "top_k": 20, "min_p": 0.1}).params
    assert (params.top_k, params.min_p) == (20, 0.1)
    assert parse_chat({"messages": ASK, "top_k": -1}).params.top_k == 0  # vLLM's word for all


def test_a_prompt_longer_than_the_model_reads_is_refused() -> None:
    served = Served(OwnModels(PEBBLE, "pebble", "cpu", thinking=False))
    with pytest.raises(Refused, match="reads 1024"):
        served.complete(chat(messages=[{"role": "user", "content": "a" * 3000}]))


@pytest.fixture
def deployment(home: Home) -> Iterator[tuple[DeployDir, str]]:
    """A real server process on loopback with its key."""
    with chat_server(home) as started:
        yield started


def test_the_http_surface(deployment: tuple[DeployDir, str]) -> None:
    folder, url = deployment
    root = url.removesuffix("/v1")
    body = {"model": "pebble", "messages": ASK, "temperature": 0}
    with httpx.Client(timeout=30) as client:
        assert client.get(f"{root}/health").json() == {"status": "ok", "active": 0}
        assert client.get(f"{url}/models").status_code == 401
        wrong = {"Authorization": "Bearer wrong \u00e9".encode()}
        assert client.get(f"{url}/models", headers=wrong).status_code == 401
        spoofed = KEY | {"Host": "evil.example"}
        assert client.get(f"{url}/models", headers=spoofed).status_code == 421
        names = [m["id"] for m in client.get(f"{url}/models", headers=KEY).json()["data"]]
        assert names == ["pebble"]
        answer = client.post(f"{url}/chat/completions", json=body, headers=KEY).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] >= 1
        with client.stream(
            "POST", f"{url}/chat/completions", json=body | {"stream": True}, headers=KEY
        ) as stream:
            events = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        deltas = [json.loads(e[6:])["choices"][0]["delta"] for e in events[:-1]]
        said = "".join(d.get("content", "") for d in deltas)
        assert said == answer["choices"][0]["message"]["content"]
        missing = client.post(
            f"{url}/chat/completions", json=body | {"model": "nobody"}, headers=KEY
        )
        assert missing.status_code == 404 and "pebble" in missing.json()["error"]["message"]
        bad = client.post(f"{url}/chat/completions", content=b"{", headers=KEY)
        assert bad.status_code == 400
        big = client.post(f"{url}/chat/completions", content=b"x" * (5 << 20), headers=KEY)
        assert big.status_code == 413
        assert client.post(f"{root}/admin/stop", headers=KEY).json() == {"stopping": True}
    deadline = time.monotonic() + 10
    while folder.ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
SAID = 'I look.\n<tool_call>{"name": "look", "arguments": {"at": "<b>"}}</tool_call>'
# How a template of another family writes a call, and the same answer in it.
TAGGED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TAGGED_SAID = (
    "I look.\n<tool_call><function=look><parameter=at><b></parameter></function></tool_call>"
)


class Saying:
    """A model that says one text, and a sampler that samples its ids."""

    limit, is_alive = 10_000, True

    def __init__(self, base: Base, said: str, begun: int = 0) -> None:
        self.renderer = Renderer(base.tokenizer, base.stop_ids)
        self.begun = begun  # tokens that the request names already
        self.ids = [*self.renderer.encode(said), min(base.stop_ids)]

    def speaking_as(self, _name: str) -> Any:
        return nullcontext(self)

    def stream(self, _ids: list[int], _params: SamplingParams) -> Iterator[int]:
        return iter(self.ids[self.begun :])

    def generate(self, _ids: list[list[int]], n: int, _params: SamplingParams) -> Any:
        return [[Completion(self.ids, [0.0] * len(self.ids), True)] * n]


def test_sixty_four_chats_at_once_with_base_and_eight_adapters_are_all_answered(
    deployment: tuple[DeployDir, str], pebble: Base, tuned: Callable[..., Policy], home: Home
) -> None:
    _, url = deployment
    policy = tuned(pebble)
    trained = policy.adapter.state()
    names = ["pebble"]
    with httpx.Client(base_url=url, headers=KEY, timeout=50, trust_env=False) as client:
        for number in range(8):
            size = 1 + number / 4  # each is another model
            policy.adapter.load({name: size * tensor for name, tensor in trained.items()})
            name = f"tuned-sft-{number}"
            body = {"name": name, "path": str(save_adapter(policy, home, name))}
            assert client.post(url.removesuffix("/v1") + "/admin/adapters", json=body).is_success
            names.append(name)

        def ask(number: int) -> tuple[str, int, str]:
            body = {"model": names[number % 9], "messages": ASK, "temperature": 0, "max_tokens": 12}
            streamed = number % 2 == 0
            said = client.post("/chat/completions", json=body | {"stream": streamed})
            text = "".join(pieces_of(said.text)) if streamed else answer_of(said)
            return body["model"], said.status_code, text

        with ThreadPoolExecutor(64) as clients:
            answers = list(clients.map(ask, range(64)))
    assert {status for _, status, _ in answers} == {200}
    by_model = {name: {text for model, _, text in answers if model == name} for name in names}
    assert all(len(texts) == 1 for texts in by_model.values())  # greedy: whoever asks, and however
    assert len({text for texts in by_model.values() for text in texts}) > 1


def pieces_of(stream: str) -> list[str]:
    """The text of each piece of a streamed answer."""
    lines = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines]


def answer_of(reply: httpx.Response) -> str:
    return reply.json()["choices"][0]["message"]["content"] if reply.is_success else reply.text


@pytest.mark.parametrize(("template", "said"), [(None, SAID), (TAGGED, TAGGED_SAID)])
def test_tool_calls_are_served_in_openais_form_whole_and_streamed(
    pebble: Base, template: str | None, said: str
) -> None:
    if template:
        pebble.tokenizer.chat_template = template
    served = Served(Saying(pebble, said))  # type: ignore[arg-type]  # what these calls use of it
    whole = served.complete(chat(tools=[LOOK]))["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "I look."
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"at": "<b>"}
    pieces = [p["choices"][0] for p in served.pieces(chat(tools=[LOOK], stream=True))]
    content = "".join(p["delta"].get("content", "") for p in pieces)
    assert content.strip() == "I look."  # no mark of the call was ever sent as text
    assert len([p for p in pieces if p["delta"].get("content")]) > 1
    (streamed,) = [p["delta"]["tool_calls"] for p in pieces if "tool_calls" in p["delta"]]
    assert streamed == [call | {"index": 0}]
    assert pieces[-1]["finish_reason"] == "tool_calls"


def test_a_tool_call_that_was_cut_in_its_middle_is_read_when_it_is_whole(pebble: Base) -> None:
    ids = Saying(pebble, SAID).ids
    for cut in range(1, len(ids)):
        served = Served(Saying(pebble, SAID, begun=cut))  # type: ignore[arg-type]  # as above
        asked = chat(tools=[LOOK], stream=True, begun_token_ids=ids[:cut])
        pieces = [p["choices"][0] for p in served.pieces(asked)]
        (calls,) = [p["delta"]["tool_calls"] for p in pieces if "tool_calls" in p["delta"]]
        assert json.loads(calls[0]["function"]["arguments"]) == {"at": "<b>"}
        assert pieces[-1]["finish_reason"] == "tool_calls"
        begun_text = served.renderer.certain_text(
            served.renderer.completion_text(ids[:cut]).rstrip("\ufffd"), [LOOK]
        )
        content = "".join(p["delta"].get("content", "") for p in pieces)
        assert (begun_text + content).strip() == "I look."


def test_text_that_only_looked_like_a_call_is_sent_in_the_end(pebble: Base) -> None:
    for said in ("1 < 2, [a] and {b}.", "<tool_call>{</tool_call> no"):
        served = Served(Saying(pebble, said))  # type: ignore[arg-type]  # as above
        pieces = [p["choices"][0] for p in served.pieces(chat(tools=[LOOK], stream=True))]
        assert "".join(p["delta"].get("content", "") for p in pieces) == said
        assert pieces[-1]["finish_reason"] == "stop"
        whole = served.complete(chat(tools=[LOOK]))["choices"][0]
        assert whole["message"]["content"] == said and whole["finish_reason"] == "stop"
