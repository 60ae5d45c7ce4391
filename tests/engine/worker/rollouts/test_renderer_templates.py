"""Ids and loss masks of five families of chat templates, token by token.

The templates are written here after the published formats; tokenizers are one id per character and
one per marker, so every expectation can be read off the text.
"""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.worker.rollouts.renderer import Renderer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CHATML = (
    "{%- if tools -%}{{- '<|im_start|>system\n' -}}"
    "{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n' -}}{%- endif -%}"
    "{{- '<tools>' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '</tools><|im_end|>\n' -}}"
    "{%- elif messages[0].role == 'system' -%}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role == 'system' and loop.first -%}"
    "{%- elif m.role == 'tool' -%}"
    "{{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' -}}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
HEADERS = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) -}}"
    "{%- for call in m.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}"
    "{{- '<|eot_id|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"
)
INST = (
    "{{- bos_token -}}{%- set ns = namespace(system='') -%}"
    "{%- for m in messages -%}{%- if m.role == 'system' -%}{%- set ns.system = m.content -%}"
    "{%- elif m.role == 'user' -%}"
    "{{- '[INST] ' + (ns.system + '\n\n' if ns.system and loop.index0 < 2 else '') -}}"
    "{{- m.content + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + m.content + eos_token -}}{%- endif -%}{%- endfor -%}"
)
TURNS = (
    "{{- bos_token -}}{%- if messages[0].role == 'system' -%}"
    "{{- raise_exception('System role not supported') -}}{%- endif -%}"
    "{%- for m in messages -%}{%- set role = 'model' if m.role == 'assistant' else m.role -%}"
    "{{- '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"
)
LINES = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + eos_token + '\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "chatml": {
        "template": CHATML,
        "markers": ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"],
        "bos": None,
        "stop": "<|im_end|>",
    },
    "headers": {
        "template": HEADERS,
        "markers": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "bos": "<|begin_of_text|>",
        "stop": "<|eot_id|>",
    },
    "inst": {
        "template": INST,
        "markers": ["<s>", "</s>", "[INST]", "[/INST]"],
        "bos": "<s>",
        "stop": "</s>",
    },
    "turns": {
        "template": TURNS,
        "markers": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "bos": "<bos>",
        "stop": "<end_of_turn>",
    },
    "lines": {
        "template": LINES,
        "markers": ["<|system|>", "<|user|>", "<|assistant|>", "</s>"],
        "bos": None,
        "stop": "</s>",
    },
}


def renderer(family: str) -> Renderer:
    """A tokenizer that puts its BOS in front of what it encodes, as those families do."""
    facts = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(m, special=True) for m in facts["markers"]])
    if facts["bos"]:
        from tokenizers.processors import TemplateProcessing

        bos = facts["bos"]
        core.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=facts["bos"],
        eos_token=facts["stop"],
        chat_template=facts["template"],
    )
    return Renderer(tokenizer, [core.token_to_id(facts["stop"])])


def marked(made: Renderer, row: Any) -> str:
    """The row's text with every trained stretch between « and »."""
    out, inside = "", 0
    for token, trained in zip(row.ids, row.loss_mask, strict=True):
        if trained != inside:
            out += "«" if trained else "»"
            inside = trained
        out += str(made.tokenizer.decode([token]))
    return out + ("»" if inside else "")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [user("Hi?"), said("Yes."), user("Go on"), said("No.")]

ONE_TURN = {
    "chatml": "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»",
    "headers": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes.<|eot_id|>»",
    "inst": "<s>[INST] Hi? [/INST]« Yes.</s>»",
    "turns": "<bos><start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\n"
    "«Yes.<end_of_turn>»",
    "lines": "<|user|>\nHi?</s>\n<|assistant|>\n«Yes.</s>»",
}
TWO_TURNS = {
    "chatml": "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n«Yes.<|im_end|>»\n"
    "<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n«No.<|im_end|>»",
    "headers": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes.<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nGo on<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«No.<|eot_id|>»",
    "inst": "<s>[INST] Hi? [/INST]« Yes.</s>»[INST] Go on [/INST]« No.</s>»",
    "turns": "<bos><start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\n"
    "«Yes.<end_of_turn>»\n<start_of_turn>user\nGo on<end_of_turn>\n<start_of_turn>model\n"
    "«No.<end_of_turn>»",
    "lines": "<|user|>\nHi?</s>\n<|assistant|>\n«Yes.</s>»\n<|user|>\nGo on</s>\n<|assistant|>\n"
    "«No.</s>»",
}
WITH_SYSTEM = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
    "<|im_start|>assistant\n«Yes.<|im_end|>»",
    "headers": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«Yes.<|eot_id|>»",
    "inst": "<s>[INST] Be brief.\n\nHi? [/INST]« Yes.</s>»",
    "lines": "<|system|>\nBe brief.</s>\n<|user|>\nHi?</s>\n<|assistant|>\n«Yes.</s>»",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_turn_is_trained_with_the_token_that_ends_it(family: str) -> None:
    made = renderer(family)
    assert marked(made, made.rows(TALK[:2], [], "assistant")[0]) == ONE_TURN[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_turns_are_trained_and_what_stands_between_is_not(family: str) -> None:
    made = renderer(family)
    assert marked(made, made.rows(TALK, [], "assistant")[0]) == TWO_TURNS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_on_last_leaves_the_first_turn_out(family: str) -> None:
    made = renderer(family)
    first, _, rest = TWO_TURNS[family].partition("»")
    expected = first.replace("«", "") + rest
    assert marked(made, made.rows(TALK, [], "last")[0]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_on_all_leaves_out_the_first_token_alone(family: str) -> None:
    made = renderer(family)
    row = made.rows(TALK, [], "all")[0]
    assert row.ids == made.rows(TALK, [], "assistant")[0].ids
    assert row.loss_mask == [0] + [1] * (len(row.ids) - 1)


@pytest.mark.parametrize("family", WITH_SYSTEM)
def test_a_system_message_is_read_and_never_trained(family: str) -> None:
    made = renderer(family)
    row = made.rows([SYSTEM, *TALK[:2]], [], "assistant")[0]
    assert marked(made, row) == WITH_SYSTEM[family]


def test_a_family_without_a_system_role_says_so() -> None:
    with pytest.raises(Exception, match="System role not supported"):
        renderer("turns").rows([SYSTEM, *TALK[:2]], [], "assistant")[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_stands_twice_at_the_start_and_a_row_begins_as_its_prompt(family: str) -> None:
    made = renderer(family)
    row = made.rows(TALK, [], "assistant")[0]
    prompt = made.prompt(TALK[:1])
    assert row.ids[: len(prompt)] == prompt
    assert not any(row.loss_mask[: len(prompt)])
    bos = FAMILIES[family]["bos"]
    if bos:
        token = made.tokenizer.convert_tokens_to_ids(bos)
        assert row.ids[0] == token and row.ids.count(token) == 1
        # The tokenizer by itself would have written a second one.
        assert made.tokenizer.encode(bos + "x")[:2] == [token, token]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_played_conversation_is_the_written_one(family: str) -> None:
    made = renderer(family)
    stop = made.tokenizer.eos_token_id
    space = " " if family == "inst" else ""  # the family's answers begin with one
    played = [*made.prompt(TALK[:1]), *made.encode(space + "Yes."), stop]
    mask = [0] * len(made.prompt(TALK[:1])) + [1] * len(made.encode(space + "Yes.")) + [1]
    between = made.between_turns(TALK[:2], TALK[2:3])
    played += [*between, *made.encode(space + "No."), stop]
    mask += [0] * len(between) + [1] * len(made.encode(space + "No.")) + [1]
    row = made.rows(TALK, [], "assistant")[0]
    assert (row.ids, row.loss_mask) == (played, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_turn_trains_its_end_alone(family: str) -> None:
    made = renderer(family)
    row = made.rows([user("Hi?"), said("")], [], "assistant")[0]
    stop = FAMILIES[family]["stop"]
    expected = "« " + stop + "»" if family == "inst" else "«" + stop + "»"
    assert marked(made, row).endswith(expected)
    assert sum(row.loss_mask) == (2 if family == "inst" else 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_token_inside_a_message_does_not_move_the_mask(family: str) -> None:
    made = renderer(family)
    stop = FAMILIES[family]["stop"]
    row = made.rows([user(f"Say {stop} now"), said("Yes.")], [], "assistant")[0]
    answer = " Yes." if family == "inst" else "Yes."
    assert marked(made, row).count("«") == 1
    assert marked(made, row).endswith(f"«{answer}{stop}»")


TOOL_TALK = [
    user("Price?"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
        ],
    },
    {"role": "tool", "name": "look", "tool_call_id": "c", "content": "42"},
    said("It is 42."),
]
CALL = json.dumps({"name": "look", "arguments": {"a": 1}})


def test_calls_are_trained_and_tool_results_are_not_chatml() -> None:
    made = renderer("chatml")
    text = marked(made, made.rows(TOOL_TALK, [TOOL], "assistant")[0])
    head, _, rest = text.partition("<|im_start|>user\nPrice?")
    assert head.startswith("<|im_start|>system\n<tools>") and "«" not in head
    assert json.loads(head[len("<|im_start|>system\n<tools>") :].partition("</tools>")[0]) == TOOL
    assert rest == (
        f"<|im_end|>\n<|im_start|>assistant\n«<tool_call>{CALL}</tool_call><|im_end|>»\n"
        "<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«It is 42.<|im_end|>»"
    )


def test_calls_are_trained_and_tool_results_are_not_headers() -> None:
    made = renderer("headers")
    assert marked(made, made.rows(TOOL_TALK, [], "assistant")[0]) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nPrice?<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n«{CALL}<|eot_id|>»"
        "<|start_header_id|>tool<|end_header_id|>\n\n42<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n«It is 42.<|eot_id|>»"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_without_an_answer_trains_nothing(family: str) -> None:
    assert renderer(family).rows([user("Hi?")], [], "assistant") == []


def test_a_template_that_drops_earlier_thoughts_trains_each_turn_after_its_own_prompt() -> None:
    made = renderer("chatml")
    made.tokenizer.chat_template = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{%- if m.reasoning_content and loop.last -%}"
        "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}"
        "{{- m.content + '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    talk = [user("Hi?"), said("<think>hm</think>Yes."), user("Go on"), said("No.")]
    first, second = (marked(made, row) for row in made.rows(talk, [], "assistant"))
    start = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert first == start + "«<think>\nhm\n</think>\n\nYes.<|im_end|>»"
    assert second == (
        start + "Yes.<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"
        "«No.<|im_end|>»"
    )
    assert [marked(made, row) for row in made.rows(talk, [], "last")] == [second]
    assert len(made.rows(talk, [], "assistant", "drop")) == 1
    assert made.rows(talk, [], "assistant", "require") == []
