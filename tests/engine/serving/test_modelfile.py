"""A Modelfile asks the model with the words of its own chat template."""

from pathlib import Path

import pytest
from official_templates import REASON, STOPS, TEMPLATES, source, tokenizer_of
from ollama_template import render, template_of

from engine.models import catalog, tokens
from engine.serving import modelfile
from tests import tiny_model

# As SmolLM2 writes it: a system message of its own where there is none.
WITH_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE = [{"role": "user", "content": "one"}]
TWO = [*ONE, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
SYSTEM = [{"role": "system", "content": "zero"}]
CHATS = {"one": ONE, "two": TWO, "system_one": SYSTEM + ONE, "system_two": SYSTEM + TWO}
# Families whose Modelfile names no template: they take no system message (Gemma), write it into the
# first question (Gemma 3), or end an answer otherwise where no question follows.
WITHOUT = {"gemma", "gemma3", "gptoss", "phi3", "phi3_5"}


def test_the_template_is_read_off_the_chat_template(tmp_path: Path):
    tiny_model.write_model(tmp_path / "model")
    assert modelfile.text(tmp_path / "model", "x.gguf") == (
        "FROM ./x.gguf\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}'
        '{{ range $i, $_ := .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}'
        "<|im_end|>\n"
        '<|im_start|>assistant\n{{ else if eq .Role "assistant" }}{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        "PARAMETER temperature 0\n"
    )


def test_a_chat_in_ollama_reads_as_the_model_was_trained(tmp_path: Path):
    tiny_model.write_model(tmp_path / "model", template=WITH_DEFAULT_SYSTEM)
    text = modelfile.text(tmp_path / "model", "x.gguf")
    template = template_of(text)
    assert render(template, ONE) == (
        "<|im_start|>system\nYou are kind<|im_end|>\n"
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(template, SYSTEM + TWO) == (
        "<|im_start|>system\nzero<|im_end|>\n"
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert 'PARAMETER stop "<|im_end|>"' in text


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason=REASON)
@pytest.mark.parametrize("name", sorted(STOPS))
def test_an_official_template_is_written_exactly_or_not_at_all(name: str, tmp_path: Path):
    folder = tmp_path / "model"
    tiny_model.write_model(folder)
    tokenizer_of(name, source(name)).save_pretrained(folder)
    template = template_of(modelfile.text(folder, "x.gguf"))
    assert bool(template) == (name not in WITHOUT)
    if template:
        chat = tokens.load(folder).format()
        for messages in CHATS.values():
            assert render(template, messages) == chat.text(messages, prompt=True)


def test_a_template_without_system_messages_leaves_the_choice_to_ollama(tmp_path: Path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
    tiny_model.write_model(tmp_path / "model", template=refusing)
    text = modelfile.text(tmp_path / "model", "x.gguf")
    assert text == "FROM ./x.gguf\nPARAMETER temperature 0\n"


def test_the_built_in_model_has_one():
    assert "TEMPLATE" in modelfile.text(catalog.BUILTIN["pebble"], "pebble.gguf")
