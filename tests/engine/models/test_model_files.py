"""Facts of a model folder: exact where they are numbers, refused with the reason otherwise."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.models import model_files
from tests import tiny_model


def refusal(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        model_files.read_facts(folder)
    assert caught.value.code == "MODEL_UNSUPPORTED"
    assert caught.value.hint
    return caught.value


def test_parameters_are_counted_from_the_tensor_shapes(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    facts = model_files.read_facts(tmp_path)
    query, key, mlp = 32 * 32, 16 * 32, 64 * 32
    layer = 2 * query + 2 * key + 3 * mlp + 2 * 32 + 2 * 16
    assert facts.params == 258 * 32 + 2 * layer + 32
    assert facts.weight_bytes == 2 * facts.params
    assert facts.linear_params == 2 * (2 * query + 2 * key + 3 * mlp)
    assert (facts.dtype, facts.tied, facts.vocab, facts.max_positions) == (
        "bfloat16",
        True,
        258,
        512,
    )


def test_a_tied_output_layer_stored_twice_counts_once(tmp_path: Path):
    facts = tiny_model.write_model(tmp_path)
    once = model_files.read_facts(tmp_path)
    tensors = tiny_model.shapes(facts) | {"lm_head.weight": (258, 32)}
    (tmp_path / "model.safetensors").write_bytes(tiny_model.safetensors(tensors))
    again = model_files.read_facts(tmp_path)
    assert again.params == once.params
    assert again.weight_bytes == once.weight_bytes + 258 * 32 * 2


def test_an_untied_output_layer_is_a_part_of_its_own(tmp_path: Path):
    tiny_model.write_model(tmp_path / "tied")
    tiny_model.write_model(tmp_path / "untied", tie_word_embeddings=False, dtype="F32")
    tied = model_files.read_facts(tmp_path / "tied")
    untied = model_files.read_facts(tmp_path / "untied")
    assert untied.params == tied.params + 258 * 32
    assert (untied.dtype, untied.weight_bytes) == ("float32", 4 * untied.params)


def test_sharded_weights_are_read_through_their_index(tmp_path: Path):
    facts = tiny_model.write_model(tmp_path)
    whole = model_files.read_facts(tmp_path)
    names = list(tiny_model.shapes(facts).items())
    (tmp_path / "model.safetensors").unlink()
    mapping = {}
    for number, part in enumerate((names[:7], names[7:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        (tmp_path / file).write_bytes(tiny_model.safetensors(dict(part)))
        mapping |= dict.fromkeys(dict(part), file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    assert model_files.read_facts(tmp_path) == whole
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path).message
    index.write_text(json.dumps({"weight_map": {"a": "../../secrets"}}))
    assert "does not list weight files" in refusal(tmp_path).message


def test_an_adapter_has_rank_times_inputs_and_outputs_parameters(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    facts = model_files.read_facts(tmp_path)
    assert facts.adapter_params(4, ["q_proj"]) == 2 * 4 * (32 + 32)
    assert facts.adapter_params(4, ["k_proj", "down_proj"]) == 2 * 4 * (32 + 16 + 64 + 32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "its own Python code"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused_with_the_reason(
    tmp_path: Path, changes: dict, reason: str
):
    tiny_model.write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.config(**changes)))
    assert reason in refusal(tmp_path).message


def test_config_and_weights_of_different_models_are_refused(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.config(vocab_size=300)))
    said = refusal(tmp_path).message
    assert "model.embed_tokens.weight" in said and "[300, 32]" in said and "[258, 32]" in said
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.config(tie_word_embeddings=False)))
    assert "lm_head.weight" in refusal(tmp_path).message


def test_a_truncated_weight_file_is_refused(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"{len(whole) - 1} of {len(whole)} bytes" in refusal(tmp_path).message
    file.write_bytes(whole[:40])
    assert "ends inside its header" in refusal(tmp_path).message


def test_pickled_weights_are_refused(tmp_path: Path):
    tiny_model.write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    said = refusal(tmp_path)
    assert "pytorch_model.bin" in said.message and "run code" in said.message
    (tmp_path / "pytorch_model.bin").unlink()
    assert "no model.safetensors" in refusal(tmp_path).message


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str):
    tiny_model.write_model(tmp_path)
    (tmp_path / missing).unlink()
    assert missing.split(".")[0].split("_")[0] in refusal(tmp_path).message


@pytest.mark.parametrize(
    "stored",
    [
        "{{ messages }}",
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}],
    ],
)
def test_older_places_of_the_chat_template_are_known(tmp_path: Path, stored: object):
    tiny_model.write_model(tmp_path, template="")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    assert model_files.chat_template(tmp_path) == "{{ messages }}"


def test_a_template_that_can_think_says_so(tmp_path: Path):
    tiny_model.write_model(tmp_path, template="{% if enable_thinking %}<think>{% endif %}")
    assert model_files.read_facts(tmp_path).thinking
    assert not model_files.read_facts(tmp_path).always_thinks


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("{{ content.split('</think>')[-1] }}", True),
        ("[THINK]{{ thought }}[/THINK]", True),
        ("{{ messages }}", False),
    ],
)
def test_marks_of_reasoning_without_a_switch_mean_that_the_model_thinks_by_itself(
    tmp_path: Path, template: str, thinks: bool
):
    tiny_model.write_model(tmp_path, template=template)
    facts = model_files.read_facts(tmp_path)
    assert facts.always_thinks is thinks and not facts.thinking


@given(st.binary(max_size=400))
def test_no_bytes_make_the_header_reader_fail_in_another_way(raw: bytes):
    try:
        model_files.parse_header(raw, "x.safetensors", len(raw))
    except UserError as error:
        assert error.code == "MODEL_UNSUPPORTED"


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(
            st.none(),
            st.integers(),
            st.fixed_dictionaries(
                {"dtype": st.sampled_from(["F32", "BF16", "Q4"])},
                optional={
                    "shape": st.lists(st.integers(-2, 9), max_size=3),
                    "data_offsets": st.lists(st.integers(-5, 200), max_size=3),
                },
            ),
        ),
        max_size=3,
    )
)
def test_no_header_makes_the_reader_fail_in_another_way(header: dict):
    text = json.dumps(header).encode()
    raw = len(text).to_bytes(8, "little") + text
    try:
        model_files.parse_header(raw, "x.safetensors", len(raw) + 100)
    except UserError as error:
        assert error.code == "MODEL_UNSUPPORTED"


def test_a_pipe_for_a_config_is_refused_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    assert "pipe or a device" in refusal(tmp_path).message
