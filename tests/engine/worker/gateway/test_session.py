"""What a program asks again goes on where it was: the ids that were sampled stay as they were."""

from pathlib import Path

import pytest
from loops import PEBBLE
from transformers import AutoTokenizer

from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.gateway.asked import Answer, Question, normal_form
from engine.worker.gateway.chat_request import Refused
from engine.worker.gateway.session import Rules, Session, Turn
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import ChatMessage

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def spoken(answer: Answer) -> ChatMessage:
    """The answer as a client sends it back."""
    message: ChatMessage = {"role": "assistant", "content": answer.text or None}
    if answer.tool_calls:
        message["tool_calls"] = answer.tool_calls
    return normal_form(message)


class Rollout:
    """A session whose sampler says what a test gives it."""

    def __init__(self, renderer: Renderer, max_turns: int = 8) -> None:
        self.renderer = renderer
        self.trajectory = Trajectory("a", [], [])
        rules = Rules(renderer, SamplingParams(max_tokens=32), 400, max_turns)
        self.session = Session(self.trajectory, rules)

    def prepare(self, messages: list[ChatMessage], *, tools: bool = False) -> Turn:
        return self.session.prepare(Question("m", messages, TOOLS if tools else []))

    def completion(self, ids: list[int]) -> Completion:
        return Completion(ids, [-0.25] * len(ids), ids[-1] in self.renderer.stop_ids)

    def say(self, messages: list[ChatMessage], ids: list[int], *, tools: bool = False) -> Answer:
        turn = self.prepare(messages, tools=tools)
        return self.session.record(turn, self.completion(ids))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(Path(PEBBLE))
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def ended(renderer: Renderer, text: str) -> list[int]:
    return [*renderer.encode(text), min(renderer.stop_ids)]


def other_ids(renderer: Renderer, text: str) -> list[int]:
    """Ids of the text that the tokenizer would not choose: letter by letter, where it has one for a
    whole mark."""
    ids = [i for letter in text for i in renderer.encode(letter)]
    assert ids != renderer.encode(text) and renderer.token_text(ids) == text
    return [*ids, min(renderer.stop_ids)]


def test_a_text_that_would_be_tokenised_otherwise_keeps_the_ids_it_was_sampled_in(
    renderer: Renderer,
):
    rollout = Rollout(renderer)
    ids = other_ids(renderer, "x <|endoftext|>")
    answer = rollout.say([user("Say x.")], ids)
    assert answer.text == "x <|endoftext|>"
    turn = rollout.prepare([user("Say x."), spoken(answer), user("Go on.")])
    assert turn.prompt[: len(rollout.trajectory.prompt_ids) + len(ids)] == (
        rollout.trajectory.prompt_ids + ids
    )
    rendered = renderer.prompt([user("Say x."), spoken(answer), user("Go on.")])
    assert turn.prompt != rendered
    assert renderer.token_text(turn.prompt) == renderer.token_text(rendered)
    rollout.session.record(turn, rollout.completion(ended(renderer, "x")))
    assert (rollout.trajectory.turns, rollout.trajectory.branches) == (2, [])
    mask = rollout.trajectory.loss_mask
    sampled = [i for i, is_sampled in zip(rollout.trajectory.ids, mask, strict=True) if is_sampled]
    assert sampled == ids + ended(renderer, "x")


def test_calls_of_tools_and_their_results_are_one_conversation(renderer: Renderer):
    rollout = Rollout(renderer)
    call = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
    answer = rollout.say([user("Look.")], ended(renderer, call), tools=True)
    (made,) = answer.tool_calls
    assert answer.finish == "tool_calls" and made["function"]["arguments"] == '{"x": 1}'
    result = {"role": "tool", "content": "a tree", "tool_call_id": made["id"]}
    messages = [user("Look."), spoken(answer), result]
    answer = rollout.say(messages, ended(renderer, "a tree"), tools=True)
    assert (answer.text, answer.finish) == ("a tree", "stop")
    assert (rollout.trajectory.turns, rollout.trajectory.branches) == (2, [])
    roles = [message["role"] for message in rollout.trajectory.messages]
    assert roles == ["assistant", "tool", "assistant"]


def test_an_answer_that_was_changed_begins_a_conversation_of_its_own(renderer: Renderer):
    rollout = Rollout(renderer)
    rollout.say([user("Say x.")], ended(renderer, "y"))
    changed = [user("Say x."), {"role": "assistant", "content": "x"}, user("Again.")]
    rollout.say(changed, ended(renderer, "x"))
    (branch,) = rollout.trajectory.branches
    assert branch.prompt_ids == renderer.prompt(changed)
    assert sum(branch.loss_mask) == len(branch.ids) == len(ended(renderer, "x"))


def test_two_questions_at_once_after_the_same_answer_both_keep_what_they_read(renderer: Renderer):
    rollout = Rollout(renderer)
    answer = rollout.say([user("Say x.")], ended(renderer, "x"))
    begun = [user("Say x."), spoken(answer)]
    turns = [rollout.prepare([*begun, user(text)]) for text in ("One.", "Two.")]
    for turn in turns:
        rollout.session.record(turn, rollout.completion(ended(renderer, "y")))
    (branch,) = rollout.trajectory.branches
    assert rollout.trajectory.turns == 2 and branch.prompt_ids == turns[1].prompt
    ids = rollout.trajectory.prompt_ids + rollout.trajectory.ids
    assert ids == turns[0].prompt + ended(renderer, "y")


def test_an_answer_that_was_cut_is_ended_before_the_next_question(renderer: Renderer):
    rollout = Rollout(renderer)
    answer = rollout.say([user("Say x.")], renderer.encode("an"))
    assert answer.finish == "length"
    turn = rollout.prepare([user("Say x."), spoken(answer), user("Go on.")])
    text = renderer.token_text(turn.prompt)
    assert turn.conversation is not None
    assert text == renderer.token_text(
        renderer.prompt([user("Say x."), spoken(answer), user("Go on.")])
    )


def test_turns_and_room_end(renderer: Renderer):
    rollout = Rollout(renderer, max_turns=1)
    with pytest.raises(Refused, match="context_length_exceeded"):
        rollout.prepare([user("x" * 2000)])
    assert rollout.trajectory.stop_reason == "max_context"
    rollout.say([user("Say x.")], ended(renderer, "x"))
    with pytest.raises(Refused, match="max_turns"):
        rollout.prepare([user("Say x.")])
    rollout.session.close()
    with pytest.raises(Refused) as caught:
        rollout.prepare([user("Say x.")])
    assert caught.value.status == 401
