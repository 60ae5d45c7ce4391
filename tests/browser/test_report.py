"""The report in a real browser: two widths, light and dark.

With HONESMITH_SHOTS=FOLDER the pages that were looked at are left there as pictures.
"""

import json
import os
import random
from pathlib import Path

import pytest

from engine.core.files import write_json
from engine.evidence.report.html_report import write_report
from engine.evidence.verdict.provenance import seal

pytestmark = [pytest.mark.browser, pytest.mark.timeout(60)]

WIDTHS = (1280, 390)
WAYS = [(width, dark) for width in WIDTHS for dark in (False, True)]
SKILLS = {"reverse": (1.0, 0.2), "copy": (1.0, 1.0), "count": (0.8, 0.8), "upper": (1.0, 0.9)}
EVIL = "</pre><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
# The widest thing that is not inside a box that scrolls by itself, and the page.
OVERFLOW = """(() => {
  const wide = [...document.querySelectorAll('main *')].filter(node =>
    !node.closest('.scroll') && !node.closest('.words') && node.offsetParent !== null
    && node.getBoundingClientRect().right > innerWidth + 1);
  return [document.documentElement.scrollWidth, innerWidth,
          wide.slice(0, 3).map(node => node.outerHTML.slice(0, 120))];
})()"""
# Text whose colour is too close to what lies behind it, by the ratio of WCAG 2.
FAINT = """(() => {
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const [r, g, b, a = 1] = parts(getComputedStyle(at).backgroundColor);
      if (a > .9) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll('main *')) {
    const own = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || node.closest('svg') || node.offsetParent === null) continue;
    const ink = light(parts(getComputedStyle(node).color)), paper = light(behind(node));
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (ratio < 4.5) found.push([ratio.toFixed(2), node.textContent.trim().slice(0, 40)]);
  }
  return found;
})()"""
# Words of a drawing that reach beyond it and are cut.
CUT = """[...document.querySelectorAll('svg text')].filter(node => {
  const word = node.getBoundingClientRect(), box = node.closest('svg').getBoundingClientRect();
  return box.width && (word.right > box.right + 1 || word.left < box.left - 1);
}).map(node => node.textContent)"""
SMALL = """[...document.querySelectorAll('svg text')].filter(node =>
  node.closest('figure').offsetParent !== null && node.getBoundingClientRect().height < 11
).map(node => node.textContent)"""


@pytest.fixture
def full_run(learned_run, home, rows):
    """A run with everything a report can show."""
    rng = random.Random(2)
    for when, at in (("before", 0), ("after", 1)):
        lines = [
            rows.eval(f"{skill}-{i}", i < 10 * levels[at], battery="pebble skills", family=skill)
            for skill, levels in SKILLS.items()
            for i in range(10)
        ]
        learned_run.run.kept(when).write_text("".join(json.dumps(line) + "\n" for line in lines))
    probes = ("gold", "empty", "junk", "prompt echo", "enumerated", "negated gold", "off by one")
    table = [
        {
            "probe": name,
            "what": f"what {name} means, in a sentence of the usual length",
            "mean": 1.0 if name == "gold" else round(rng.random() / 3, 3),
            "rows": 2400,
            "success": 0.0,
            "paid": 0.0,
            "errors": 0,
            "verdict": {"gold": "info", "off by one": "warn"}.get(name, "ok"),
        }
        | ({"separated": 0.87} if name == "off by one" else {})
        for name in probes
    ]
    audit = {
        "verdict": "warn",
        "headline": "warn: gold earns 1.00, but look at: off by one 0.31 (2400 of 2400 scored)",
        "problems": ["3 of 2400 reference answers fail: sum-12-34, sum-55-11, sum-80-19"],
        "probes": table,
        "share": 1.0,
        "rows": 2400,
        "rows_scored": 2400,
        "deterministic": True,
        "order_dependent": False,
        "saturation": {"top": 1.0, "levels": 3, "gold_at_top": 1.0, "others_at_top": 0.01},
        "score_seconds_p95": 0.0012,
    }
    write_json(home.env("arith", "0123456789ab") / "audit.json", audit)
    pair = {
        "kind": "exact",
        "part": "prompt",
        "heldout": "sum-12-34-a-long-name-of-a-task",
        "train": "row-1187-also-with-a-long-name",
    }
    source = {
        "env_id": "arith@0123456789ab",
        "verdict": "leak",
        "train": 2400,
        "heldout": 240,
        "exact": 3,
        "normalised": 1,
        "ngram": 0,
        "examples": [pair],
    }
    shared = {
        "verdict": "leak",
        "headline": "4 of 240 held-out tasks overlap with training rows (3 exact, 1 normalised), "
        "such as 'sum-12-34-a-long-name-of-a-task' with 'row-1187-also-with-a-long-name'",
        "leaked": ["sum-12-34", "sum-1-2", "sum-3-4", "sum-5-6"],
        "sources": [source, source | {"run_id": "arith-sft-1", "exact": 0, "examples": []}],
    }
    write_json(learned_run.run.contamination, shared)
    seal(learned_run.run)
    return learned_run


def shot(browser, name: str) -> None:
    folder = os.environ.get("HONESMITH_SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(browser.screenshot(whole=True))


@pytest.mark.parametrize("share", [0.0, 0.55, 1.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_word_of_a_drawing_is_cut_whatever_came_out(browser, home, make_run, rows, width, share):
    """Nothing to everything, half and half, everything to nothing."""
    run = make_run(estimate={"gpu_hours": {"low": 0.001, "likely": 0.5, "high": 90.0}})
    for step, level in ((0, 1.0 - share), (9, share)):
        run.evals(step, rows.halved(lambda i, v=level: i < 200 * v, 200))
    run.checkpoint(9, best=True).finish(verdict="better")
    browser.open(write_report(home, run.id), width)
    assert browser.ask_page(CUT) == []


@pytest.mark.parametrize(("width", "dark"), WAYS)
def test_the_report_reads_well(browser, home, full_run, width, dark):
    browser.open(write_report(home, full_run.id), width, dark=dark)
    shot(browser, f"report-{width}-{'dark' if dark else 'light'}")
    page, window, wide = browser.ask_page(OVERFLOW)
    assert page <= window and wide == []
    assert browser.ask_page(FAINT) == []
    assert browser.ask_page(SMALL) == []
    assert browser.ask_page(CUT) == []
    verdict = browser.ask_page("document.querySelector('h1').getBoundingClientRect().bottom")
    assert 0 < verdict < 600, "the verdict is seen without scrolling"
    for kind in ("wide", "narrow"):
        seen = browser.ask_page(
            f"[...document.querySelectorAll('figure.{kind}')].map(n => n.offsetParent !== null)"
        )
        assert seen and all(shown == ((kind == "wide") == (width > 720)) for shown in seen)


def test_light_and_dark_are_two_papers(browser, home, full_run):
    papers = []
    for dark in (False, True):
        browser.open(write_report(home, full_run.id), 1280, dark=dark)
        papers.append(browser.ask_page("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] != papers[1]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fetches_nothing_and_runs_nothing_of_a_model(browser, home, make_run, rows, width):
    run = make_run(note=EVIL, settings={EVIL: EVIL})
    prompt = [{"role": "user", "content": EVIL}]
    for step in (0, 9):
        run.evals(
            step,
            [
                rows.eval(f"{EVIL}{i}", step == 9, prompt=prompt, completion=EVIL, messages=[])
                for i in range(30)
            ],
        )
    run.finish("failed", reason_kind="internal", reason=EVIL * 9, hint="x" * 300)
    path = write_report(home, run.id)
    browser.open(path, width)
    assert browser.requests == [path.resolve().as_uri()]
    assert browser.complaints == []
    assert browser.ask_page("document.title").startswith(run.id)
    page, window, _ = browser.ask_page(OVERFLOW)
    assert page <= window
