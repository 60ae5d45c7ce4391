"""Anything at all as arguments, settings and files: refused in words, at once, without a trace.

Small and the same every time by default; HONESMITH_FUZZ=20 tries twenty times as much, by chance.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import answered
import anyio.from_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.environments import datasets
from engine.home.run_dir import Home
from engine.settings import train_files
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings
from mcp_server.access.log import log_file
from mcp_server.protocol.app import build_server
from mcp_server.protocol.tools import all_tools

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3_000)]

TIMES = int(os.environ.get("HONESMITH_FUZZ", "1"))
MOST_S = 5.0
SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        suppress_health_check=SLOW,
        derandomize=TIMES == 1,
        database=None,
    )


# --- every tool -------------------------------------------------------------------------------

TOOLS = {tool.name: tool for tool in all_tools(Home(Path("/nowhere")), ())}
ODD = [
    "",
    " ",
    "\0",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "~",
    "~root",
    "file:///etc/passwd",
    "-rf",
    "--help",
    "a;b",
    "$(id)",
    "`id`",
    "a\nb",
    "a\r\nb",
    "x" * 5_000,
    "ａｒｉｔｈ",
    "аrith",
    "sums@",
    "@best",
    "sums@zz",
    "sums-grpo-1@step999999999999",
    "sums-grpo-1@best@best",
    "%00",
    "%2e%2e%2f",
    "CON",
    "null",
    "None",
    "{}",
    "[]",
    "[1]",
    '{"a":1}',
    "1e400",
    "NaN",
    "\u202eabc",
    "👩‍👩‍👧" * 50,
    "hub/model",
    "../hub/model",
    "C:\\windows",
    "\\\\host\\share",
    "'; DROP TABLE runs;--",
]
KNOWN = ["sums", "sums-grpo-1", "sums-evaluate-1", "sums-grpo", "s"]
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, 1e-308, -0.0]),
)
TEXT = st.one_of(st.sampled_from(ODD + KNOWN), st.text(max_size=60))
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
SETTING_NAMES = st.one_of(
    st.sampled_from(
        "steps epochs batch_size group_size learning_rate max_length max_tokens temperature top_p "
        "stop seed eval_rows lora_rank lora_targets loss kl_coef precision packing stepz".split()
    ),
    st.text(max_size=12),
)
SETTINGS = st.dictionaries(SETTING_NAMES, JUNK, max_size=4)
EXPRESSIONS = st.one_of(
    TEXT,
    st.text("0123456789.<>=!()[]+-*/% andornotrewardstep'\"", max_size=60),
    st.sampled_from(
        [
            "reward < 0.5",
            "9**9**9**9 > 1",
            "(" * 500,
            "reward.__class__",
            "[x for x in y]",
            "__import__('os')",
            "'a' * 10**9 == 1",
            "not " * 300 + "1",
            "1 if 1 else",
        ]
    ),
)


def value_for(tool: str, name: str, part: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly what an argument takes, sometimes anything."""
    if name == "timeout_s":  # a long wait is no fault
        return st.one_of(st.floats(max_value=0.2), st.sampled_from([0, 51, -1, "1", True]))
    if name == "where":
        right: st.SearchStrategy[Any] = EXPRESSIONS
    elif name == "settings":
        right = SETTINGS
    elif "enum" in part:
        right = st.sampled_from(part["enum"])
    else:
        right = {
            "string": TEXT,
            "integer": st.one_of(st.integers(-3, 300), NUMBERS),
            "number": NUMBERS,
            "boolean": st.booleans(),
            "array": st.lists(TEXT, max_size=4),
            "object": SETTINGS,
        }[part["type"]]
    return st.one_of(right, right, right, JUNK)


def calls_of(tool: str) -> st.SearchStrategy[dict[str, Any]]:
    schema = TOOLS[tool].parameters
    parts = {name: value_for(tool, name, part) for name, part in schema["properties"].items()}
    needed = {name: parts[name] for name in schema.get("required", [])}
    others = {name: value for name, value in parts.items() if name not in needed}
    right = st.fixed_dictionaries(needed, optional=others)
    strange = st.dictionaries(st.text(max_size=10), JUNK, max_size=2)
    return st.one_of(right, right, right, st.builds(lambda a, b: {**b, **a}, right, strange))


def content(home: Home) -> dict[str, str]:
    """What a home stores: its files and the rows of its database, but for logs and caches."""
    found = {}
    for path in sorted(home.root.rglob("*")):
        name = path.relative_to(home.root).as_posix()
        kept = name.startswith(("cache/", "honesmith.db"))
        if path.is_file() and not kept and path != home.audit and path.suffix != ".lock":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    with sqlite3.connect(f"file:{home.db}?mode=ro", uri=True) as db:
        found["rows"] = "\n".join(db.iterdump())
    return found


class Server:
    """A server in this process over a home of its own, called from outside its event loop."""

    def __init__(self, home: Home, root: Path, portal: Any, client: Client) -> None:
        self.home = home
        self.root = root
        self._portal = portal
        self._client = client

    def call(self, tool: str, arguments: dict[str, Any]) -> tuple[Any, float]:
        began = time.monotonic()
        result = self._portal.call(self._client.call_tool, tool, arguments)
        return result, time.monotonic() - began


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A home with an environment, a training run and an evaluation, and no hour left to spend."""
    folder = tmp_path_factory.mktemp("fuzz")
    home = Home.locate(folder / "home")
    root = folder / "project"
    env_id = answered.push(home, root / "sums")
    rows = [answered.answer(f"{1 + n % 8}+{1 + n // 8}", str(n), float(n % 2)) for n in range(16)]
    answered.training(home, env_id, rollouts={1: rows}, evals={0: rows, 1: rows})
    answered.evaluation(home, env_id, {"pebble": rows})
    # What passes every check is refused here, so that a thousand calls start no thousand runs.
    home.config_file.write_text("max_gpu_hours_total = 0\n")
    trainer = Path(__file__).parent.parent / "engine" / "fake_trainer.py"
    with (
        pytest.MonkeyPatch.context() as patch,
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(build_server(home, [root]))) as client,
    ):
        stand_in(patch, trainer=trainer)  # nor is this machine measured
        yield Server(home, root, portal, client)


@pytest.mark.parametrize("tool", list(TOOLS))
def test_any_arguments_are_answered_in_words_at_once_and_a_refusal_changes_nothing(
    server: Server, tool: str
):
    state = {"before": content(server.home)}

    @fuzz(40)
    @given(arguments=calls_of(tool))
    def look(arguments: dict[str, Any]) -> None:
        result, took = server.call(tool, arguments)
        text = result.content[0].text
        assert took < MOST_S, (took, arguments)
        assert "Traceback" not in text and len(text) <= 10_000
        now = content(server.home)
        if result.is_error:
            said = json.loads(text)
            assert said["code"] != "INTERNAL", (said, arguments)
            assert said["message"] and "\n" not in text and len(text) <= 1_000
            assert now == state["before"], (said, arguments)
        state["before"] = now

    look()
    assert not log_file(server.home).exists(), log_file(server.home).read_text()[-3_000:]


# --- files ------------------------------------------------------------------------------------

BYTES = st.one_of(
    st.binary(max_size=400),
    st.sampled_from(
        [
            b"",
            b"\xef\xbb\xbf",
            b"\xff\xfe",
            b"\x00" * 50,
            b"[" * 20_000,
            b"a=" + b"[" * 20_000,
            b"a = " + b"9" * 5_000,
            b"{" * 9_000,
            b"a=1\r\n" * 3,
            "\u2028\u2029".encode(),
            b'{"a":' * 5_000,
            b"[a]\n" * 500,
            b"a.b" * 3_000 + b"=1",
            b'"\\ud800"',
        ]
    ),
)
TOML_VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "true",
            "inf",
            "nan",
            "-inf",
            "1e400",
            "[]",
            "{}",
            "[1, 'a']",
            "'x'",
            '"\\u0000"',
            "0x10",
            "1979-05-27T07:32:00Z",
            "9" * 5_000,
            "'''" + "x" * 5_000 + "'''",
            "[[[[1]]]]",
            "00:00",
        ]
    ),
    st.text(max_size=20).map(lambda text: json.dumps(text)),
)
LINES = st.one_of(
    st.builds(
        lambda name, value: f"{name} = {value}",
        st.one_of(SETTING_NAMES, st.sampled_from(["model", "algorithm", "env", "settings"])),
        TOML_VALUES,
    ),
    st.sampled_from(["[settings]", "[[settings]]", "[other]", "[settings.x]", "#", "= 1", '"']),
    st.text(max_size=30),
)
TOML = st.one_of(
    st.lists(LINES, max_size=8).map(lambda lines: "\n".join(lines).encode("utf-8", "replace")),
    st.builds(
        lambda lines: ("[settings]\n" + "\n".join(lines)).encode("utf-8", "replace"),
        st.lists(LINES, max_size=5),
    ),
    BYTES,
)


def timed(call: Any, *refusals: type[Exception]) -> Any:
    """What `call` gives or refuses with; fails when it takes long or raises something else."""
    began = time.monotonic()
    try:
        return call()
    except refusals as refusal:
        assert str(refusal)
        return None
    finally:
        assert time.monotonic() - began < MOST_S


@fuzz(300)
@given(data=TOML)
def test_any_plan_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes):
    path = tmp_path_factory.getbasetemp() / "plan.toml"
    path.write_bytes(data)
    timed(lambda: train_files.load_toml(path), UserError)


@fuzz(200)
@given(data=TOML)
def test_any_config_of_a_home_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
):
    home = Home.locate(tmp_path_factory.getbasetemp() / "config-home")
    home.config_file.write_bytes(data)
    timed(home.user_config, UserError)


@fuzz(200)
@given(data=TOML)
def test_any_environment_toml_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
):
    folder = tmp_path_factory.getbasetemp()
    (folder / "environment.toml").write_bytes(data)
    timed(lambda: read_settings(folder), EnvProblem)


ROWS = st.one_of(
    st.dictionaries(
        st.sampled_from("prompt answer messages question completion text id split tools x".split()),
        JUNK,
        max_size=4,
    ),
    JUNK,
)


def as_line(row: Any) -> bytes:
    try:
        return json.dumps(row).encode("utf-8", "replace")
    except ValueError:  # a number of too many digits
        return b"1" * 5_000


FILES = st.one_of(
    st.lists(ROWS, max_size=5).map(lambda rows: b"\n".join(map(as_line, rows))),
    st.lists(ROWS, max_size=5).map(lambda rows: b"[" + b",".join(map(as_line, rows)) + b"]"),
    st.lists(st.lists(st.text(max_size=8), max_size=4).map(",".join), max_size=5).map(
        lambda lines: "\n".join(lines).encode("utf-8", "replace")
    ),
    BYTES,
)


@fuzz(400)
@given(data=FILES, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt"]))
def test_any_data_file_is_looked_into_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, suffix: str
):
    path = tmp_path_factory.getbasetemp() / f"rows{suffix}"
    path.write_bytes(data)
    report = timed(lambda: datasets.inspect(path), UserError)
    if report is not None:
        assert report.rows >= 0 and len(report.bad_rows) <= 20
        assert all(bad.line >= 0 and bad.message for bad in report.bad_rows)


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", "x"]), "content": JUNK}
)
FIELDS = (
    "model tools max_tokens max_completion_tokens temperature top_p stop seed n stream "
    "stream_options user"
).split()
BODIES = st.one_of(
    JUNK,
    st.fixed_dictionaries(
        {"messages": st.lists(st.one_of(JUNK, MESSAGE), max_size=3)},
        optional=dict.fromkeys(FIELDS, JUNK),
    ),
)


@pytest.mark.worker
@fuzz(300)
@given(body=BODIES)
def test_any_chat_request_is_read_or_refused(body: Any):
    from engine.worker.gateway.chat_request import Refused, parse_chat

    asked = timed(lambda: parse_chat(body), Refused)
    if asked is not None:
        assert 1 <= asked.n <= 16 and 1 <= asked.params.max_tokens <= 4096
