"""A Modelfile asks the model with the words of its own chat template."""

from pathlib import Path

from engine.models import catalog
from engine.serving import modelfile
from tests import tiny_model


def test_the_template_is_read_off_the_chat_template(tmp_path: Path):
    tiny_model.write_model(tmp_path / "model")
    assert modelfile.text(tmp_path / "model", "x.gguf") == (
        "FROM ./x.gguf\n"
        'TEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}'
        "<|im_start|>user\n{{ .Prompt }}<|im_end|>\n<|im_start|>assistant\n{{ .Response }}"
        '<|im_end|>\n"""\n'
        'PARAMETER stop "<|im_end|>"\n'
        "PARAMETER temperature 0\n"
    )


def test_a_template_without_system_messages_leaves_the_choice_to_ollama(tmp_path: Path):
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x"
    tiny_model.write_model(tmp_path / "model", template=refusing)
    text = modelfile.text(tmp_path / "model", "x.gguf")
    assert text == "FROM ./x.gguf\nPARAMETER temperature 0\n"


def test_the_built_in_model_has_one():
    assert "TEMPLATE" in modelfile.text(catalog.BUILTIN["pebble"], "pebble.gguf")
