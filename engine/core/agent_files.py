"""Places that a coding agent reads as instructions or runs by itself: nothing is put there.

What an environment, a run or a stranger wrote must not become what the next agent obeys, and a
link must not lead what is written to somewhere else.
"""

import os
from pathlib import Path

from engine.core.errors import UserError

_EDITORS = (".claude", ".codex", ".cursor", ".vscode", ".gemini", ".windsurf", ".continue", ".idea")
_HOOKS = (".git", ".githooks", ".husky", ".github", ".devcontainer", ".ssh")
_INSTRUCTIONS = ("agents.md", "claude.md", "gemini.md", "copilot-instructions.md")
_RULES = (".cursorrules", ".windsurfrules", ".clinerules")
FOLDERS = frozenset((*_EDITORS, *_HOOKS))
FILES = frozenset((".mcp.json", "mcp.json", ".envrc", *_INSTRUCTIONS, *_RULES))


def is_agent_file(path: str) -> bool:
    """Whether the relative `path` is, or lies in, a place of that kind; case does not matter."""
    parts = [part.lower() for part in Path(path).parts]
    for index, part in enumerate(parts[:-1]):
        if part == "worktrees" and parts[index - 1] in (".claude", ".cursor"):
            parts = parts[index + 2 :]  # a checkout that an agent works in, a project like others
            break
    return any(part in FOLDERS or part in FILES for part in parts)


def refuse_agent_place(target: Path, field: str) -> None:
    """Raises UserError BAD_ARGUMENT when `target` is a link, or it or where its folder really is
    lies in a place that agents obey."""
    if target.is_symlink():
        raise UserError(
            "BAD_ARGUMENT",
            f"{target} is a link, and links are not followed",
            hint="Name the folder itself, a new one.",
            field=field,
        )
    real = Path(os.path.realpath(target.parent)) / target.name
    if is_agent_file(str(target)) or is_agent_file(str(real)):
        raise UserError(
            "BAD_ARGUMENT",
            f"{target} lies where coding agents keep what they obey or run; nothing is written "
            "there",
            hint="Name another folder.",
            field=field,
        )


def refuse_links(project: Path, file: str) -> None:
    """Raises UserError BAD_ARGUMENT when the relative path `file` in `project` leads through a
    link."""
    path = project
    for part in Path(file).parts:
        path = path / part
        if path.is_symlink():
            raise UserError(
                "BAD_ARGUMENT",
                f"{path} is a link; nothing was written through it",
                hint="Replace it by a file or folder of this project, or add the entry by hand.",
                field="folder",
            )
