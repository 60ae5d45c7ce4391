"""What a chat template writes for tool calls and reasoning is read back as the same.

The official templates are those of trl's wheel (tests/helpers/official_templates.py); without it
their tests are skipped. Formats of families that it lacks are written here, as published.
"""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from official_templates import REASON, TEMPLATES

from engine.models.chat_format import ChatFormat, TemplateError
from engine.models.dialects.dialects import DIALECTS, Dialect, ReplyReader, reader_of
from engine.models.reasoning import OTHER_TAGS, THINK, tagged_thoughts

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name."},
                    "days": {"type": "integer", "description": "How many."},
                    "zip": {"type": "string", "description": "Its number."},
                    "share": {"type": "number", "description": "Between 0 and 1."},
                    "warm": {"type": "boolean", "description": "Whether it is."},
                    "places": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Their names.",
                    },
                    "options": {"type": "object", "description": "More."},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "book.room-2")
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Bern", "days": 3, "share": 0.25, "warm": True, "zip": "75001"},
    {"city": 'the "Altstadt"\nof Zürich', "places": ["a, b", "[c]"], "options": {"deep": [1, "x"]}},
    {"city": "<b>{not} a = mark</b>", "warm": False, "days": -7},
]
STOPS = (
    "<|im_end|> <|eot_id|> <EOS> <|return|> <|call|> <turn|> <|tool_response> <|eot|> "
    "<｜end▁of▁sentence｜> <|/tool_call|><|end|>"
).split()
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "<PAD>"}
USER = {"role": "user", "content": "And now?"}

# Template -> the dialect it writes. Those of trl that take no tools, or show images, are not here.
FAMILIES = {
    "deepseek_r1_distill": "deepseek",
    "deepseekv3": "deepseek",
    "diffusion_gemma": "gemma",
    "gemma4": "gemma",
    "gemma4_v2": "gemma",
    "gemma4_v3": "gemma",
    "gemma4_v4": "gemma",
    "gemma4_v5": "gemma",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2": "lfm",
    "lfm2_2_5": "lfm",
    "lfm2_2_5_v2": "lfm",
    "lfm2_v2": "lfm",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "muse_glimmer": "muse",
    "nemotron_3_5_lightning": "qwen_tags",
    "nemotron_3_nano": "qwen_tags",
    "nemotron_3_super": "qwen_tags",
    "nemotron_3_ultra": "qwen_tags",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen_tags",
    "qwen3_5_think": "qwen_tags",
    "qwen3_6": "qwen_tags",
    "qwen3_8": "qwen_tags",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
}
DROPS_CALLS = {"lfm2", "deepseek_r1_distill"}  # where the content is a text
ONE_CALL = {"llama3_1", "llama3_2", "gptoss"}  # refuses a second call, or drops it
NO_CONTENT = {"llama3_1", "llama3_2", "muse_glimmer", "lfm2"}  # drops content beside calls
AFTER_CALLS = {"gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"}


def official(name: str) -> ChatFormat:
    """The official template of that name."""
    if not TEMPLATES.is_dir():
        pytest.skip(REASON)
    return chat_format((TEMPLATES / f"{name}.jinja").read_text("utf-8"))


def chat_format(template: str) -> ChatFormat:
    return ChatFormat(template, SPECIAL, lambda _: [], STOPS, thinking=True)


def call(name: str, arguments: object, number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def written(chat: ChatFormat, message: dict[str, Any]) -> str:
    """The turn of the assistant as the model has to write it: from the end of the prompt to the
    token that ends the turn. Some templates take arguments only as JSON in a text."""
    prompt = chat.text([USER], TOOLS, prompt=True)
    try:
        closed = chat.text([USER, message], TOOLS, prompt=False)
    except TemplateError:
        calls = [
            call(each["function"]["name"], json.dumps(each["function"]["arguments"]))
            for each in message["tool_calls"]
        ]
        closed = chat.text([USER, message | {"tool_calls": calls}], TOOLS, prompt=False)
    if closed.startswith(prompt):
        turn = closed[len(prompt) :]
    else:  # the prompt opens a thought, and history has none
        turn = closed.rpartition("now?")[2].removeprefix("<｜Assistant｜>")
    for stop in chat.stop_texts:
        turn = turn.rstrip().removesuffix(stop)
    return turn


def said_calls(reader: ReplyReader, text: str) -> list[tuple[str, object]]:
    reply = reader.read(text, TOOLS)
    assert reply.invalid_calls == ()
    calls = reply.message.get("tool_calls", [])
    return [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


@pytest.mark.parametrize(("name", "dialect"), FAMILIES.items())
def test_the_template_decides_which_dialect_is_read(name: str, dialect: str) -> None:
    assert reader_of(official(name)).dialect.name == dialect


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - DROPS_CALLS))
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_an_official_template_is_read_back(name: str, arguments: dict[str, Any]) -> None:
    chat = official(name)
    message = {
        "role": "assistant",
        "content": "" if name in NO_CONTENT else "Let me see.",
        "reasoning_content": "I have to ask.",
        "tool_calls": [call("get_weather", arguments), call("book.room-2", {"city": "Chur"}, 2)],
    }
    if name in ONE_CALL:
        message["tool_calls"] = message["tool_calls"][:1]
    if name == "gptoss":  # it writes either as the analysis, and refuses both
        message["content"] = ""
    if name in AFTER_CALLS:  # it writes content after the answers of tools
        message["content"] = ""
    text = written(chat, message)
    reader = reader_of(chat)
    expected = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert said_calls(reader, text) == expected
    said = reader.read(text, TOOLS).message
    assert said["content"] == message["content"]
    if "I have to ask." in text:  # some write no reasoning beside calls
        assert said["reasoning_content"] == "I have to ask."
    else:
        assert "reasoning_content" not in said or not said["reasoning_content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_in_json_is_no_call(name: str) -> None:
    chat = official(name)
    answer = '{"name": "Ada", "born": 1815}'
    text = written(chat, {"role": "assistant", "content": answer, "reasoning_content": "Easy."})
    reply = reader_of(chat).read(text, TOOLS)
    assert reply.message["content"] == answer and reply.invalid_calls == ()
    assert "tool_calls" not in reply.message
    if "Easy." in text:
        assert reply.message["reasoning_content"] == "Easy."


# Families that trl has no template of: how each writes a call, after its publication.
PUBLISHED = {
    "mistral": "[TOOL_CALLS] [{{ m.tool_calls[0].function | tojson }}]<EOS>",
    "phi": "<|tool_call|>[{{ m.tool_calls[0].function | tojson }}]<|/tool_call|><|end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ m.tool_calls[0].function.name }}"
    "<｜tool▁sep｜>{{ m.tool_calls[0].function.arguments | tojson }}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><EOS>",
    "pythonic": "[{{ m.tool_calls[0].function.name }}("
    "{%- for k, v in m.tool_calls[0].function.arguments.items() -%}"
    "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{%- endfor -%})]<|eot_id|>",
}
AROUND = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}A:CALL{%- else -%}U:{{ m.content }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}A:{%- endif -%}"
)


@pytest.mark.parametrize("dialect", PUBLISHED)
def test_a_template_of_another_family_is_recognised_by_what_it_writes(dialect: str) -> None:
    chat = chat_format(AROUND.replace("CALL", PUBLISHED[dialect]))
    reader = reader_of(chat)
    assert reader.dialect.name == dialect
    for arguments in ARGUMENTS:
        made = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", arguments)]}
        assert said_calls(reader, written(chat, made)) == [("get_weather", arguments)]


def test_a_template_that_writes_no_calls_is_read_by_its_marks_or_as_hermes() -> None:
    assert reader_of(chat_format("{# <|tool|> #}{{ messages[0].content }}")).dialect.name == "phi"
    assert reader_of(chat_format("{{ messages[0].content }}")).dialect.name == "hermes"
    assert reader_of(chat_format("{{ raise_exception('no') }}")).dialect.name == "hermes"


def test_calls_get_ids_that_the_template_takes() -> None:
    hermes = reader_of(chat_format(""))
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
    (made,) = hermes.read(text, TOOLS).message["tool_calls"]
    assert made["id"] == "call_1" and made["type"] == "function"
    mistral = reader_of(chat_format("{# [TOOL_CALLS] #}"))
    (made,) = mistral.read('[TOOL_CALLS]f{"a": 1}', TOOLS).message["tool_calls"]
    assert made["id"] == "call00001"  # its templates refuse any but nine letters and digits


def test_a_reply_says_which_of_its_calls_are_invalid() -> None:
    reader = reader_of(chat_format(""))
    good = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
    unknown = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    wrong = '<tool_call>{"name": "get_weather", "arguments": {"city": 5}}</tool_call>'
    broken = "<tool_call>{</tool_call>"
    assert reader.read(good, TOOLS).invalid_calls == ()
    reply = reader.read(good + unknown + wrong, TOOLS)
    assert len(reply.message["tool_calls"]) == 3  # the environment answers them
    assert [why.split(";")[0] for why in reply.invalid_calls] == [
        "there is no tool 'get'",
        "get_weather.city: not of type string",
    ]
    reply = reader.read(good + broken, TOOLS)
    assert "tool_calls" not in reply.message and reply.message["content"] == good + broken
    assert len(reply.invalid_calls) == 1
    assert reader.read(good + broken, []).invalid_calls == ()
    assert reader.read(good, []).message == {"role": "assistant", "content": good}


def test_a_call_inside_a_thought_is_a_thought() -> None:
    reader = reader_of(chat_format(""))
    text = "I could <tool_call>{</tool_call></think>\n\nNo."
    reply = reader.read(text, TOOLS)
    assert reply.message["content"] == "No." and reply.invalid_calls == ()
    assert reply.message["reasoning_content"] == "I could <tool_call>{</tool_call>"


# What stands in replies of some family, in an order that none would write.
PIECES = (
    *(mark for dialect in DIALECTS for mark in dialect.marks),
    *"<tool_call> </tool_call> <think> </think> <function=f> </function> <parameter=city>".split(),
    *"</parameter> <arg_value> </arg_key> </arg_value> <|/tool_call|> [ARGS] [CALL_ID]".split(),
    *"<|start|>assistant <|message|> <|end|> to=functions.f to=self <tool_call|> call:f{".split(),
    *'<｜tool▁sep｜> <｜tool▁call▁end｜> <|tool_call_end|> [f(city= f.call( <|"|> ```json'.split(),
    *('{"name": "get_weather", "arguments": {"city": "Bern"}}', '<atem:invoke name="f">'),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ":",
        ",",
        "=",
        "1e999",
        "-",
        "null",
        "a",
        " ",
        "\n",
    ),
    *("\x00", "\ud800", "İ"),
)


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(DIALECTS))
def test_no_reply_breaks_a_reader(pieces: list[str], dialect: Dialect) -> None:
    """Models under training write anything, and a run must not end by it."""
    text = "".join(pieces)
    reader = ReplyReader(dialect, dialect.thoughts or tagged_thoughts((THINK, *OTHER_TAGS)))
    for tools in (TOOLS, []):
        reply = reader.read(text, tools)
        assert isinstance(reply.message["content"], str)
        for each in reply.message.get("tool_calls", []):
            json.dumps(each["function"]["arguments"], allow_nan=False)
    for opened in (False, True):
        spans = reader.thoughts.spans(text, opened)
        assert all(0 <= start <= end <= len(text) for start, end in spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
