"""Counting tokens and rendering chats as the trainer will, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.models import catalog, tokens
from engine.models.chat_format import TemplateError
from tests import tiny_model

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "a <b>", "parameters": {}}}
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "12 + 34? ñ"},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> tokens.ChatTokenizer:
    tiny_model.write_model(tmp_path / "model")
    return tokens.load(tmp_path / "model")


def with_template(tmp_path: Path, template: str) -> tokens.ChatTokenizer:
    tiny_model.write_model(tmp_path / "other", template=template)
    return tokens.load(tmp_path / "other")


def test_one_token_per_byte_and_special_tokens_whole(tokenizer: tokens.ChatTokenizer):
    assert tokenizer.count("abc") == 3
    assert tokenizer.count("<|im_start|>a<|im_end|>") == 3
    assert tokenizer.count("ñ") == 2


def test_the_prompt_ends_where_the_assistant_goes_on(tokenizer: tokens.ChatTokenizer):
    text = tokenizer.format().text(CHAT[:2], prompt=True)
    assert text.endswith("<|im_start|>user\n12 + 34? ñ<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.format().prompt(CHAT[:2]) == tokenizer.encode(text)


def test_loss_is_on_what_the_assistant_says_and_its_end_token(tokenizer: tokens.ChatTokenizer):
    whole = tokenizer.format().rows(CHAT)[0]
    said = [i for i, trained in zip(whole.ids, whole.mask(), strict=True) if trained]
    assert said == tokenizer.encode("46<|im_end|>") + tokenizer.encode("yes<|im_end|>")
    last = [i for i, trained in zip(whole.ids, whole.mask("last"), strict=True) if trained]
    assert last == tokenizer.encode("yes<|im_end|>")
    assert whole.mask("all") == [0] + [1] * (len(whole.ids) - 1)


def test_the_prompt_is_the_beginning_of_the_conversation(tokenizer: tokens.ChatTokenizer):
    prompt = tokenizer.format().prompt(CHAT[:2])
    assert tokenizer.format().rows(CHAT)[0].ids[: len(prompt)] == prompt


def test_what_follows_the_last_assistant_turn_is_not_trained(tokenizer: tokens.ChatTokenizer):
    more = [*CHAT, {"role": "user", "content": "thanks"}]
    assert tokenizer.format().rows(more)[0] == tokenizer.format().rows(CHAT)[0]
    assert tokenizer.format().rows(CHAT[:2]) == []


def test_a_template_that_rewrites_history_gives_a_row_per_turn(tmp_path: Path):
    chat = with_template(tmp_path, "{{ messages | length }}" + tiny_model.TEMPLATE).format()
    first, second = chat.rows(CHAT)
    assert first.ids == chat.encode(chat.text(CHAT[:2], prompt=True) + "46<|im_end|>")
    assert second.ids == chat.encode(chat.text(CHAT[:4], prompt=True) + "yes<|im_end|>")
    assert sum(first.mask()) == 3 and sum(second.mask()) == 4
    assert sum(first.mask("last")) == 0 and second.mask("last") == second.mask()


def test_loss_on_all_trains_what_two_rows_share_once(tmp_path: Path):
    template = tiny_model.TEMPLATE.replace("'<|im_end|>' -}}{%- endgen", "end -}}{%- endgen")
    ends = "{%- set end = '<|im_end|>' if messages | length < 4 else '.<|im_end|>' -%}"
    first, second = with_template(tmp_path, ends + template).format().rows(CHAT)
    shared = second.shape.known
    assert first.ids[:shared] == second.ids[:shared] and first.ids[shared] != second.ids[shared]
    assert first.mask("all") == [0] + [1] * (len(first.ids) - 1)
    assert second.mask("all") == [0] * shared + [1] * (len(second.ids) - shared)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[99].content.strip() }}", "refused the messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error_in_words(
    tmp_path: Path, template: str, words: str
):
    with pytest.raises(TemplateError, match=words):
        with_template(tmp_path, template).format().text(CHAT, prompt=False)


def test_a_template_that_is_no_template_is_refused(tmp_path: Path):
    with pytest.raises(UserError) as caught:
        with_template(tmp_path, "{% if %}").format().text(CHAT, prompt=False)
    assert caught.value.code == "MODEL_UNSUPPORTED"


def test_templates_have_the_extras_transformers_gives_them(tmp_path: Path):
    template = (
        "{{ tools[0] | tojson }}|{{ strftime_now('%Y') | length }}|{{ eos_token }}|"
        "{{ bos_token is defined }}|{% for m in messages %}{% if loop.index > 1 %}{% break %}"
        "{% endif %}{{ m.role }}{% endfor %}"
    )
    said = with_template(tmp_path, template).format().text(CHAT, TOOLS, prompt=False)
    assert said == json.dumps(TOOLS[0]) + "|4|<|im_end|>|False|system"
    assert "<b>" in said  # not escaped as HTML


def test_a_broken_tokenizer_is_refused(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError) as caught:
        tokens.load(tmp_path).count("a")
    assert caught.value.code == "MODEL_UNSUPPORTED"


def test_a_tokenizer_is_read_again_when_its_template_changes(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    first = tokens.load(tmp_path)
    assert tokens.load(tmp_path) is first
    (tmp_path / "chat_template.jinja").write_text(tiny_model.TEMPLATE + " ")
    assert tokens.load(tmp_path).fingerprint != first.fingerprint


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=4))
def test_any_chat_counts_each_token_once(turns: list[tuple[str, str]]):
    tokenizer = tokens.load(catalog.BUILTIN["pebble"])
    chat = []
    for asked, said in turns:
        chat += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    whole = tokenizer.format().rows(chat)[0]
    assert len(whole.turns) == len(turns)
    assert sum(whole.mask()) == sum(end - start for start, end in whole.turns)
    assert all(a[1] <= b[0] for a, b in zip(whole.turns, whole.turns[1:], strict=False))
    assert sum(whole.mask("last")) <= sum(whole.mask()) < len(whole.mask("all"))


ORACLE = """
import json, sys
from transformers import PreTrainedTokenizerFast  # does not load torch
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
cases = json.load(sys.stdin)
out = []
for case in cases:
    out.append(tokenizer.apply_chat_template(
        case["messages"], tools=case["tools"], tokenize=True, return_dict=True,
        add_generation_prompt=case["generation"], enable_thinking=case["thinking"],
        return_assistant_tokens_mask=not case["generation"]))
json.dump([{k: list(v) for k, v in o.items()} for o in out], sys.stdout)
"""


@pytest.mark.timeout(60)
def test_counts_and_masks_equal_those_of_transformers():
    calling = [
        {"role": "user", "content": "add 2 and 3 <now>"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
            ],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5 — é"},
    ]
    cases = [
        {"messages": messages, "tools": tools, "generation": generation, "thinking": thinking}
        for messages, tools in ((CHAT, None), (calling, TOOLS), (calling, None))
        for generation in (False, True)
        for thinking in (False, True)
    ]
    folder = catalog.BUILTIN["pebble"]
    said = subprocess.run(
        [sys.executable, "-c", ORACLE, str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    tokenizer = tokens.load(folder)
    for case, theirs in zip(cases, json.loads(said.stdout), strict=True):
        messages, tools = case["messages"], case["tools"]
        if case["generation"]:
            ours = tokenizer.format(case["thinking"]).prompt(messages, tools or ())
            assert ours == theirs["input_ids"]
        elif not case["thinking"]:
            whole = tokenizer.format().rows(messages, tools or ())[0]
            end = len(whole.ids)  # theirs goes on with the newline after the last turn
            assert whole.ids == theirs["input_ids"][:end]
            assert whole.mask() == theirs["assistant_masks"][:end]
            assert not any(theirs["assistant_masks"][end:])
