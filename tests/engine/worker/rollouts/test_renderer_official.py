"""The official chat templates of the families, held against transformers and trl."""

from typing import Any

import pytest
from official_templates import (
    MARKER,
    NO_TEXT,
    REASON,
    STOPS,
    TEMPLATES,
    WITHOUT_TOOLS,
    source,
    tokenizer_of,
)

from engine.worker.rollouts.renderer import Renderer

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not TEMPLATES.is_dir(), reason=REASON),
]


def renderer(name: str, *, thinking: bool = False, training: bool = False) -> Renderer:
    """Renders by the family's template, or by the copy of it that trl trains with."""
    tokenizer = tokenizer_of(name, source(f"{name}_training" if training else name))
    ids = tokenizer.convert_tokens_to_ids(list(STOPS[name]))
    return Renderer(tokenizer, ids, thinking=thinking)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "description": "What it is."}},
            "required": ["item"],
        },
    },
}


def call(item: str, number: int = 1) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": {"item": item}}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return said("", tool_calls=calls)


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "lookup", "tool_call_id": f"call_{number}", "content": text}


def text_of(made: Renderer, ids: list[int]) -> str:
    return str(made.tokenizer.decode(ids, skip_special_tokens=False))


def theirs(made: Renderer, talk: list[dict[str, Any]], **more: Any) -> str:
    return str(made.tokenizer.apply_chat_template(talk, tokenize=False, **more))


def test_every_official_text_template_is_tried() -> None:
    names = {path.stem for path in TEMPLATES.glob("*.jinja")}
    originals = {name for name in names if not name.endswith("_training")}
    assert originals - NO_TEXT == set(STOPS)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", STOPS)
def test_a_prompt_is_what_transformers_writes(name: str, thinking: bool) -> None:
    made = renderer(name, thinking=thinking)
    talk = [user("What is 2 + 3?")]
    expected = theirs(made, talk, add_generation_prompt=True, enable_thinking=thinking)
    assert made.prompt(talk) == made.encode(expected)
    if name not in WITHOUT_TOOLS:
        expected = theirs(
            made, talk, tools=[TOOL], add_generation_prompt=True, enable_thinking=thinking
        )
        assert made.prompt(talk, [TOOL]) == made.encode(expected)


@pytest.mark.parametrize("name", STOPS)
def test_a_single_turn_is_what_transformers_writes(name: str) -> None:
    """As far as the template continues its own prompt: those of DeepSeek write no think block into
    a finished answer, but always open one in the prompt."""
    made = renderer(name)
    talk = [user("What is 2 + 3?"), said("It is 5.")]
    (row,) = made.rows(talk, [], "assistant")
    text, whole = text_of(made, row.ids), theirs(made, talk, enable_thinking=False)
    if name.startswith("deepseek"):
        assert text.replace("<think>\n\n</think>\n\n", "") == whole
    elif name == "glm4moe":  # the model ends its turn by opening the next
        assert text == whole + "<|user|>"
    else:
        assert whole.startswith(text)
        assert whole[len(text) :].strip() in ("", made.tokenizer.eos_token)


@pytest.mark.parametrize("name", STOPS)
def test_what_is_trained_is_what_trl_marks_in_its_own_copy_of_the_template(name: str) -> None:
    """trl's copies for training mark what the assistant writes. What they mark before it stands in
    our prompt; what they mark after it is a newline or a second end token."""
    marks = TEMPLATES / f"{name}_training.jinja"
    if not marks.is_file():
        pytest.skip("trl marks nothing in this template")
    made = renderer(name)
    talk = [user("What is 2 + 3?"), said("It is 5.")]
    (row,) = made.rows(talk, [], "assistant")
    start = row.loss_mask.index(1)
    prompt, ours = text_of(made, row.ids[:start]), text_of(made, row.ids[start:])
    if name.startswith("deepseek"):  # the prompt opens a thought, which the answer closes
        prompt, ours = prompt.removesuffix("<think>\n"), ours.removeprefix("\n</think>\n\n")
    marked_up = renderer(name, training=True).tokenizer.apply_chat_template(
        talk, return_dict=True, return_assistant_tokens_mask=True, enable_thinking=False
    )
    their_ids = zip(marked_up["input_ids"], marked_up["assistant_masks"], strict=True)
    before, found, after = str(
        made.tokenizer.decode([i for i, mask in their_ids if mask])
    ).partition(ours)
    assert found and prompt.endswith(before)
    assert after.strip() in ("", made.tokenizer.eos_token)


@pytest.mark.parametrize("name", STOPS)
def test_a_thought_is_found_where_the_template_writes_it(name: str) -> None:
    """Or where we write it, by the marks of the family, if the template leaves it out."""
    made, thought = renderer(name, thinking=True), "First the 2, then the 3."
    (row,) = made.rows(
        [user("What is 2 + 3?"), said("It is 5.", reasoning_content=thought)], [], "assistant"
    )
    trained = [i for i, mask in zip(row.ids, row.loss_mask, strict=True) if mask]
    text = made.completion_text(trained)
    ((start, end),) = made.thought_spans(text)
    assert text[start:end].strip() == thought
    message = made.assistant_message(text, [])
    assert message["reasoning_content"] == thought
    assert message["content"].removesuffix("<|END_RESPONSE|>") == "It is 5."
    cut = text[: text.index("then")]
    assert made.thought_spans(cut) == [(start, len(cut))]


THREE = [user("Hi?"), said("Yes."), user("Go on"), said("No."), user("Why?"), said("So.")]
TOOLS_TALK = [
    user("Price of a pen and of ink?"),
    call("pen"),
    result("42"),
    call("ink", 2),
    result("7", 2),
    said("42 and 7."),
]
THOUGHT = [
    user("Hi?"),
    said("Yes.", reasoning_content="first"),
    user("Go on"),
    said("No.", reasoning_content="second"),
]
TALKS = {"talk": (THREE, []), "tools": (TOOLS_TALK, [TOOL]), "thought": (THOUGHT, [])}


@pytest.mark.parametrize("kind", TALKS)
@pytest.mark.parametrize("name", STOPS)
def test_each_turn_is_trained_once_and_after_the_prompt_it_has_in_use(name: str, kind: str) -> None:
    talk, tools = TALKS[kind]
    made, thinker = renderer(name), renderer(name, thinking=True)
    rows = made.rows(talk, tools, "assistant")
    turns = [at for at, message in enumerate(talk) if message["role"] == "assistant"]
    spans = []
    for row in rows:
        assert not row.loss_mask[0]
        for at, trained in enumerate(row.loss_mask):
            if trained and not row.loss_mask[at - 1]:
                spans.append((row, at, [*row.loss_mask[at:], 0].index(0)))
    assert len(spans) == len(turns)
    for at, (row, start, length) in zip(turns, spans, strict=True):
        prompted = thinker if "reasoning_content" in talk[at] else made
        assert text_of(made, row.ids[:start]) == text_of(made, prompted.prompt(talk[:at], tools))
        text = text_of(made, row.ids[start : start + length])
        assert row.ids[start + length - 1] in made.stop_ids
        assert talk[at]["content"] in text
        assert talk[at].get("reasoning_content", "") in text
        if "tool_calls" in talk[at]:
            assert "lookup" in text and ("pen" if at == 1 else "ink") in text
        for other in turns:
            if other != at and talk[other]["content"]:
                assert talk[other]["content"] not in text


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("kind", TALKS)
@pytest.mark.parametrize("name", STOPS)
def test_the_prompt_of_a_later_turn_extends_what_was_sampled(
    name: str, kind: str, thinking: bool
) -> None:
    """What stands between two turns is the end of the next prompt as the template itself writes it,
    whatever it makes of the turns before."""
    talk, tools = TALKS[kind]
    made = renderer(name, thinking=thinking)
    for at in range(2, len(talk), 2):
        between = text_of(made, made.between_turns(talk[:at], talk[at : at + 1], tools))
        whole = text_of(made, made.prompt(talk[: at + 1], tools))
        assert whole.endswith(between)
        assert str(talk[at]["content"]) in between
        before = whole[: -len(between)]
        ends = (*(text_of(made, [i]) for i in made.stop_ids), "<|end|>")
        assert before.endswith(ends)
        # Nothing of it was said by the model.
        earlier = [m["content"] for m in talk[:at] if m["role"] == "assistant"]
        assert not any(text and text in between for text in earlier)


@pytest.mark.parametrize("name", STOPS)
def test_a_turn_without_its_end_token_is_closed_first(name: str) -> None:
    made = renderer(name)
    ended = text_of(made, made.between_turns(THREE[:2], THREE[2:3]))
    letter = made.encode("x")[0]
    opened = text_of(made, made.between_turns(THREE[:2], THREE[2:3], last_id=letter))
    assert opened.endswith(ended) and len(opened) > len(ended)
    assert MARKER.match(opened)


@pytest.mark.parametrize("name", STOPS)
def test_two_calls_at_once_are_answered_even_where_the_template_takes_one(name: str) -> None:
    made = renderer(name)
    both = said("", tool_calls=[*call("pen")["tool_calls"], *call("ink", 2)["tool_calls"]])
    talk = [user("Price?"), both]
    between = text_of(made, made.between_turns(talk, [result("42"), result("7", 2)], [TOOL]))
    assert between.index("42") < between.index("7")
