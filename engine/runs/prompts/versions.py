"""An environment version of the prompt that a search chose: the same files, and a table [prompt] in
environment.toml."""

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine.core.wording.prompt_texts import SYSTEM, Texts, tool_descriptions
from engine.environments.push import push_env
from engine.environments.registry import EnvRecord
from engine.home.run_dir import Home
from engine.home.store import Store
from envs.config.settings import FILE

_TABLE = re.compile(r"^\s*\[prompt(\.tools)?\]")
_HEADER = re.compile(r"^\s*\[")


def make_version(home: Home, env: EnvRecord, texts: Texts) -> str:
    """Push a version of `env` whose tasks are asked with `texts`, and return its id.

    The environment's bare name keeps meaning the version that it meant before. Raises UserError if
    the version cannot be pushed.
    """
    with Store(home) as store:
        # [] if the owner of the run uses an environment of somebody else.
        versions = [row for row in store.find_env(env.name) if row.name == env.name]
    newest = versions[0] if versions else None  # the version that the bare name means now
    with tempfile.TemporaryDirectory(prefix="honesmith-prompt-") as scratch:
        folder = Path(scratch) / "environment"
        shutil.copytree(env.source, folder)
        toml_file = folder / FILE
        toml = toml_file.read_text("utf-8-sig") if toml_file.is_file() else ""
        toml_file.write_text(with_prompt(toml, texts, env.version.prompt_of or env.env_id), "utf-8")
        reply = push_env(home, folder, name=env.name)
    if newest is not None and newest.env_id != reply.env_id:
        with Store(home) as store:  # the bare name means that version again
            store.add_env(newest.name, newest.hash, kind=newest.kind, info=newest.info)
    return reply.env_id


def with_prompt(toml: str, texts: Texts, original_env_id: str) -> str:
    """Return the text of an environment.toml with a table [prompt] that holds these texts; a table
    [prompt] that it has already is replaced.

    `original_env_id` is the version that has the same tasks without these texts.
    """
    lines = [*_without_tables(toml), "", "[prompt]", f"of = {_quoted(original_env_id)}"]
    if SYSTEM in texts:
        lines.append(f"system = {_quoted(texts[SYSTEM])}")
    tools: Mapping[str, str] = tool_descriptions(texts)
    if tools:
        lines += ["", "[prompt.tools]"]
        lines += [f"{_quoted(name)} = {_quoted(text)}" for name, text in tools.items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _without_tables(toml: str) -> list[str]:
    """Return the lines of the TOML text `toml` without its tables [prompt] and [prompt.tools], and
    without empty lines at the end."""
    kept_lines: list[str] = []
    is_in_prompt_table = False
    for line in toml.rstrip("\n").split("\n"):
        if _HEADER.match(line):
            is_in_prompt_table = _TABLE.match(line) is not None
        if not is_in_prompt_table:
            kept_lines.append(line)
    while kept_lines and not kept_lines[-1].strip():
        kept_lines.pop()
    return kept_lines


def _quoted(text: str) -> str:
    """Write a text as a basic string of TOML on one line, with quotes around it."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    quoted = ""
    for char in text.encode("utf-8", "replace").decode("utf-8"):  # a lone surrogate becomes "?"
        is_control = ord(char) < 32 or ord(char) == 127
        if char in escapes:
            quoted += escapes[char]
        elif is_control:
            quoted += f"\\u{ord(char):04x}"
        else:
            quoted += char
    return f'"{quoted}"'
