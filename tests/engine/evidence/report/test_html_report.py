"""The report: one file, every state of a run, nothing fetched, nothing of a model's markup."""

import errno
import json
import os
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.evidence.report import charts, html_report
from engine.evidence.report.html_report import model_card, report_markdown, write_report
from tests.helpers.env_versions import write_version

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Page(HTMLParser):
    """A page taken apart: tags, text, and every tag closed in order."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self, html):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(home, run):
    path = write_report(home, run.id)
    assert path == run.run.report
    html = path.read_text("utf-8")
    page = Page(html)
    assert page.open == []
    return page, html


# What gets out of text, attributes, comments, styles and drawings of a page that does not escape.
CORPUS = (
    EVIL,
    "<svg/onload=alert(1)><animate onbegin=alert(1)>",
    "</title></style></textarea></svg><iframe srcdoc='<script>alert(1)</script>'>",
    '"><a href="javascript:alert(1)">x</a><base href=//evil>',
    "' onmouseover='alert(1)' style='background:url(//evil)' x='",
    "--><!--><ScRiPt>alert(1)</sCrIpT><![CDATA[<b>]]>",
    "<meta http-equiv=refresh content='0;url=//evil'><form><input autofocus onfocus=1>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
    "{{ 7*7 }}{% for x in ().__class__.__mro__ %}<b>{{ x }}</b>{% endfor %}${7*7}",
    "<math><mtext></table><mglyph><style><!--</style><img title='--&gt;&lt;img onerror=1&gt;'>",
    "\x00<\x00script>alert(1)</script>\u2028<\u200bscript>",
)


READ = ("style", "href", "xlink:href", "src", "srcdoc", "action", "content", "class", "id")


@pytest.fixture
def evil_run(make_run, rows, home):
    return run_that_says(EVIL, make_run, rows, home)


def run_that_says(evil, make_run, rows, home):
    """A failed run with this text wherever models, environments and users write any."""
    run = make_run(
        note=evil,
        settings={"learning_rate": 0.1, "stop": [evil[:64]]},
        sources={"learning_rate": evil},
    )
    prompt = [{"role": "user", "content": evil}]
    for step in (0, 9):
        run.evals(
            step,
            [
                rows.eval(
                    f"{evil}{i}",
                    step == 9,
                    prompt=prompt,
                    completion=evil + "\x1b[31m",
                    messages=[],
                )
                for i in range(30)
            ],
        )
    run.metrics({"step": i, evil: i / 10, "loss": 1.0} for i in range(20))
    run.events({"event": "alert", "message": evil})
    probe = {
        "probe": evil,
        "what": evil,
        "rows": 2,
        "mean": 0.5,
        "success": 0.5,
        "paid": 0.5,
        "errors": 0,
        "verdict": "risk",
    }
    audit = {
        "verdict": "risk",
        "headline": f"risk: {evil}",
        "problems": [evil],
        "probes": [probe],
    }
    folder = home.env("arith", "0123456789ab")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "audit.json", audit, fsync=False)
    return run.finish("failed", reason_kind="internal", reason=evil, hint=evil)


def test_the_report_of_a_run_that_learned_says_it_first_and_shows_why(home, learned_run):
    page, _ = page_of(home, learned_run)
    text = page.text
    assert text.index("Better") < text.index("Held-out success went from") < text.index("Settings")
    for word in (
        "Task by task",
        "Over the run",
        "Side by side",
        "reward_mean",
        "learning_rate",
        "Where it comes from",
        "Does GRPO alone teach",
        "best: step 40",
        "What the groups had to teach",
        "recipe",
    ):
        assert word in text, word
    assert "Expected beforehand: better; and so it came." in text
    assert "Alert: entropy fell below 30 %" in text
    assert len([tag for tag, _ in page.tags if tag == "svg"]) >= 12


@pytest.mark.parametrize(
    ("fault", "code"), [(errno.EROFS, "HOME_UNUSABLE"), (errno.ENOSPC, "DISK_FULL")]
)
def test_a_report_that_cannot_be_written_says_so(home, learned_run, monkeypatch, fault, code):
    def refuse(path, *_args, **_options) -> None:
        raise OSError(fault, os.strerror(fault), str(path))

    monkeypatch.setattr(html_report, "write_text", refuse)
    with pytest.raises(UserError) as caught:
        write_report(home, learned_run.id)
    assert caught.value.code == code and caught.value.hint


def test_the_page_fetches_runs_and_refers_to_nothing(home, learned_run):
    page, html = page_of(home, learned_run)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "form", "a"}
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not [name for name in attributes if name.startswith("on")]
    assert not attributes & {"src", "href", "srcset", "action"}
    assert (
        "url(" not in html
        and "@import" not in html
        and "http" not in html.replace("http-equiv", "")
    )
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html


def test_what_models_and_environments_say_stays_text(home, evil_run):
    page, html = page_of(home, evil_run)
    assert "<script" not in html and "<img" not in html and "\x1b" not in html
    assert "alert(1)" in page.text  # shown, as words
    assert "Failed" in page.text


@pytest.mark.parametrize("part", range(3))
def test_a31_hostile_html_of_a_run_adds_no_tag_and_no_attribute(home, make_run, rows, part):
    """Held against the page of the same run with harmless words in each of these places."""
    evil = " ".join(CORPUS[part::3])
    harmless = ("harmless " * len(evil))[: len(evil)]
    shapes = []
    for text in (harmless, evil):
        page, html = page_of(home, run_that_says(text, make_run, rows, home))
        shapes.append({(tag, *sorted(attrs)) for tag, attrs in page.tags})
        assert "default-src 'none'; style-src 'unsafe-inline'" in html
        # A label may hold any text; what a browser reads as more than text holds none of it.
        read = {value for _, attrs in page.tags for name, value in attrs.items() if name in READ}
        assert not [value for value in read if "alert" in value or "evil" in value]
    assert shapes[0] == shapes[1]


def test_markdown_and_card_of_hostile_text_hold_no_markup_of_its_own(home, evil_run):
    for text in (report_markdown(home, evil_run.id), model_card(home, evil_run.id)):
        outside = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", text)
        assert not re.search(r"(?<!\\)<", outside) and "\x1b" not in text


def test_a_fence_is_longer_than_any_in_the_text(home, make_run, rows):
    run = make_run()
    run.evals(0, rows.halved(lambda i: False, 40))
    run.evals(5, rows.halved(lambda i: True, 40, completion="```\n# fake heading\n````"))
    text = report_markdown(home, run.finish().id)
    assert "`````\nprompt:" in text


def test_held_out_tasks_in_the_training_rows_are_named_in_the_page(home, learned_run):
    page, _ = page_of(home, learned_run)
    assert "in the training rows?" not in page.text, "a run that did not ask says nothing"
    pair = {"kind": "exact", "part": "prompt", "heldout": f"t7{EVIL}", "train": "row-12"}
    source = {
        "env_id": "arith@0123456789ab",
        "verdict": "leak",
        "train": 240,
        "heldout": 120,
        "exact": 3,
        "normalised": 1,
        "ngram": 2,
        "examples": [pair],
    }
    shared = {
        "verdict": "leak",
        "headline": "6 of 120 held-out tasks overlap with training rows",
        "leaked": ["t1", "t2", "t7", "t9"],
        "sources": [source],
    }
    write_json(learned_run.run.contamination, shared, fsync=False)
    page, html = page_of(home, learned_run)
    assert "Were the held-out tasks in the training rows?" in page.text
    assert "leak 6 of 120 held-out tasks overlap with training rows." in page.text
    assert "4 tasks are left out of the verdict" in page.text
    assert "arith@0123456789ab this run 240 120 3 1 2" in page.text
    assert "in row row-12 (exact, prompt)" in page.text and "<script" not in html


def test_a_clean_run_says_that_its_rows_were_looked_at(home, learned_run):
    source = {"env_id": "arith@0123456789ab", "run_id": "arith-sft-1", "train": 1, "heldout": 1}
    headline = "none of 1 held-out tasks overlaps with the 1 training rows"
    shared = {"verdict": "clean", "headline": headline, "leaked": [], "sources": [source]}
    write_json(learned_run.run.contamination, shared, fsync=False)
    text = page_of(home, learned_run)[0].text
    assert "clean None of 1 held-out tasks overlaps" in text and "left out" not in text
    assert "arith-sft-1 1 1 0 0 0" in text


@pytest.mark.parametrize("state", ["preparing", "running", "failed", "cancelled"])
def test_a_run_in_any_state_has_a_report(home, make_run, state):
    estimate = {"gpu_hours": {"low": 1, "likely": 2, "high": 4}}
    run = make_run(settings={"steps": 5}, estimate=estimate)
    if state in ("failed", "cancelled"):
        run.checkpoint(3)
        run.finish(state, reason_kind="oom", reason="Memory ran out.", hint="Lower max_length.")
    elif state == "running":
        run.running()
    page, _ = page_of(home, run)
    assert state.capitalize() in page.text and "likely 2.0 h" in page.text
    if state in ("failed", "cancelled"):
        assert "oom : Memory ran out." in page.text and "step_000003" in page.text
        assert "Lower max_length." in page.text
    else:
        assert "No verdict yet" in page.text
    text = report_markdown(home, run.id)
    assert len(text) < 10_000
    if state in ("failed", "cancelled"):
        assert "- oom: Memory ran out." in text
        assert "- Lower max_length. Last complete checkpoint: step_000003." in text
    assert model_card(home, run.id).startswith("---\nbase_model")


def test_a_run_folder_with_nothing_in_it_still_reports(home, make_run):
    run = make_run()
    for path in run.run.path.rglob("*"):
        if path.is_file():
            path.unlink()
    page, _ = page_of(home, run)
    assert "Preparing" in page.text
    assert run.id in report_markdown(home, run.id) and run.id in model_card(home, run.id)


def test_an_evaluation_reports_its_models_side_by_side(home, make_run, rows):
    refs = ("pebble", "arith-sft-1", "arith-grpo-2@best")
    run = make_run("evaluate", kind="evaluate", models=[{"ref": ref} for ref in refs])
    for index, share in enumerate((20, 50, 90)):
        run.model_evals(index, [rows.eval(f"t{i}", i < share) for i in range(100)])
    page, _ = page_of(home, run.finish())
    assert "Models, on the same tasks" in page.text and "90.0 %" in page.text
    assert "arith-grpo-2@best against pebble: success went from 20.0 % to 90.0 %" in page.text
    text = report_markdown(home, run.id)
    assert "| arith-grpo-2@best | 90.0 % |" in text


def test_a_loss_is_reported_without_invented_answers(home, make_run):
    run = make_run("sft")
    for step, loss in ((0, 2.0), (10, 1.0)):
        run.evals(
            step,
            [
                {"task": f"t{i}", "half": "report" if i % 2 else "select", "loss": loss + i / 100}
                for i in range(60)
            ],
        )
    page, _ = page_of(home, run.finish(verdict="better"))
    assert "Held-out loss" in page.text and "Side by side" not in page.text
    assert "← better" in page.text  # less is better, and the axis says so


def test_the_markdown_stays_under_its_limit_whatever_the_run_holds(home, make_run, rows):
    settings = {"stop": [f"{i}{'x' * 60}" for i in range(8)]}
    run = make_run(settings=settings, note="n" * 5000)
    run.metrics(
        {"step": s} | {f"{'a_long_name_' * 40}{i}": s * i for i in range(60)} for s in range(30)
    )
    for step in (0, 5):
        run.evals(step, rows.halved(lambda i, s=step: s == 5, 60, completion="y" * 5000))
    run.finish("failed", reason="r" * 5000, hint="h" * 5000, reason_kind="oom")
    for make in (report_markdown, model_card):
        text = make(home, run.id)
        assert len(text) < 10_000
        assert text.count("```") % 2 == 0
    assert "Left out for length" in report_markdown(home, run.id)


def test_the_markdown_begins_with_the_verdict_and_holds_the_numbers(home, learned_run):
    text = report_markdown(home, learned_run.id)
    assert text.startswith(f"# {learned_run.id}: Better")
    assert re.search(r"Change \+\d+\.\d points, 95 % interval \+\d+\.\d to \+\d+\.\d\.", text)
    assert "| heldout_success | 0.35 | 0.62 | 0.35 | 0.68 |" in text
    assert "▁" in text and "learning_rate" in text and "McNemar" in text


def test_page_and_markdown_say_the_same_of_a_run(home, learned_run):
    page, _ = page_of(home, learned_run)
    text = report_markdown(home, learned_run.id)
    for words in (
        "Expected beforehand: better; and so it came.",
        "Alert: entropy fell below 30 % of its start",
        "reported on the half that chose nothing",
        "found 4 times in 5",
        "device time used",
        "base model",
    ):
        assert words in page.text and words in text, words
    for name in ("gained", "right both times", "wrong both times"):
        count = re.search(rf"(\d+) {name}", text)
        assert count and count[0] in page.text


def test_the_card_names_base_data_evidence_and_limits(home, learned_run):
    text = model_card(home, learned_run.id)
    front = text.split("---")[1]
    assert 'base_model: "pebble"' in front and "library_name: peft" in front
    for word in (
        "## Verdict",
        "## Training",
        "## Use",
        "## Lineage",
        "## What is not known",
        "120 held-out tasks",
        "arith@0123456789ab",
        "beef" * 16,
        "seed: 17",
    ):
        assert word in text, word


def test_the_lineage_leads_from_the_base_through_every_run(home, make_run, learned_run):
    sft = make_run("sft").finish(verdict="better")
    config = json.loads(learned_run.run.config.read_text())
    write_json(learned_run.run.config, config | {"model": f"{sft.id}@best"}, fsync=False)
    text = report_markdown(home, learned_run.id)
    order = [text.index(name) for name in ("1. pebble", f"2. {sft.id}", f"3. {learned_run.id}")]
    assert order == sorted(order)
    page, _ = page_of(home, learned_run)
    assert "continued from best" in page.text


def test_a_run_that_claims_to_start_from_itself_ends_the_lineage(home, make_run):
    run = make_run()
    config = json.loads(run.run.config.read_text())
    write_json(run.run.config, config | {"model": run.id}, fsync=False)
    assert report_markdown(home, run.id).count(f". {run.id}") == 2


def test_secrets_stay_out_of_every_report(home, make_run, rows, monkeypatch):
    monkeypatch.setenv("ARITH_KEY", "s3cret-value-77")
    folder = home.env("arith", "0123456789ab")
    folder.mkdir(parents=True)
    write_version(folder / "env.json", secrets=("ARITH_KEY",))
    run = make_run(note="key s3cret-value-77", settings={"stop": ["s3cret-value-77"]})
    for step in (0, 5):
        run.evals(step, rows.halved(lambda i, s=step: s == 5, 40, completion="s3cret-value-77"))
    run.finish("failed", reason_kind="reward", reason="refused s3cret-value-77", hint="h")
    _, html = page_of(home, run)
    for text in (html, report_markdown(home, run.id), model_card(home, run.id)):
        assert "s3cret" not in text and "[secret ARITH" in text.replace("\\", "")


def test_an_unknown_run_is_refused(home):
    for make in (write_report, report_markdown, model_card):
        with pytest.raises(UserError) as caught:
            make(home, "nobody")
        assert caught.value.code == "RUN_NOT_FOUND"


# --- charts -----------------------------------------------------------------------------------

VALUES = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 10_000), VALUES), min_size=1, max_size=60), st.booleans())
def test_any_curve_is_drawn_inside_its_frame(points, share):
    points = sorted(dict(points).items())
    svg = str(charts.line_chart(charts.Curve(points, is_share=share), 360, 200, "a curve"))
    for spot in re.findall(r'points="([^"]+)"', svg):
        for pair in spot.split():
            x, y = map(float, pair.split(","))
            assert -1 <= x <= 361 and -1 <= y <= 201
    assert Page(svg).open == []


@given(VALUES, st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e6))
def test_any_effect_is_drawn_inside_its_strip(value, below, above, margin):
    effect = charts.Effect(value - below, value, value + above, margin, False, False)
    svg = str(charts.effect_strip(effect, 340, "effect"))
    for x in re.findall(r'(?:cx|x1|x2)="([^"]+)"', svg):
        assert -1 <= float(x) <= 341


@pytest.mark.parametrize(
    ("value", "share", "text"),
    [
        (0.5, True, "50 %"),
        (0.034, True, "3.4 %"),
        (0.0, True, "0 %"),
        (0.0001, True, "0 %"),
        (0.0995, True, "10 %"),
        (1.0, True, "100 %"),
        (12345.0, False, "12.3k"),
        (4200.0, False, "4,200"),
        (0.000017, False, "1.7e−5"),
        (-0.25, False, "−0.25"),
        (0.0, False, "0"),
        (3e7, False, "3e7"),
    ],
)
def test_numbers_are_short_on_an_axis(value, share, text):
    assert charts.axis_text(value, share) == text


@given(VALUES, VALUES)
def test_ticks_are_round_and_span_the_values(a, b):
    low, high = min(a, b), max(a, b)
    ticks = charts.nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert 2 <= len(ticks) <= 9 and ticks[0] <= low + slack and ticks[-1] >= high - slack
