"""push_env: a folder becomes a version that never changes."""

import errno
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from doubles_env import DOUBLES

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.core.hints import Call, Change
from engine.environments import push, registry, task_rows
from engine.environments.push import push_env
from engine.environments.registry import find_env, open_process, read_tasks
from engine.home.run_dir import Home
from engine.records.audit import Audit
from envs.config import push_limits
from envs.host.process import EnvProcess

# Each push starts processes and syncs files: a busy disk may take its time.
pytestmark = pytest.mark.timeout(30)

COUNT = """
    from envs import Message, MultiTurnEnv, Score, Task

    class Count(MultiTurnEnv):
        def tasks(self):
            one, two = Message("assistant", "1"), Message("assistant", "2")
            said = [one, Message("user", "ignored"), two]
            late = [two, Message("assistant", "3")]
            return [Task("a", "Count to two.", said), Task("b", "Count on.", late),
                    Task("c", "Never.")]

        def start(self, task):
            return []

        def step(self, state, completion):
            state.append(completion.content)
            if completion.content == "boom":
                raise ValueError("boom")
            return None if completion.content == "2" else [Message("user", "go on")]

        def score(self, task, state):
            return Score(float(state[-1:] == ["2"]))

    def load_environment():
        return Count()
"""


SLEEPS = """def score(self, task, completion):
            __import__("time").sleep(60)"""


@pytest.fixture
def write(tmp_path: Path):
    def make(code: str, name: str = "my_env", **files: str) -> Path:
        folder = tmp_path / "project" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "environment.py").write_text(textwrap.dedent(code))
        for path, text in files.items():
            (folder / path.replace("__", ".")).write_text(text)
        return folder

    return make


def refused(code: str, call) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.code == code, caught.value.message
    return caught.value


def versions(home: Home) -> list[str]:
    return sorted(f"{p.parent.name}/{p.name}" for p in home.envs.glob("*/*"))


def test_a_push_says_what_was_stored(home: Home, write):
    folder = write(DOUBLES)
    (folder / ".env").write_text("TOKEN=x")
    pushed = push_env(home, folder)
    assert pushed.env_id.startswith("my-env@") and len(pushed.env_id) == 19
    assert pushed.kind == "single" and pushed.rows == {"train": 30, "heldout": 30}
    assert pushed.left_out == [".env (hidden)"]
    assert pushed.audit["verdict"] == "ok" and pushed.problems == []
    assert pushed.warnings == []
    assert pushed.next == [Call("dry_run", {"env_id": pushed.env_id})]
    json.dumps(pushed.to_json(), allow_nan=False)


def test_a_push_twice_gives_the_same_id_and_the_same_answer(home: Home, write):
    folder = write(DOUBLES)
    first = push_env(home, folder)
    record = find_env(home, first.env_id)
    stamps = {p: p.stat().st_mtime_ns for p in record.dir.rglob("*")}
    assert push_env(home, folder) == first
    assert {p: p.stat().st_mtime_ns for p in record.dir.rglob("*")} == stamps
    assert len(versions(home)) == 1


def test_a_change_makes_a_new_version_and_leaves_the_old_one_alone(home: Home, write):
    old = push_env(home, write(DOUBLES)).env_id
    before = read_tasks(find_env(home, old))
    new = push_env(home, write(DOUBLES.replace("Twice", "Double"))).env_id
    assert old != new and find_env(home, "my-env").env_id == new
    assert read_tasks(find_env(home, old)) == before
    with open_process(find_env(home, old)) as process:
        assert process.score(before[3], "6")["reward"] == 1.0
    assert push_env(home, write(DOUBLES)).env_id == old
    assert find_env(home, "my-env").env_id == old


def test_after_an_exam_comes_an_evaluation_and_not_a_dry_run(home: Home, write):
    exam = DOUBLES.replace("def tasks(self):", "def tasks(self):", 1)
    code = textwrap.dedent(exam) + textwrap.dedent("""
        class Exam(type(load_environment())):
            def tasks(self):
                rows = super().tasks()
                for row in rows:
                    row.split = "heldout"
                return rows

        def load_environment():
            return Exam(rows=30)
    """)
    pushed = push_env(home, write(code))
    assert pushed.rows["train"] == 0
    assert pushed.next == [Call("evaluate", {"env_id": pushed.env_id, "models": ["pebble"]})]
    assert any("an exam to evaluate on" in warning for warning in pushed.warnings)


def test_params_belong_to_the_version(home: Home, write):
    one = push_env(home, write(DOUBLES))
    two = push_env(home, write(DOUBLES, environment__toml="[params]\nrows = 10\n"))
    assert one.env_id != two.env_id and two.rows == {"train": 5, "heldout": 5}
    assert find_env(home, two.env_id).version.params == {"rows": 10}


def test_stored_rows_are_all_a_later_process_sees(home: Home, write):
    record = find_env(home, push_env(home, write(DOUBLES)).env_id)
    rows = read_tasks(record)
    assert len(rows) == 60 and rows[3] == {
        "id": "d3",
        "prompt": [{"role": "user", "content": "Twice 3?"}],
        "answer": [{"role": "assistant", "content": "6"}],
        "split": rows[3]["split"],
        "metadata": {},
        "text": ["prompt", "answer"],
        "gold": [
            {"role": "user", "content": "Twice 3?"},
            {"role": "assistant", "content": "6"},
        ],
    }
    train, heldout = read_tasks(record, "train"), read_tasks(record, "heldout")
    assert len(train) == 30 and len(heldout) == 30
    assert {row["id"] for row in train} | {row["id"] for row in heldout} == {r["id"] for r in rows}


def test_the_same_rows_are_held_out_in_every_home(home: Home, write, tmp_path: Path):
    folder = write(DOUBLES)
    other = Home.locate(tmp_path / "other")
    sides = [
        {row["id"]: row["split"] for row in read_tasks(find_env(h, push_env(h, folder).env_id))}
        for h in (home, other)
    ]
    assert sides[0] == sides[1]


def test_the_gold_of_several_turns_is_what_the_environment_answered(home: Home, write):
    record = find_env(home, push_env(home, write(COUNT)).env_id)
    gold = {row["id"]: row["gold"] for row in read_tasks(record)}
    assert [m["content"] for m in gold["a"]] == ["Count to two.", "1", "go on", "2"]
    assert [m["content"] for m in gold["b"]] == ["Count on.", "2"]
    assert gold["c"] is None


def test_reference_answers_that_cannot_be_replayed_are_told(home: Home, write):
    code = COUNT.replace("late = [two", 'late = [Message("assistant", "boom")')
    pushed = push_env(home, write(code))
    assert "b: step() raised ValueError: boom" in pushed.problems[0].message
    assert any("cannot be replayed" in warning for warning in pushed.warnings)


def test_a_dataset_needs_no_scorer_and_no_code(home: Home, tmp_path: Path):
    folder = tmp_path / "rows"
    (folder / "datasets").mkdir(parents=True)
    lines = [json.dumps({"prompt": f"p{n}", "completion": f"c{n}"}) for n in range(60)]
    (folder / "datasets" / "rows.jsonl").write_text("\n".join(lines))
    pushed = push_env(home, folder)
    assert (pushed.kind, pushed.rows) == ("sft", {"train": 30, "heldout": 30})
    record = find_env(home, pushed.env_id)
    assert not record.scored and read_tasks(record)[0]["gold"][-1]["content"] == "c0"
    assert pushed.next == [Call("dry_run", {"env_id": pushed.env_id, "algorithm": "sft"})]


def test_tasks_that_do_not_repeat_themselves_are_a_warning(home: Home, write):
    code = DOUBLES.replace("range(self.rows)", "__import__('random').sample(range(10**6), 20)")
    pushed = push_env(home, write(code))
    assert "gave other rows when called again (20 and 20 rows" in pushed.warnings[0]
    assert pushed.rows == {"train": 10, "heldout": 10}


def test_a_careless_reward_is_stored_with_its_risk(home: Home, write):
    code = DOUBLES.replace("completion.strip() == task.answer", "task.answer in completion")
    pushed = push_env(home, write(code))
    assert pushed.audit["verdict"] == "risk"
    assert "negated gold" in pushed.audit["risks"]
    assert pushed.warnings[0].startswith("reward audit: risk")
    assert 'negated gold "' in " ".join(pushed.warnings), "an answer that was paid is quoted"
    record = find_env(home, pushed.env_id)
    assert record.audit.verdict == "risk" and record.audit.probes
    assert read_json(record.dir / "audit.json") == record.audit.as_written()
    assert read_json(record.dir / "env.json") == record.version.to_json()
    assert registry.list_envs(home)[0].audit == "risk"


def test_a_fault_has_its_file_and_line_and_leaves_nothing_behind(home: Home, write):
    code = DOUBLES.replace("return [Task", "return 1 / 0 or [Task")
    error = refused("ENV_INVALID", lambda: push_env(home, write(code)))
    assert "environment.py:9: tasks() raised ZeroDivisionError" in error.message
    assert versions(home) == [] and list(home.envs.iterdir()) == []
    refused("ENV_NOT_FOUND", lambda: find_env(home, "my-env"))


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({"environment__toml": "[params]\nrowz = 3\n"}, "ENV_PARAM", "rowz"),
        ({"environment__toml": "[limit]\n"}, "ENV_INVALID", "environment.toml:1"),
        ({"requirements__txt": "no-such-package-7\n"}, "ENV_DEPS", "no-such-package-7"),
        ({"environment__py": "import no_such_package_7\n"}, "ENV_DEPS", "environment.py:1"),
        ({"environment__py": "x = (\n"}, "ENV_IMPORT", "environment.py:1"),
    ],
)
def test_each_kind_of_fault_has_its_code(home: Home, write, files: dict, code: str, said: str):
    error = refused(code, lambda: push_env(home, write(DOUBLES, **files)))
    assert said in error.message and error.hint


def test_a_split_nobody_knows_is_refused(home: Home, write):
    code = DOUBLES.replace("str(2 * n))", 'str(2 * n), split="tset")')
    assert "'tset'" in refused("ENV_INVALID", lambda: push_env(home, write(code))).message


def test_links_out_of_the_folder_are_refused(home: Home, write):
    folder = write(DOUBLES)
    (folder / "data").symlink_to("/etc")
    refused("ENV_INVALID", lambda: push_env(home, folder))
    assert versions(home) == []


def test_only_the_roots_are_read(home: Home, write):
    folder = write(DOUBLES)
    refused("PATH_OUTSIDE_ROOTS", lambda: push_env(home, folder, roots=[home.root]))
    refused("PATH_OUTSIDE_ROOTS", lambda: push_env(home, folder, roots=[]))
    assert push_env(home, folder, roots=[folder.parent]).env_id


@pytest.mark.parametrize(
    ("given", "becomes"), [("", "my-env"), ("sums", "sums"), ("a.b_c-1", "a.b_c-1")]
)
def test_the_name_is_the_folders_unless_given(home: Home, write, given: str, becomes: str):
    assert push_env(home, write(DOUBLES), name=given).env_id.split("@")[0] == becomes


@pytest.mark.parametrize("name", ["../x", "A", "a b", "-x", "x" * 41, "a@b", "a/b", "a\nb"])
def test_a_name_that_is_none_is_refused_with_one_that_is(home: Home, write, name: str):
    error = refused("BAD_ARGUMENT", lambda: push_env(home, write(DOUBLES), name=name))
    suggested = error.hint.split("'")[1]
    assert push.NAME.fullmatch(suggested)


@pytest.mark.parametrize("folder", ["My Env!", "___", "Ünï"])
def test_any_folder_has_a_name_to_push_under(home: Home, write, folder: str):
    name = push_env(home, write(DOUBLES, name=folder)).env_id.split("@")[0]
    assert push.NAME.fullmatch(name)


def test_a_version_left_half_written_is_made_again(home: Home, write):
    pushed = push_env(home, write(DOUBLES))
    record = find_env(home, pushed.env_id)
    (record.dir / "env.json").unlink()
    refused("ENV_NOT_FOUND", lambda: find_env(home, pushed.env_id))
    # How many rows an audit has time for differs from one to the next.
    assert push_env(home, write(DOUBLES)).env_id == pushed.env_id
    assert find_env(home, pushed.env_id).rows == record.rows


def test_a_full_disk_is_told_and_leaves_nothing_behind(home: Home, write, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(task_rows, "write", full)
    assert refused("DISK_FULL", lambda: push_env(home, write(DOUBLES))).retryable
    assert list(home.envs.iterdir()) == []


def test_tasks_that_hang_are_given_up(home: Home, write, monkeypatch):
    monkeypatch.setattr(push_limits, "PUSH_SECONDS", 4.0)
    monkeypatch.setattr(push_limits, "TASKS_SECONDS", 0.4)
    code = DOUBLES.replace("return [Task", "__import__('time').sleep(60)\n            return [Task")
    error = refused("ENV_IMPORT", lambda: push_env(home, write(code)))
    assert "tasks() did not answer within 0.4 s" in error.message
    assert "limits.start_seconds in environment.toml is 60" in error.hint


def test_an_import_may_take_what_a_push_has_and_its_limit_is_named(home: Home, write, monkeypatch):
    monkeypatch.setattr(push_limits, "PUSH_SECONDS", 9.0)
    monkeypatch.setattr(push_limits, "AFTER_START", 1.0)
    monkeypatch.setattr(push_limits, "START_SECONDS", 0.1)
    late = "    import time; time.sleep(SECONDS)\n" + DOUBLES
    assert push_env(home, write(late.replace("SECONDS", "0.5"))).rows["train"] == 30
    monkeypatch.setattr(push_limits, "PUSH_SECONDS", 3.0)
    error = refused("ENV_IMPORT", lambda: push_env(home, write(late.replace("SECONDS", "60"))))
    assert "importing the environment did not answer within" in error.message
    assert "limits.start_seconds in environment.toml is 60" in error.hint
    assert "a push has 3 s in all" in error.hint


JUDGED = """
    import os
    from envs import Score, SingleTurnEnv, Task

    class Judged(SingleTurnEnv):
        def tasks(self):
            return [Task(str(n), f"Twice {n}?", str(2 * n)) for n in range(60)]

        def score(self, task, completion):
            right = bool(os.environ["MY_JUDGE_KEY"]) and completion == task.answer
            return Score(float(right), success=right)

    def load_environment():
        return Judged()
"""


def test_a_push_with_the_secret_that_was_missing_makes_the_audit_again(
    home: Home, write, monkeypatch
):
    folder = write(JUDGED, environment__toml='secrets = ["MY_JUDGE_KEY"]\n')
    first = push_env(home, folder)
    assert "secrets not set for this server: MY_JUDGE_KEY" in first.warnings
    record = find_env(home, first.env_id)
    stamps = {p: p.stat().st_mtime_ns for p in record.dir.rglob("*") if p.is_file()}
    again = push_env(home, folder)  # still unset: nothing is made anew
    assert again == first
    assert {p: p.stat().st_mtime_ns for p in record.dir.rglob("*") if p.is_file()} == stamps

    monkeypatch.setenv("MY_JUDGE_KEY", "a-key-of-some-length")
    second = push_env(home, folder)
    assert second.env_id == first.env_id and second.audit["verdict"] == "ok"
    assert "MY_JUDGE_KEY" not in json.dumps(second.warnings)
    found = find_env(home, first.env_id)
    assert found.audit.verdict == "ok" and found.version == record.version
    assert registry.list_envs(home)[0].audit == "ok"
    (kept,) = (found.dir / registry.EARLIER).iterdir()
    assert Audit.read(kept) == record.audit
    assert push_env(home, folder) == second

    monkeypatch.delenv("MY_JUDGE_KEY")
    third = push_env(home, folder)
    assert "secrets not set for this server: MY_JUDGE_KEY" in third.warnings
    assert third.audit == second.audit


def test_who_may_not_use_its_secrets_does_not_have_the_audit_made_again(
    home: Home, write, monkeypatch
):
    folder = write(JUDGED, environment__toml='secrets = ["MY_JUDGE_KEY"]\n')
    first = push_env(home, folder)
    monkeypatch.setenv("MY_JUDGE_KEY", "a-key-of-some-length")

    def forbidden(_: object) -> None:
        raise UserError("FORBIDDEN", "no")

    second = push_env(home, folder, check_settings=forbidden)
    assert second.audit == first.audit
    assert "the audit was made without the secrets MY_JUDGE_KEY" in second.warnings


def test_an_audit_of_an_older_release_is_made_again_too(home: Home, write, monkeypatch):
    folder = write(JUDGED, environment__toml='secrets = ["MY_JUDGE_KEY"]\n')
    record = find_env(home, push_env(home, folder).env_id)
    old = {key: value for key, value in record.audit.as_written().items() if key != "secrets_unset"}
    (record.dir / "audit.json").write_text(json.dumps(old))
    said = ["secrets not set for this server: MY_JUDGE_KEY"]
    (record.dir / "env.json").write_text(json.dumps(record.version.to_json() | {"warnings": said}))
    monkeypatch.setenv("MY_JUDGE_KEY", "a-key-of-some-length")
    assert push_env(home, folder).warnings == []


READY = """
    from envs.host import child
    child._describe = lambda env: {ready!r}
"""


@pytest.mark.parametrize(
    "ready",
    [
        {},
        {"kind": "single", "scored": True, "tools": 5},
        {"kind": ["x"], "scored": "<b>", "tools": 5},
        {"kind": "single", "scored": 1, "tools": []},
        {
            "kind": "single",
            "scored": True,
            "tools": [{"type": "function", "function": {"name": "\ud800"}}],
        },
    ],
)
def test_what_a_process_says_of_itself_is_not_believed(home: Home, write, ready: dict):
    forged = textwrap.dedent(READY.format(ready=ready)) + textwrap.dedent(DOUBLES)
    refused("ENV_INVALID", lambda: push_env(home, write(forged)))
    assert list(home.envs.iterdir()) == []


def test_a_stored_folder_that_is_no_version_is_made_anew(home: Home, write):
    pushed = push_env(home, write(DOUBLES))
    record = find_env(home, pushed.env_id)
    (record.dir / "env.json").write_text(json.dumps(record.version.to_json() | {"tools": 5}))
    refused("ENV_NOT_FOUND", lambda: find_env(home, pushed.env_id))
    push_env(home, write(DOUBLES))
    assert find_env(home, pushed.env_id).tools == []


def test_a_version_that_got_no_row_is_not_left_behind(home: Home, write, monkeypatch):
    monkeypatch.setattr(
        push, "Store", lambda _: (_ for _ in ()).throw(UserError("HOME_UNUSABLE", "no"))
    )
    refused("HOME_UNUSABLE", lambda: push_env(home, write(DOUBLES)))
    assert list(home.envs.iterdir()) == []


@pytest.mark.parametrize("code", ["shape", "tasks"])
def test_what_looks_like_a_key_is_hidden_in_all_a_push_says(home: Home, write, code: str):
    key = "sk-abcdefghijklmnop1234567890"
    if code == "tasks":
        broken = DOUBLES.replace("return [Task", f"raise ValueError('{key}')\n            [Task")
        error = refused("ENV_INVALID", lambda: push_env(home, write(broken)))
        assert key not in str(error.payload()) and "[secret]" in error.message
        return
    raising = DOUBLES.replace("right = completion", f"raise ValueError('{key}')  # completion")
    pushed = push_env(home, write(raising))
    assert key not in json.dumps(pushed.to_json()) and "[secret]" in json.dumps(pushed.warnings)
    assert key not in (find_env(home, pushed.env_id).dir / "audit.json").read_text()


def test_a_file_that_may_not_grow_is_told_like_a_full_disk(home: Home, write):
    folder = write(DOUBLES)
    (folder / "large.txt").write_text("x" * 400_000)
    code = (
        "import resource, sys; from engine.core.errors import UserError\n"
        "from engine.environments.push import push_env; from engine.home.run_dir import Home\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try: push_env(Home.locate(), sys.argv[1])\n"
        "except UserError as error: print(error.code, error.message, error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(folder)], capture_output=True, text=True
    )
    assert done.stdout.startswith("DISK_FULL") and "ulimit -f" in done.stdout, done.stderr
    assert list(home.envs.iterdir()) == []


def test_scoring_again_costs_no_start_that_was_not_there(home: Home, write, monkeypatch):
    """The process that is asked for its tasks a second time scores a sample first."""
    started: list[EnvProcess] = []
    ensure = EnvProcess._ensure_started

    def counted(process: EnvProcess) -> None:
        started.extend([process] if process._pipe is None else [])
        ensure(process)

    monkeypatch.setattr(EnvProcess, "_ensure_started", counted)
    pushed = push_env(home, write(DOUBLES))
    assert len(started) == 2 and pushed.audit["fresh_process"]["scored"] == 24


def test_the_tasks_are_asked_for_again_before_a_score_has_thrown_the_same_dice(home: Home, write):
    code = DOUBLES.replace("range(self.rows)", "random.sample(range(10**6), 20)").replace(
        "def score(self, task, completion):",
        "def score(self, task, completion):\n            random.random()",
    )
    indent = code[: len(code) - len(code.lstrip())].rpartition("\n")[2]
    pushed = push_env(home, write(f"{indent}import random; random.seed(7)\n{code.lstrip(chr(10))}"))
    assert pushed.audit["fresh_process"]["scored"] == 24
    assert not any("gave other rows" in said for said in pushed.warnings)


def test_an_environment_that_is_slow_to_start_is_not_started_again(home: Home, write, monkeypatch):
    monkeypatch.setattr(push_limits, "PUSH_SECONDS", 4.0)
    monkeypatch.setattr(push_limits, "CALL_SECONDS", 0.5)
    began = time.monotonic()
    pushed = push_env(home, write("    import time; time.sleep(1.5)\n" + DOUBLES))
    assert time.monotonic() - began < 8.0
    fresh = pushed.audit["fresh_process"]
    assert (fresh["scored"], fresh["differing"]) == (0, 0) and "s to start" in fresh["why"]
    assert pushed.audit["verdict"] == "ok"
    assert any("whether it repeats itself was not checked" in said for said in pushed.warnings)


def test_a_score_that_hangs_costs_the_audit_its_time_and_no_more(home: Home, write, monkeypatch):
    monkeypatch.setattr(push_limits, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(push_limits, "AUDIT_SECONDS", 0.2)
    code = DOUBLES.replace("def score(self, task, completion):", SLEEPS)
    began = time.monotonic()
    result = push_env(home, write(code))
    assert time.monotonic() - began < 5.0
    assert result.audit["verdict"] == "risk"
    assert any("not every probe was tried" in warning for warning in result.warnings)


def test_secrets_reach_the_environment_and_are_not_stored(home: Home, write, monkeypatch):
    code = DOUBLES.replace(
        "self.rows = rows", "self.rows = len(__import__('os').environ.get('MY_KEY', 'xx'))"
    )
    folder = write(code, environment__toml='secrets = ["MY_KEY"]\n')
    unset = push_env(home, folder)
    assert "secrets not set for this server: MY_KEY" in unset.warnings
    error = refused("ENV_SECRETS", lambda: open_process(find_env(home, unset.env_id)))
    assert "MY_KEY" in error.message
    monkeypatch.setenv("MY_KEY", "canary-of-ten-and-more")
    second = push_env(home, folder, name="again")
    assert second.rows["train"] + second.rows["heldout"] == 22
    for path in home.root.rglob("*"):
        assert not path.is_file() or b"canary-of-ten" not in path.read_bytes()


@pytest.mark.timeout(60)
def test_missing_packages_are_installed_when_asked(home: Home, write, tmp_path: Path, monkeypatch):
    from zipfile import ZipFile

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with ZipFile(wheels / "tiny_rows-1.0-py3-none-any.whl", "w") as archive:
        info = "tiny_rows-1.0.dist-info"
        archive.writestr("tiny_rows.py", "ROWS = 44\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-rows\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    code = DOUBLES.replace("rows=60", "rows=__import__('tiny_rows').ROWS")
    folder = write(code, requirements__txt="tiny-rows==1.0\n")
    error = refused("ENV_DEPS", lambda: push_env(home, folder))
    assert "tiny-rows==1.0" in error.message
    assert error.advice.change == Change(arguments={"install": True})
    pushed = push_env(home, folder, install=True)
    assert pushed.rows == {"train": 22, "heldout": 22}
    record = find_env(home, pushed.env_id)
    assert Path(registry.env_python(record)).is_relative_to(home.cache)
    with open_process(record) as process:
        assert process.score(read_tasks(record)[1], "2")["reward"] == 1.0
        assert ("own uid" in process.isolation) == (os.geteuid() == 0)


def test_two_pushes_of_the_same_content_at_once_agree(home: Home, write):
    from concurrent.futures import ThreadPoolExecutor

    folder = write(DOUBLES)
    with ThreadPoolExecutor(3) as pool:
        results: list[dict[str, Any]] = list(pool.map(lambda _: push_env(home, folder), range(3)))
    assert len({result.env_id for result in results}) == 1
    assert len(versions(home)) == 1


def test_what_a_killed_push_left_is_cleared_away_by_the_next_one(home: Home, write, tmp_path: Path):
    slow = write(DOUBLES.replace("return [Task(f", "__import__('time').sleep(20); return [Task(f"))
    code = (
        "import sys; from engine.environments.push import push_env; "
        "from engine.home.run_dir import Home\n"
        "push_env(Home.locate(), sys.argv[1], name='doubles')"
    )
    pushing = subprocess.Popen([sys.executable, "-P", "-c", code, str(slow)])
    deadline = time.monotonic() + 20
    while not list(home.envs.glob("doubles/.push-*/source/environment.py")):
        assert time.monotonic() < deadline and pushing.poll() is None
        time.sleep(0.01)
    living = list(home.envs.glob("doubles/.push-*"))
    push_env(home, write(DOUBLES, "other"), name="other", roots=None)
    assert list(home.envs.glob("doubles/.push-*")) == living  # whose push goes on
    pushing.kill()
    pushing.wait()
    push_env(home, write(DOUBLES, "other"), name="other", roots=None)
    assert list(home.envs.glob("*/.push-*")) == []
    assert not (home.envs / "doubles").exists()
