"""The playbook speaks only of what exists, and its numbers are those of the statistics."""

import ast
import dataclasses
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

import envs
import envs.rewards
from engine.core.errors import CODES, FAILURE_KINDS, UserError
from engine.core.metrics import METRICS
from engine.curation import selection
from engine.evidence.detect.detectors import IDS
from engine.evidence.overlap import overlap
from engine.evidence.stats import inference
from engine.home.rows import STATES
from engine.home.run_dir import Home
from engine.records.lines.answer import StopReason
from engine.records.settings import SCHEMAS
from engine.runs.reading.rollout_rows import FILTER_NAMES
from envs.base import Message, MultiTurnEnv, Score, SingleTurnEnv, Task
from envs.host.process import EnvProcess
from mcp_server.protocol.tools import all_tools
from playbook import read, sections

SLUGS = [slug for slug, _ in sections()]
LARGEST = 9_000  # bytes
LARGEST_CONTENTS = 3_000


# --- what exists ----------------------------------------------------------------------------


@cache
def tools() -> dict[str, dict[str, Any]]:
    """Tool name -> argument name -> its JSON schema."""
    found = all_tools(Home(Path("home")), ())
    return {tool.name: dict(tool.parameters.get("properties", {})) for tool in found}


@cache
def settings(algorithm: str) -> dict[str, Any]:
    """Setting name -> its JSON schema; the sampling names for evaluations under "evaluate"."""
    return SCHEMAS[algorithm].model_json_schema()["properties"]


def choices(schema: dict[str, Any]) -> list[Any] | None:
    """The values a schema allows one by one, None where it allows a range."""
    for part in (schema, *schema.get("anyOf", [])):
        if "enum" in part:
            return list(part["enum"])
        if "const" in part:
            return [part["const"]]
    return None


@cache
def arguments() -> dict[str, list[dict[str, Any]]]:
    """Every argument of a tool and every setting, with the schemas it has in different places."""
    found: dict[str, list[dict[str, Any]]] = {}
    for holder in [*tools().values(), *(settings(name) for name in SCHEMAS)]:
        for name, schema in holder.items():
            found.setdefault(name, []).append(schema)
    return found


@cache
def environment_words() -> set[str]:
    """What an environment author writes: classes, their fields and methods, scorers."""
    words = {*envs.__all__, *(name for name in dir(envs.rewards) if not name.startswith("_"))}
    for record in (Task, Score, Message):
        words |= {field.name for field in dataclasses.fields(record)}
    for kind in (SingleTurnEnv, MultiTurnEnv):
        words |= {name for name in dir(kind) if not name.startswith("_")}
    return words | {
        "load_environment",
        "train",
        "heldout",
        "tool",
        "state",
        "completion.tool_calls",
    }


# Fields of results and files of an environment, which no schema lists.
WRITTEN = {
    *("summary", "next", "warnings", "retryable", "None", "pass_at_k", "pass_at_k_change"),
    *("environment.py", "environment.toml", "requirements.txt", "datasets/"),
    *("honesmith setup", "honesmith setup --vllm", "honesmith doctor", "honesmith report"),
    *(
        'command = ["sh", "agent.sh"]',
        '[rollout] reward = "stdout"',
        '"file"',
        '"http"',
        "OPENAI_BASE_URL",
    ),
    *("arith@3f2a9c01d4e5", "arith-grpo-7@step20", "@best", "run://{run_id}/report"),
    *("rubric.toml", "honesmith judge calibrate", "honesmith env audit ENV --all"),
    *("$HONESMITH_TASK", 'scorer = "exact"', '"90 %"'),
    # named metrics and names inside the example environments
    *("parsed", "solved", "clumsy"),
}


@cache
def known_words() -> set[str]:
    words = {*tools(), *arguments(), *METRICS, *CODES, *FAILURE_KINDS, *STATES, *SLUGS, *IDS}
    words |= {*get_args(inference.Word), *overlap.KINDS, *selection.NAMES, "pass@4"}
    words |= {*FILTER_NAMES, *get_args(StopReason)}
    for schemas in arguments().values():
        for schema in schemas:
            words |= {value for value in choices(schema) or [] if isinstance(value, str)}
    return words | environment_words() | WRITTEN


# --- what is wrong with a span --------------------------------------------------------------


def problems(span: str) -> list[str]:
    """What a span in backticks claims that does not exist."""
    if span in known_words():
        return []
    call = _parse(span)
    if isinstance(call, ast.Call):
        return _call_problems(call)
    pairs = _parse(f"f({span})")
    if isinstance(pairs, ast.Call) and pairs.keywords and not pairs.args:
        return [p for pair in pairs.keywords for p in _pair_problems(pair, arguments())]
    return [f"{span} does not exist"]


def _parse(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None


def _call_problems(call: ast.Call) -> list[str]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    given = [pair.arg for pair in call.keywords]
    if name in tools():
        schemas = {arg: [schema] for arg, schema in tools()[name].items()}
        found = [p for pair in call.keywords for p in _pair_problems(pair, schemas)]
        found += [f"{name} takes names, not positions"] if call.args else []
        return found + _settings_problems(name, call)
    fields = {
        field.name for record in (Task, Score, Message) for field in dataclasses.fields(record)
    }
    if name in envs.__all__:
        return [f"{name}({arg}=...) does not exist" for arg in given if arg not in fields]
    if name in environment_words() and not given:
        return []
    return [f"{name or ast.unparse(call)} cannot be called"]


def _pair_problems(pair: ast.keyword, schemas: dict[str, list[dict[str, Any]]]) -> list[str]:
    name = pair.arg or ""
    if name not in schemas:
        return [f"{name} is no argument here"]
    try:
        value = ast.literal_eval(pair.value)
    except ValueError:
        return (
            []
            if isinstance(pair.value, ast.Name) and pair.value.id in ("true", "false")
            else [f"{name}={ast.unparse(pair.value)} is no value"]
        )
    if any(_allows(schema, value) for schema in schemas[name]):
        return []
    return [f"{name}={value!r} is not available"]


def _allows(schema: dict[str, Any], value: Any) -> bool:
    allowed = choices(schema)
    if allowed is not None and value not in allowed:
        return False
    if isinstance(value, int | float):
        return schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
    return True


def _settings_problems(tool: str, call: ast.Call) -> list[str]:
    values = {pair.arg: pair.value for pair in call.keywords}
    if not isinstance(values.get("settings"), ast.Dict):
        return []
    algorithm = "evaluate"
    if tool != "evaluate":
        algorithm = ast.literal_eval(values["algorithm"]) if "algorithm" in values else "grpo"
    found = []
    for name, value in ast.literal_eval(values["settings"]).items():
        schema = settings(algorithm).get(name)
        if schema is None or not _allows(schema, value):
            found.append(f"settings {name}={value!r} is not available for {algorithm}")
    return found


def prose(slug: str) -> str:
    """A section without its code blocks."""
    return re.sub(r"^```.*?^```\n", "", read(slug), flags=re.DOTALL | re.MULTILINE)


# --- tests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", SLUGS)
def test_every_name_in_backticks_exists(slug: str):
    spans = re.findall(r"`([^`\n]+)`", prose(slug))
    assert spans
    wrong = [f"`{span}`: {problem}" for span in spans for problem in problems(span)]
    assert not wrong


@pytest.mark.parametrize(
    "span",
    [
        "submit_trian",
        "gruop_size",
        "groups_efective",
        "REWARD_RISKS",
        'submit_train(env="arith")',
        'submit_train(env_id="arith", algorithm="ppo")',
        'submit_train(env_id="arith", algorithm="sft", settings={"group_size": 8})',
        'evaluate(env_id="arith", settings={"learning_rate": 0.1})',
        'read_rollouts(run_id="r", pick="saddest")',
        'pick="saddest"',
        'get_status("runs")',
        "Score(rewards=1.0)",
        "timeout_s=6000",
    ],
)
def test_a_name_that_does_not_exist_is_found(span: str):
    assert problems(span)


@pytest.mark.parametrize("slug", SLUGS)
def test_every_section_costs_an_agent_less_than_nine_kilobytes(slug: str):
    assert len(read(slug).encode()) < LARGEST


@pytest.mark.parametrize("slug", SLUGS)
def test_a_section_is_found_by_slug_and_by_title(slug: str):
    text = read(slug)
    title = text.splitlines()[0].removeprefix("# ")
    assert (slug, title) in sections()
    assert read(title.upper()) == text


def test_the_empty_slug_gives_the_contents():
    contents = read()
    assert all(f"`{slug}`" in contents for slug in SLUGS)
    assert len(SLUGS) == len(set(SLUGS))


def test_an_unknown_section_is_refused_with_a_near_one():
    with pytest.raises(UserError) as caught:
        read("judgin")
    assert caught.value.code == "SECTION_NOT_FOUND"
    assert 'read_playbook(section="judging")' in caught.value.hint


def test_an_unknown_section_near_none_is_sent_to_the_contents():
    with pytest.raises(UserError) as caught:
        read("nonsense")
    assert caught.value.hint == "To list them: read_playbook()"


def test_sections_refer_to_sections_that_exist():
    for slug in SLUGS:
        named = re.findall(r"[Ss]ections? `(\w+)`(?: and `(\w+)`)?", read(slug))
        assert {name for pair in named for name in pair if name} <= set(SLUGS)


def test_every_tool_is_used_somewhere_in_the_playbook():
    text = "".join(read(slug) for slug in SLUGS)
    assert [name for name in tools() if name not in text] == []


def test_every_failure_kind_and_state_has_a_row_in_crashes():
    rows = set(re.findall(r"^\| `(\w+)` \|", read("crashes"), re.MULTILINE))
    assert {*FAILURE_KINDS, *STATES} <= rows


def test_every_finding_of_diagnose_has_a_row_by_its_name():
    rows = re.findall(r"^\| ([^|]+) \|", read("failures"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(IDS) - {"infra"} <= named
    assert "by one name, `infra`" in read("crashes")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["single", "multi", "tools", "sft"])
def test_the_example_environments_run_and_pay_their_own_gold(kind: str, tmp_path: Path):
    text = read("environments") + read("turns")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    block = blocks[("single", "sft", "multi", "tools").index(kind)]
    (tmp_path / "environment.py").write_text(block)
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets/train.jsonl").write_text('{"prompt": "2 + 2?", "answer": "4"}\n')
    with EnvProcess(tmp_path) as process:
        assert process.describe()["kind"] == ("multi" if kind == "tools" else kind)
        task = process.tasks()[0]
        gold = task["answer"][-1]
        if kind == "single":
            assert process.score(task, gold["content"])["success"] is True
            assert process.score(task, "no idea")["reward"] == 0.0
        if kind == "multi":
            episode = process.start(task)
            assert episode.step(gold) is None
            assert episode.score()["success"] is True
            episode.close()
        if kind == "tools":
            episode = process.start(task)
            call, last = task["answer"]
            (reply,) = episode.step(call)
            assert reply["role"] == "tool" and reply["content"] == last["content"]
            assert reply["tool_call_id"] == call["tool_calls"][0]["id"] == "c1"
            assert episode.step(last) is None and episode.score()["success"] is True
            episode.close()


# --- numbers --------------------------------------------------------------------------------


def rows(slug: str, pattern: str) -> list[tuple[str, ...]]:
    found = re.findall(pattern, read(slug), re.MULTILINE)
    assert found
    return found


def test_the_bands_of_the_judging_table_follow_from_their_formulas():
    number = r"±([\d.]+)"
    for n, single, pair, flip10, flip20 in rows(
        "judging", rf"^\| (\d+) \| {number} \| {number} \| {number} \| {number} \|$"
    ):
        spreads = (0.25, 0.5, 0.1, 0.2)
        for text, spread in zip((single, pair, flip10, flip20), spreads, strict=True):
            assert float(text) == pytest.approx(196 * math.sqrt(spread / int(n)), abs=0.051)


def test_the_mcnemar_table_gives_mid_p_values():
    for gained, lost, p in rows("judging", r"(\d+) : (\d+) \| (0\.\d+)"):
        assert float(p) == round(inference.mcnemar_midp(int(gained), int(lost)), 3)


def test_the_example_verdict_follows_from_its_counts():
    low, high, n, gained, lost = rows(
        "judging",
        r"interval \+([\d.]+) to \+([\d.]+), (\d+) tasks, (\d+) mended, (\d+) broken",
    )[0]
    interval = inference.tango_interval(int(gained), int(lost), int(n))
    assert (float(low), float(high)) == (
        round(100 * interval.low, 1),
        round(100 * interval.high, 1),
    )


def test_the_table_of_tasks_needed_is_what_the_statistics_say():
    for gap, *counts in rows("evidence", r"^\| (\d+) points \| (\d+|–) \| (\d+) \| (\d+) \|$"):
        for share, count in zip((0.1, 0.2, 0.4), counts, strict=True):
            if count != "–":
                assert int(count) == inference.tasks_needed(int(gap) / 100, share)


def test_the_table_of_small_numbers_gives_wilson_intervals():
    for k, n, low, high in rows("evidence", r"^\| (\d+) of (\d+) \| (\d+) % to (\d+) % \|$"):
        interval = inference.wilson(int(k), int(n))
        assert (int(low), int(high)) == (round(100 * interval.low), round(100 * interval.high))


def test_the_contents_hold_a_core_that_a_first_run_can_rest_on():
    text = read()
    assert len(text.encode()) < LARGEST_CONTENTS and text.index("six calls") < text.index(
        "- `loop`"
    )
    spans = re.findall(r"`([^`\n]+)`", text.partition("## Sections")[0])
    written = {"rows.jsonl", '{"prompt": "...", "answer": "..."}', 'expect="90 %"', "cursor"}
    assert [
        f"{span}: {problems(span)}" for span in spans if span not in written and problems(span)
    ] == []
