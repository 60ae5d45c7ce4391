"""TRAINING.md in sections: judgement for an agent that has only the tools.

Each file of `sections/` is one section: `NN-slug.md`, its first line `# Title`, under 9 kB so that
reading one costs an agent little. Every name in backticks is checked against the code by
`tests/playbook/test_playbook.py`.
"""

import difflib
from functools import cache
from pathlib import Path

from engine.core.errors import UserError
from engine.core.hints import Call, Hint

_FOLDER = Path(__file__).parent / "sections"


@cache
def _files() -> dict[str, tuple[str, Path]]:
    """slug -> (title, file), in the order of the numbers that the files' names begin with."""
    entry_of_slug: dict[str, tuple[str, Path]] = {}
    for path in sorted(_FOLDER.glob("*.md")):
        slug = path.stem.split("-", 1)[1]
        with path.open(encoding="utf-8") as lines:
            title = lines.readline().removeprefix("# ").strip()
        entry_of_slug[slug] = (title, path)
    return entry_of_slug


def sections() -> list[tuple[str, str]]:
    """Every section as (slug, title), in reading order."""
    return [(slug, title) for slug, (title, _) in _files().items()]


def read(slug: str = "") -> str:
    """One section as Markdown, or the table of contents for the empty slug.

    Args:
        slug: a slug from `sections()`; its title and any letter case are accepted too.

    Raises:
        UserError: SECTION_NOT_FOUND, naming the nearest sections.
    """
    wanted = slug.strip().lower()
    if not wanted:
        return _contents()
    for known, (title, path) in _files().items():
        if wanted in (known, title.lower()):
            return path.read_text(encoding="utf-8")
    slugs = list(_files())
    similar = difflib.get_close_matches(wanted.replace(" ", "-"), slugs, n=1, cutoff=0.5)
    hint = Hint("To list them:", Call("read_playbook"))
    if similar:
        hint = Hint("", Call("read_playbook", {"section": similar[0]}))
    raise UserError(
        "SECTION_NOT_FOUND",
        f"the playbook has no section {slug!r}; it has {', '.join(slugs)}",
        hint=hint,
        field="section",
    )


def _contents() -> str:
    lines = ["# TRAINING.md", "", 'Read one section with `read_playbook(section="...")`.', ""]
    lines += [f"- `{slug}`: {title}" for slug, title in sections()]
    lines += [
        "",
        "What a base model can do, and in which words: "
        '`read_playbook(section="run://pebble/card")`; every setting: '
        '`read_playbook(section="train://settings")`, what each does `train://settings/grpo`.',
    ]
    return "\n".join(lines) + "\n"
