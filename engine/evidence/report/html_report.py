"""The report of a run: one HTML file that opens anywhere, the same report as Markdown, and a model
card.

The page has no script and no font and loads nothing; its content policy forbids all of that. Texts
of models and environments are cleaned, and the template engine escapes them.
"""

import time
from pathlib import Path

import jinja2

from engine.core.files import write_text
from engine.evidence.report import origins, outcome, progress
from engine.evidence.report.dossier import Dossier, gather
from engine.evidence.report.markdown import card_of, markdown_of
from engine.evidence.report.other_words import other_words, prompts
from engine.home.database import reports_unwritable_disk
from engine.home.run_dir import Home

_TEMPLATE = "report.html.j2"
_SECTIONS = (
    *(
        outcome.models,
        prompts,
        other_words,
        outcome.tasks,
        outcome.skills,
        progress.curves,
        outcome.answers,
    ),
    *(origins.audit, origins.contamination, origins.cost, origins.settings),
    *(origins.lineage, origins.provenance, origins.hashes),
)


@reports_unwritable_disk
def write_report(home: Home, run_id: str) -> Path:
    """Write `report.html` into the run's folder and return its path.

    Works in any state of the run; parts that do not exist yet are left out. Raises UserError
    RUN_NOT_FOUND if there is no such run, ENV_SEALED if its tasks must not be shown, and DISK_FULL
    or HOME_UNUSABLE if the file cannot be written.
    """
    dossier = gather(home, run_id)
    write_text(dossier.run.report, html_of(dossier), fsync=False)
    return dossier.run.report


def report_markdown(home: Home, run_id: str) -> str:
    """The report as Markdown under 10,000 characters.

    Raises UserError RUN_NOT_FOUND if there is no such run, and ENV_SEALED if its tasks must not be
    shown.
    """
    return markdown_of(gather(home, run_id))


def model_card(home: Home, run_id: str) -> str:
    """The run's model card as Markdown under 10,000 characters.

    Raises UserError RUN_NOT_FOUND if there is no such run, and ENV_SEALED if its tasks must not be
    shown.
    """
    return card_of(gather(home, run_id))


def html_of(dossier: Dossier) -> str:
    """The report as one HTML document. Sections that have nothing to show are left out."""
    sections = [build_section(dossier) for build_section in _SECTIONS]
    # The word of the headline is left to `outcome.verdict`, which the template shows in full.
    _word, colour = outcome.headline(dossier)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE).render(
        run_id=dossier.row.run_id,
        mood=colour,  # the CSS class of the page's head is "mood-" and this
        chips=dossier.labels,
        verdict=outcome.verdict(dossier),
        sections=[section for section in sections if section is not None],
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(dossier.gathered_at)),
    )
