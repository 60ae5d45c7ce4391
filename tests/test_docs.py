"""The pages for people say what the code does."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

# Reading every page and module takes a second or two; a loaded machine multiplies that.
pytestmark = pytest.mark.timeout(30)

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "envs").rglob("*.md")]
)


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs/generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def text_of(page: Path) -> str:
    return (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("name", ["settings.md", "tools.md", "metrics.md", "models.md", "gpus.md"])
def test_a_generated_page_is_what_the_code_makes_now(name: str):
    assert text_of(Path("docs") / name) == generator().pages()[ROOT / "docs" / name], (
        "run make docs"
    )


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (ROOT / page).parent / path if path else ROOT / page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page}: {target}")
    assert not broken


GENERATED = {Path("docs") / name for name in ("settings.md", "tools.md", "metrics.md", "models.md")}
OUR_FOLDERS = ("engine", "envs", "mcp_server", "playbook", "tests", "docs", "benchmarks", ".ci")


def test_files_named_in_the_docs_exist():
    files = [path for folder in OUR_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = {path.name for path in files}
    wrong = []
    for page in PAGES:
        if page in GENERATED or page == Path("CHANGELOG.md"):  # it names what is gone, too
            continue
        for quoted in re.findall(r"`([^`\n]+)`", text_of(page)):
            for word in quoted.split():
                path = word.partition("::")[0].strip(",;()")
                known = path in names if "/" not in path else (ROOT / path).exists()
                ours = path.partition("/")[0] in OUR_FOLDERS if "/" in path else path[-3:] == ".py"
                if ours and not known and "<" not in path:
                    wrong.append(f"{page}: {path}")
    assert not wrong


def _anchors(file: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_make_targets_named_in_the_docs_exist():
    makefile = text_of(Path("Makefile"))
    targets = {
        name
        for line in re.findall(r"^([a-z -]+):", makefile, re.MULTILINE)
        for name in line.split()
    }
    named = {
        (page, target)
        for page in PAGES
        for group in re.findall(r"`make ([a-z -]+)`|^make ([a-z-]+)", text_of(page), re.MULTILINE)
        for target in " ".join(group).split()
    }
    assert ("demo" in targets) and ("test" in targets)
    assert sorted((str(page), target) for page, target in named if target not in targets) == []


def command_names() -> set[str]:
    from typer.main import get_command

    from mcp_server.cli.main import app

    return set(getattr(get_command(app), "commands", {}))


def test_commands_named_in_the_docs_exist():
    known = command_names()
    assert "serve" in known
    named = {
        (str(page), command)
        for page in PAGES
        for command in re.findall(
            r"(?:`|bin/|^|\$ )honesmith ([a-z][a-z-]+)", text_of(page), re.MULTILINE
        )
    }
    assert sorted(item for item in named if item[1] not in known) == []


def test_the_readme_shows_a_command_within_sixty_words():
    before, _, _ = text_of(Path("README.md")).partition("```")
    assert len(before.split()) <= 60


def test_error_codes_named_in_the_docs_exist():
    from engine.core.errors import CODES

    named = {
        (str(page), code)
        for page in PAGES
        for code in re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", text_of(page))
    }
    known = {*CODES, "HONESMITH_HOME", "HONESMITH_VLLM_PYTHON", "GOMP_SPINCOUNT"}
    known |= {"OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"}
    assert sorted(item for item in named if item[1] not in known) == []


def test_error_texts_quoted_in_troubleshooting_are_in_the_code():
    code = "\n".join(
        node.value
        for package in ("mcp_server", "engine", "envs")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = re.findall(r"^\*\*`(.+)`\*\*", text_of(Path("docs/troubleshooting.md")), re.MULTILINE)
    assert len(quoted) > 10
    for text in quoted:
        for part in filter(str.strip, re.split("…|environment.py|done", text)):
            assert part.strip() in code, f"{part!r} of {text!r}"


def test_tests_named_in_the_reliability_page_exist():
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text_of(Path("docs/reliability.md")))
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_examples_templates_and_scorers_are_all_in_the_environments_page():
    from engine.hub.benchmarks import BENCHMARKS
    from envs import rewards
    from envs.config import scaffold

    text = text_of(Path("docs/environments.md"))
    folders = [path.name for path in (ROOT / "envs/examples").iterdir() if path.is_dir()]
    names = [*folders, *scaffold.TEMPLATES, *BENCHMARKS, *rewards.__all__]
    assert [name for name in names if f"`{name}`" not in text] == []
