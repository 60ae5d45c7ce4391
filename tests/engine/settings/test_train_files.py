"""A run as a TOML file: model, algorithm, environment, settings; what is wrong, by its line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.settings.train_files import load_files, load_toml, merge, with_settings


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_holds_model_algorithm_env_and_settings(tmp_path: Path):
    text = 'model = "pebble"\nalgorithm = "sft"\nenv = "sums"\n[settings]\nepochs = 2\n'
    read = load_toml(file(tmp_path, text))
    assert (read.model, read.algorithm, read.env) == ("pebble", "sft", "sums")
    assert (read.settings, read.then, read.vary) == ({"epochs": 2}, [], {})
    empty = load_toml(file(tmp_path, ""))
    assert (empty.model, empty.algorithm, empty.env, empty.settings) == ("pebble", "grpo", "", {})


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("model = 'a'\nmodel = 'b'\n", 2, "overwrite"),
        ("modle = 'a'\n", 1, "model"),
        ("\nhf_repo = 'x'\n", 2, "export"),
        ("steps = 3\n", 1, "[settings]"),
        ("[gpu]\ntype = 'H100'\n", 1, "device"),
        ("[settings]\nsteps = 3\n\n[wandb]\nproject = 'x'\n", 4, "logs of the run"),
        ("[settings]\n\nlearning_rate = nan\n", 3, "finite"),
        ("[settings]\nsteps = 3\n[settings.gpu]\ntype = 'x'\n", 3, "device"),
        ("[settings]\n'group_size' = 1\n", 2, "advantage"),
        ("algorithm = 'sft'\n[settings]\nsteps = 3\nepochs = 2\n", 3, "one of them"),
        ("settings = 3\n", 1, "table"),
        ("model = 3\n", 1, "model"),
        ("model = \n", 1, "TOML"),
        ("[[settings]]\nsteps = 3\n", 1, "table"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, word: str):
    with pytest.raises(UserError) as caught:
        load_toml(file(tmp_path, text))
    said = caught.value
    assert said.code in ("SETTING_UNKNOWN", "SETTING_INVALID")
    assert f":{line}:" in said.message or f"(at line {line}," in said.message
    assert word.lower() in (said.hint + said.message).lower()


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        load_toml(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bytes\.toml"):
        load_toml(tmp_path / "bytes.toml")


def files(tmp_path: Path, **texts: str) -> list[Path]:
    paths = []
    for name, text in texts.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        paths.append(path)
    return paths


def test_a_later_file_replaces_what_earlier_ones_say_and_what_it_changed_is_kept(tmp_path: Path):
    base, more = files(
        tmp_path,
        base='env = "sums"\nalgorithm = "sft"\n[settings]\nepochs = 2\nlora_rank = 4\n'
        "[vary]\nseed = [1, 2]\n[[then]]\nalgorithm = 'grpo'\n",
        more="model = 'm'\n[settings]\nlora_rank = 8\nseed = 3\n[vary]\nseed = [3]\n"
        "[[then]]\nalgorithm = 'evaluate'\n",
    )
    read = load_files([base, more])
    assert (read.model, read.algorithm, read.env) == ("m", "sft", "sums")
    assert read.settings == {"epochs": 2, "lora_rank": 8, "seed": 3}
    assert (read.vary, read.then) == ({"seed": [3]}, [{"algorithm": "evaluate"}])
    first, second = read.files
    assert first.source == str(base) and first.changes == {} and first.sets["settings.epochs"] == 2
    assert second.sets == {"model": "m", "settings.seed": 3}
    assert second.changes == {
        "settings.lora_rank": (4, 8),
        "vary.seed": ([1, 2], [3]),
        "then": ([{"algorithm": "grpo"}], [{"algorithm": "evaluate"}]),
    }


@pytest.mark.parametrize(("earlier", "later"), [("steps", "epochs"), ("epochs", "steps")])
def test_the_later_way_to_say_how_long_to_train_replaces_the_other(
    tmp_path: Path, earlier: str, later: str
):
    both = files(
        tmp_path,
        base=f'algorithm = "sft"\n[settings]\n{earlier} = 2\n',
        more=f"[settings]\n{later} = 3\n",
    )
    read = load_files(both)
    assert read.settings == {later: 3}
    assert read.files[1].changes == {f"settings.{earlier}": (2, None)}
    settings, changed = with_settings(read.settings, {earlier: 5}, "--set")
    assert settings == {earlier: 5} and changed.sets == {f"settings.{earlier}": 5}


def test_settings_are_checked_together_and_a_fault_is_named_in_the_file_that_has_it(
    tmp_path: Path,
):
    base, more, last = files(
        tmp_path,
        base="algorithm = 'sft'\n",
        more="[settings]\n\nepochs = 2\n",
        last="[settings]\nloss = 'dapo'\n",
    )
    assert load_files([base, more]).settings == {"epochs": 2}  # grpo, the default, has no epochs
    with pytest.raises(UserError) as caught:
        load_files([base, more, last])
    assert caught.value.code == "SETTING_NOT_APPLICABLE"
    assert caught.value.message.startswith(f"{last}:2: ")
    with pytest.raises(UserError, match="at most 8"):
        load_files([base] * 9)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["settings.a", "settings.b", "env", "vary.x"]), st.integers()
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_changes_of_all_files_tell_the_whole_story(contents: list[dict[str, int]]):
    """Whoever replays what each file set and changed gets what they say together."""
    merged: dict[str, object] = {}
    replayed: dict[str, object] = {}
    for content in contents:
        merged, changed = merge(merged, content, "f")
        assert not set(changed.sets) & set(replayed)
        for name, (before, now) in changed.changes.items():
            assert replayed.pop(name) == before != now
            replayed |= {} if now is None else {name: now}
        replayed |= dict(changed.sets)
        assert replayed == merged
