"""Messages to ids and masks, token by token, on pebble's template."""

import pytest

from engine.models import catalog, tokens
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.policy import Base
from engine.worker.rollouts.renderer import Renderer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

TALK = [
    {"role": "user", "content": "Guess."},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "9"},
]
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"a": 1}'}}
    ],
}

READ_CALL = CALL["tool_calls"][0] | {"function": {"name": "lookup", "arguments": {"a": 1}}}


@pytest.fixture
def renderer(pebble: Base) -> Renderer:
    return Renderer(pebble.tokenizer, pebble.stop_ids)


def trained_text(renderer: Renderer, ids: list[int], mask: list[int]) -> str:
    return renderer.tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])


def test_only_what_the_assistant_says_and_its_end_token_is_trained(renderer: Renderer) -> None:
    row = renderer.rows(TALK, [], "assistant")[0]
    assert trained_text(renderer, row.ids, row.loss_mask) == "7<|im_end|>9<|im_end|>"
    assert row.ids[-1] in renderer.stop_ids


def test_loss_on_last_trains_the_last_turn_alone(renderer: Renderer) -> None:
    row = renderer.rows(TALK, [], "last")[0]
    assert trained_text(renderer, row.ids, row.loss_mask) == "9<|im_end|>"


def test_loss_on_all_trains_everything_but_the_first_token(renderer: Renderer) -> None:
    row = renderer.rows(TALK, [], "all")[0]
    assert row.loss_mask == [0] + [1] * (len(row.ids) - 1)


def test_tool_output_is_read_and_never_trained(renderer: Renderer) -> None:
    talk = [
        {"role": "user", "content": "Price?"},
        CALL,
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "lookup"},
        {"role": "assistant", "content": "42"},
    ]
    row = renderer.rows(talk, [TOOL], "assistant")[0]
    said = trained_text(renderer, row.ids, row.loss_mask)
    assert said == (
        '<tool_call>\n{"name": "lookup", "arguments": {"a": 1}}\n</tool_call><|im_end|>42<|im_end|>'
    )


def test_a_training_row_begins_with_the_ids_the_sampler_is_given(renderer: Renderer) -> None:
    row = renderer.rows(TALK[:2], [], "assistant")[0]
    prompt = renderer.prompt(TALK[:1])
    assert row.ids[: len(prompt)] == prompt
    assert row.loss_mask[: len(prompt)] == [0] * len(prompt)


def test_a_played_game_has_the_ids_of_the_same_game_written_down(renderer: Renderer) -> None:
    played = renderer.prompt(TALK[:1])
    played += [*renderer.encode("7"), renderer.tokenizer.eos_token_id]
    played += renderer.between_turns(TALK[:2], TALK[2:3])
    played += [*renderer.encode("9"), renderer.tokenizer.eos_token_id]
    assert played == renderer.rows(TALK, [], "assistant")[0].ids


def test_completion_text_hides_nothing_but_the_end_token(renderer: Renderer) -> None:
    ids = renderer.encode("a<|im_start|>b<|im_end|>")
    assert renderer.completion_text(ids) == "a<|im_start|>b"
    assert renderer.completion_text(ids[:-1]) == "a<|im_start|>b"


def test_tool_calls_are_parsed_only_where_there_are_tools(renderer: Renderer) -> None:
    text = 'Let me see.<tool_call>\n{"name": "lookup", "arguments": {"a": 1}}\n</tool_call>'
    assert renderer.assistant_message(text, [])["content"] == text
    message = renderer.assistant_message(text, [TOOL])
    assert message["content"] == "Let me see."
    assert message["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"a": 1}}


@pytest.mark.parametrize("broken", ["{no json", "[1, 2]", '{"arguments": {}}', '{"name": 5}'])
def test_a_call_that_is_no_call_stays_in_the_content(renderer: Renderer, broken: str) -> None:
    text = f"<tool_call>\n{broken}\n</tool_call>"
    reply = renderer.reply(text, [TOOL])
    assert reply.message["content"] == text and "tool_calls" not in reply.message
    assert len(reply.invalid_calls) == 1


def test_thought_is_kept_apart_from_what_is_said(pebble: Base) -> None:
    thinking = Renderer(pebble.tokenizer, pebble.stop_ids, thinking=True)
    assert thinking.text(TALK[:1], [], prompt=True).endswith("assistant\n<think>\n")
    message = thinking.assistant_message("1+1=2\n</think>\n\n2", [])
    assert message["content"] == "2" and message["reasoning_content"] == "1+1=2"


def test_a_template_that_refuses_the_messages_is_named_as_what_refuses(pebble: Base) -> None:
    pebble.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    renderer = Renderer(pebble.tokenizer, pebble.stop_ids)
    rows = renderer.rows([*TALK[:1], {"role": "tool", "content": "5"}, *TALK[1:2]], [], "last")
    assert "<tool_response>\n5\n</tool_response>" in renderer.tokenizer.decode(rows[0].ids)
    pebble.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(WorkerFailure, match="no system here") as caught:
        renderer.rows(TALK, [], "assistant")
    assert caught.value.kind == "data"
    with pytest.raises(WorkerFailure, match="no system here") as caught:
        renderer.between_turns(TALK[:2], TALK[2:3])
    assert caught.value.kind == "config"


def test_a_turn_that_a_stop_string_ended_gets_its_end_token(renderer: Renderer) -> None:
    said = renderer.encode("7")
    ended = renderer.between_turns(TALK[:2], TALK[2:3], last_id=renderer.tokenizer.eos_token_id)
    open_ended = renderer.between_turns(TALK[:2], TALK[2:3], last_id=said[-1])
    assert open_ended == [renderer.tokenizer.eos_token_id, *ended]
    assert ended == renderer.between_turns(TALK[:2], TALK[2:3])


def test_a_model_without_a_template_is_refused(pebble: Base) -> None:
    pebble.tokenizer.chat_template = None
    with pytest.raises(WorkerFailure, match="no chat template"):
        Renderer(pebble.tokenizer, pebble.stop_ids)


EVERYTHING = (
    "{{ eos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
)


def test_a_template_reads_what_transformers_would_let_it_read(pebble: Base) -> None:
    pebble.tokenizer.chat_template = EVERYTHING
    talk = [
        *TALK,
        CALL | {"content": None, "reasoning": "hm", "tool_calls": [READ_CALL]},
        {"role": "tool", "content": "é <b>", "name": None},
        {"role": "assistant", "content": "9", "thinking": "so", "reasoning_content": None},
    ]
    for tools in ([], [TOOL]):
        for thinking in (False, True):
            made = Renderer(pebble.tokenizer, pebble.stop_ids, thinking=thinking)
            theirs = pebble.tokenizer.apply_chat_template(
                talk,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=thinking,
            )
            assert made.text(talk, tools, prompt=True) == theirs


def test_a_template_of_its_own_for_tools_is_used_where_there_are_tools(pebble: Base) -> None:
    pebble.tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    made = Renderer(pebble.tokenizer, pebble.stop_ids)
    assert made.text(TALK, [], prompt=False) == "plain"
    assert made.text(TALK, [TOOL], prompt=False) == "tools"


def test_the_control_side_counts_the_ids_and_masks_the_worker_trains(pebble: Base) -> None:
    made = Renderer(pebble.tokenizer, pebble.stop_ids)
    counting = tokens.load(catalog.BUILTIN["pebble"]).format()
    for loss_on in ("assistant", "last", "all"):
        row, counted = made.rows(TALK, [], loss_on)[0], counting.rows(TALK)[0]
        assert (row.ids, row.loss_mask) == (counted.ids, counted.mask(loss_on))
