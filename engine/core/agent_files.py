"""Files and folders that a coding agent obeys or runs by itself: nothing is written to them.

Text from an environment, a run or a stranger must not become an instruction to the next agent. And
a link must not lead a written file to another place.
"""

import itertools
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
    """Return whether coding agents obey or run the file or folder at the relative `path`.

    Everything inside a folder of `FOLDERS` counts too. Upper and lower case make no difference. For
    example True for "CLAUDE.md", "docs/CLAUDE.md" and ".git/hooks/pre-commit".
    """
    parts = [part.lower() for part in Path(path).parts]
    # `.claude/worktrees/<name>` is a checkout in which an agent works, so a project like others:
    # only the part of the path below it counts.
    for index, (parent, part) in enumerate(itertools.pairwise(parts[:-1])):
        if part == "worktrees" and parent in (".claude", ".cursor"):
            parts = parts[index + 3 :]
            break
    return any(part in FOLDERS or part in FILES for part in parts)


def refuse_folder_of_agent_files(target: Path, field: str) -> None:
    """Refuse to write to `target` if it is a link or lies in a folder of agent files.

    A folder of agent files holds files that coding agents obey or run, such as `.claude` or `.git`.
    Both the given path and the path with all links resolved are checked.

    Args:
        target: the file or folder to write.
        field: the argument that named the target, for the error.

    Raises UserError BAD_ARGUMENT.
    """
    if target.is_symlink():
        raise UserError(
            "BAD_ARGUMENT",
            f"{target} is a link, and links are not followed",
            hint="Name the folder itself, a new one.",
            field=field,
        )
    real_path = Path(os.path.realpath(target.parent)) / target.name
    if is_agent_file(str(target)) or is_agent_file(str(real_path)):
        raise UserError(
            "BAD_ARGUMENT",
            f"{target} lies where coding agents keep what they obey or run; nothing is written "
            "there",
            hint="Name another folder.",
            field=field,
        )


def refuse_links(project: Path, file: str) -> None:
    """Raise UserError BAD_ARGUMENT if a file, or a folder on the way to it, is a link.

    Text that is written to such a file could land outside the project. `file` is the path relative
    to the folder `project`.
    """
    path = project
    for name in Path(file).parts:
        path = path / name
        if path.is_symlink():
            raise UserError(
                "BAD_ARGUMENT",
                f"{path} is a link; nothing was written through it",
                hint="Replace it by a file or folder of this project, or add the entry by hand.",
                field="folder",
            )
