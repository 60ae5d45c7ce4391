"""The playbook: a guide to training in sections, written for an agent that has only the tools.

Its table of contents begins with a core that is enough for most jobs. Each file of `sections/` is
one section: `NN-slug.md`, its first line `# Title`, under 9 kB so that reading one costs an agent
little. `tests/playbook/test_playbook.py` checks every name in backticks against the code.
"""

import difflib
from functools import cache
from pathlib import Path

from engine.core.errors import UserError
from engine.core.hints import Call, Hint

_FOLDER = Path(__file__).parent / "sections"
# Enough for most jobs, so that no section has to be read before the first run.
_CORE = """## Most jobs in six calls

Nothing else has to be read before the first run; the sections are for what is unusual or goes wrong.

1. A folder with `rows.jsonl`, 200 lines or more of `{"prompt": "...", "answer": "..."}`, and an `environment.toml` with `scorer = "exact"` (or number, json, contains). A push holds some rows out, and half of those choose the checkpoint: rows that you make yourself should bring an exam of 400, whose rows have the key split with the value heldout (dev: 100 that choose; a folder of held-out rows alone is an exam). Scored by code: section `environments`; several turns, tools: `turns`.
2. `push_env(path="envs/arith")`. Where its audit pays junk, mend the score first.
3. `dry_run(env_id="arith", algorithm="sft", then=[{"algorithm": "grpo"}, {"algorithm": "evaluate"}])`. Leave `settings` out: the defaults are measured, and a run ends by itself when no exam improves.
4. `submit_train` with the same arguments and a target, `expect="90 %"`: one plan, its steps wait for each other.
5. `wait_run(run_id="arith-plan-1", until="news", timeout_s=600)`, again with the `cursor` of the answer until it has ended.
6. `compare_runs` as `next` names it. Report its number with the interval and what was lost, never the training reward.

SFT first where the model solves nothing; alone where it reaches the target. GRPO needs groups whose answers differ: of eight answers a third of the groups do at 5 % success, nearly all at 50 %, hardly any near 0 or 100 %. Short of the target do what `next` says, one change a run. `keep` holds old skills; the verdict says which were lost.
"""  # noqa: E501 - one line a paragraph, as in the sections


@cache
def _sections_by_slug() -> dict[str, tuple[str, Path]]:
    """Return slug -> (title, path of the file) of every section, in the order of the numbers at the
    beginning of the file names, which are NN-slug.md. The title is the first line of the file."""
    sections_by_slug: dict[str, tuple[str, Path]] = {}
    for path in sorted(_FOLDER.glob("*.md")):
        _number, slug = path.stem.split("-", 1)
        with path.open(encoding="utf-8") as lines:
            title = lines.readline().removeprefix("# ").strip()
        sections_by_slug[slug] = (title, path)
    return sections_by_slug


def sections() -> list[tuple[str, str]]:
    """Return every section of the playbook as (slug, title), in reading order. A slug is the short
    name of a section, such as "rewards"."""
    return [(slug, title) for slug, (title, _path) in _sections_by_slug().items()]


def read(slug: str = "") -> str:
    """Return one section of the playbook as Markdown, or its table of contents for the empty slug.

    Args:
        slug: a slug from `sections()`, or a title; upper and lower case do not matter.

    Raises:
        UserError: SECTION_NOT_FOUND if there is no such section; it suggests a similar one.
    """
    name = slug.strip().lower()
    if not name:
        return _contents()
    for known_slug, (title, path) in _sections_by_slug().items():
        if name in (known_slug, title.lower()):
            return path.read_text(encoding="utf-8")
    slugs = list(_sections_by_slug())
    # At most one slug, if its similarity (0 to 1) is 0.5 or more.
    similar_slugs = difflib.get_close_matches(name.replace(" ", "-"), slugs, n=1, cutoff=0.5)
    hint = Hint("To list them:", Call("read_playbook"))
    if similar_slugs:
        hint = Hint("", Call("read_playbook", {"section": similar_slugs[0]}))
    raise UserError(
        "SECTION_NOT_FOUND",
        f"the playbook has no section {slug!r}; it has {', '.join(slugs)}",
        hint=hint,
        field="section",
    )


def _contents() -> str:
    """Return the table of contents as Markdown: the core (a guide that is enough for most jobs),
    then a line for each section, then where to read about models and settings."""
    one_section = 'Read one with `read_playbook(section="...")`.'
    lines = ["# TRAINING.md", "", _CORE, "## Sections", "", one_section, ""]
    lines += [f"- `{slug}`: {title}" for slug, title in sections()]
    lines += [
        "",
        "What a base model can do, and in which words: "
        '`read_playbook(section="run://pebble/card")`; every setting: '
        '`read_playbook(section="train://settings")`, what each does `train://settings/grpo`.',
    ]
    return "\n".join(lines) + "\n"
