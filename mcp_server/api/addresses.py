"""Texts that have an address, e.g. `run://pebble/card`. Clients read them as MCP resources; clients
that know only tools read them through the tool `read_playbook`."""
# ruff: noqa: PLC0415  engine modules are imported when first read: see mcp_server/api/verbs.py

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.reply import RESULT_CHARS
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.api import verbs
from mcp_server.api.replies import clean, compact, cut_to_size

_MAX_FILE_CHARS = 6_000  # of each file in the source of an environment


def is_address(section: str) -> bool:
    """Whether `section` is the address of a text, and not the name of a section of the playbook."""
    return "://" in section


def read(home: Home, address: str) -> str:
    """Return the text at an address, such as `run://arith-sft-1/report` or `train://settings`, as
    Markdown or JSON.

    Raises UserError SECTION_NOT_FOUND if no address has this form, RUN_STATE if the run has not
    written the file yet, and RUN_NOT_FOUND or ENV_NOT_FOUND if there is no such run or environment.
    """
    readers: Sequence[tuple[str, Callable[[str], str]]] = (
        (r"playbook://TRAINING\.md/?(.*)", verbs.read_playbook),
        (r"run://(.+)/metrics", lambda name: run_metrics(home, name)),
        (r"run://(.+)/config", lambda name: run_config(home, name)),
        (r"run://(.+)/card", lambda name: run_card(home, name)),
        (r"run://(.+)/report", lambda name: run_report(home, name)),
        (r"env://(.+)/source", lambda name: read_source(home, name)),
        (r"train://(hardware)", lambda _: hardware(home)),
        (r"train://(skills)", lambda _: skills()),
        (r"train://settings/?(.*)", settings),
    )
    for form, reader in readers:
        match = re.fullmatch(form, address.strip())
        if match:
            argument = match[1]  # what the address names, such as the id of a run
            return _read_if_written(lambda: reader(argument), address)  # noqa: B023  called at once
    raise UserError(
        "SECTION_NOT_FOUND",
        f"nothing has the address {address[:80]!r}",
        hint=Hint(
            "Addresses: run://RUN/card, run://RUN/report, run://RUN/config, run://MODEL/card, "
            "env://ENV/source, train://skills, train://settings, train://settings/grpo, as in",
            Call("read_playbook", {"section": "run://pebble/card"}),
        ),
        field="section",
    )


def _read_if_written(reader: Callable[[], str], address: str) -> str:
    """Call `reader` and return its text. Raises UserError RUN_STATE, which names `address`, if the
    run has not written the file that `reader` reads yet."""
    try:
        return reader()
    except FileNotFoundError as error:
        raise UserError(
            "RUN_STATE", f"{address} is not written yet", hint="Read it once the run has begun."
        ) from error


def run_metrics(home: Home, run_id: str) -> str:
    """Return the down-sampled curves of a run, and when it is likely to end, as JSON. Raises
    UserError RUN_NOT_FOUND if there is no such run."""
    full_id = _full_run_id(home, run_id)
    return _json_text(verbs.forecast(home, full_id) | verbs.read_logs(home, full_id, "metrics"))


def run_config(home: Home, run_id: str) -> str:
    """Return `config.json` of a run: every setting, as it was resolved when the run was submitted.

    Raises UserError RUN_NOT_FOUND if there is no such run, and FileNotFoundError if its file is
    missing.
    """
    return _json_text(read_json(home.run(_full_run_id(home, run_id)).config))


def run_card(home: Home, name: str) -> str:
    """Return the model card of a run, or of a base model that `get_status` lists, as Markdown.

    Raises UserError RUN_NOT_FOUND if `name` is neither.
    """
    from engine.evidence.cards import base_card
    from engine.evidence.report import html_report

    if name in base_card.base_models(home):
        return base_card.base_card(home, name)
    run_id, _, _ = name.partition("@")  # a checkpoint, RUN@best, has the card of its run
    return html_report.model_card(home, _full_run_id(home, run_id))


def run_report(home: Home, run_id: str) -> str:
    """Return verdict and evidence of a run as Markdown. Raises UserError RUN_NOT_FOUND if there is
    no such run."""
    from engine.evidence.report import html_report

    return html_report.report_markdown(home, _full_run_id(home, run_id))


def hardware(home: Home) -> str:
    """Return the devices of this machine and their free memory as JSON."""
    return _json_text(verbs.get_status(home, scope="hardware"))


def skills() -> str:
    """Return the questions that every run asks its model before and after training, as Markdown."""
    from engine.skills.card import skills_card  # the questions are drawn when it loads

    return skills_card()


def settings(kind: str = "") -> str:
    """Return, as Markdown, what each setting of the algorithm `kind` does, or of "evaluate". For ""
    return the names of all settings and the addresses of these pages.

    Raises UserError SECTION_NOT_FOUND if `kind` is none of these.
    """
    from engine.settings import resolution  # the schema of the settings is slow to load

    return resolution.settings_page(kind) if kind else resolution.settings_index()


def read_source(home: Home, env_id: str) -> str:
    """Return the files of an environment version as one Markdown text, environment.py first.

    The text has at most `RESULT_CHARS` characters. A long file is cut at `_MAX_FILE_CHARS`. A file
    that is not text, or does not fit any more, is listed with its name and size only. If not even
    that fits, the text says that more files are left out.

    Raises:
        UserError: ENV_NOT_FOUND if no version has this id, ENV_AMBIGUOUS if several have it.
    """
    from engine.environments import registry

    record = registry.find_env(home, env_id)
    source = Path(record.dir) / "source"
    files = sorted(path for path in source.rglob("*") if path.is_file())
    files.sort(key=lambda path: path.name != "environment.py")  # False sorts first
    heading = f"# {record.env_id}\n\n{counted(len(files), 'file')}\n"
    # 400 characters are space enough for the heading and the last note.
    return "\n".join([heading, *_file_sections(files, source, RESULT_CHARS - 400)])


def _file_sections(files: Sequence[Path], source: Path, max_chars: int) -> list[str]:
    """Return one Markdown section for each of these files, and a note if some are left out.

    `source` is the folder that holds the files. The sections take at most `max_chars` with the line
    breaks between them; the note comes on top.
    """
    sections = []
    chars_left = max_chars
    for path in files:
        name = path.relative_to(source).as_posix()
        section = _file_section(name, path)
        if len(section) > chars_left:  # the text does not fit: give name and size only
            section = f"## {name}\n\n{path.stat().st_size} bytes\n"
        if len(section) > chars_left:  # not even name and size fit
            sections.append("More files are left out.\n")
            break
        sections.append(section)
        chars_left -= len(section) + 1  # 1: the line break that joins the sections
    return sections


def _file_section(name: str, path: Path) -> str:
    """Return the file at `path` as a Markdown section with the heading `name`.

    The section holds the text of the file, cut to `_MAX_FILE_CHARS`. If the file is not text, the
    section holds only its size.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_CHARS + 1)  # one more, to see whether the file is longer
    except UnicodeDecodeError:
        return f"## {name}\n\n{path.stat().st_size} bytes, not text\n"
    if len(text) > _MAX_FILE_CHARS:
        text = text[:_MAX_FILE_CHARS] + f"\n... ({path.stat().st_size} bytes in all)\n"
    fence = _fence_around(text)
    return f"## {name}\n\n{fence}\n{text.rstrip()}\n{fence}\n"


def _fence_around(text: str) -> str:
    """Return a Markdown fence, e.g. "```", that is longer than any fence in `text`. A fence of the
    same length in `text` would end the code block too early."""
    # Only backticks that stand alone on a line can close a fence, so words of backticks suffice.
    backtick_rows = [word for word in text.split() if set(word) == {"`"}]
    return "`" * (3 + max(map(len, backtick_rows), default=0))


def _full_run_id(home: Home, run_id: str) -> str:
    """Return the full id of the run that `run_id` (an id or a unique prefix) names.

    Text from a client must pass here before it becomes part of a path: it could hold `../`.

    Raises:
        UserError: RUN_NOT_FOUND if no run, or more than one, has this id.
    """
    with Store(home) as store:
        return store.get_run(run_id).run_id


def _json_text(data: Any) -> str:
    """Return `data` as one line of JSON, cleaned and cut to the size of a result."""
    return compact(cut_to_size(clean(data)))
