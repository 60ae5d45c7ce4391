"""The report's sections on what a run is based on: its reward, its rows, its settings, its
history."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.format import counted, percent, size
from engine.evidence.overlap.overlap import KINDS
from engine.evidence.overlap.twins import TWIN_KINDS
from engine.evidence.report import blocks, charts
from engine.evidence.report.blocks import Block, Cell, Code, Line, Note, Section, Tag
from engine.evidence.report.dossier import Dossier, Station
from engine.evidence.report.outcome import sentence_case
from engine.evidence.report.values import duration, value_text
from engine.evidence.verdict.contamination import Contamination, SharedPair, SharedRows
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.provenance import SealedLink
from engine.home.rows import TERMINAL
from engine.records.audit import Audit, ProbeLine
from engine.records.estimate import Estimate
from engine.records.run_config import TrainConfig
from envs.audit.rescore import differing_count

_SOURCES, _MATCHES = 6, 5  # most versions trained on, and most examples of shared rows, shown
_PROBLEMS = 6  # most problems of an audit that are shown
_LINK_HASH = 12  # digits of a link's hash that are shown; `honesmith verify` checks all of them
_HASH = 64  # digits of a sha256; longer values are cut


def audit(dossier: Dossier) -> Section | None:
    """The section on the reward audit: what the environment pays for answers that solve nothing.

    Returns None if the environment was not audited.
    """
    audit_result = dossier.audit
    if audit_result is None:
        return None
    conclusion = _audit_conclusion(audit_result, dossier.reward_risk_accepted)
    # In Markdown only: the page shows the conclusion in the lead of the section (below).
    section_blocks: list[Block] = [blocks.Paragraph(conclusion, shown_in="markdown")]
    if audit_result.problems:
        problems = [Note(text) for text in audit_result.problems[:_PROBLEMS]]
        section_blocks.append(blocks.Notes(problems))
    if audit_result.probes:
        section_blocks.append(_probes_table(audit_result.probes))
    facts = audit_facts(dossier, audit_result)
    if facts:
        section_blocks.append(blocks.Facts(facts))
    lead = ("What the environment pays for answers that are none. ", *conclusion)
    return Section(
        title="Can the reward be trusted?", short="Reward audit", blocks=section_blocks, lead=lead
    )


def _audit_conclusion(audit_result: Audit, risk_accepted: bool) -> tuple[Tag, str]:
    """The verdict of the audit as a tag, and its headline as text; together they make one line.

    `risk_accepted` says that the run was trained although the audit failed.
    """
    # The headline reads "verdict: text"; the verdict is shown as a tag.
    _, _, headline = audit_result.headline.partition(": ")
    text = f" {sentence_case(headline)}"
    if risk_accepted:
        text += " The failed audit was accepted when the run was submitted."
    return Tag(audit_result.verdict), text


def _probes_table(probes: Sequence[ProbeLine]) -> blocks.Table:
    """The table of the kinds of wrong answers (probes) that the audit tried, with what each
    earns."""
    heads = ("answer", "mean reward", "", "paid on", "gold above on", "")
    styles = ("", "num", "rest", "num", "num rest", "")
    return blocks.Table(heads, [_probe_row(probe) for probe in probes], styles)


def _probe_row(probe: ProbeLine) -> tuple[str | Tag | Cell, ...]:
    """The table row of one kind of wrong answer (probe).

    Its cells: the kind, the mean reward as a number and as a bar, the share of rows that pay for
    it, the share of rows whose reference answer earns more ("" if not measured), and the verdict.
    """
    reference_above = percent(probe.separated, digits=0) if probe.separated is not None else ""
    return (
        Cell(probe.probe, note=probe.what),
        value_text(probe.mean),
        Cell(share=probe.mean, mood=probe.verdict),
        percent(probe.paid, digits=0),
        reference_above,
        Tag(probe.verdict),
    )


def audit_facts(dossier: Dossier, audit_result: Audit) -> list[tuple[str, str]]:
    """Facts of the audit that the table of probes does not show, as (name, value).

    The last one is not from the audit: it is the result of scoring the run's answers to the
    held-out tasks (the exam) again. Checks that an older audit did not make are left out.
    """
    facts = [
        ("scored", _scored_text(audit_result)),
        ("repeated", _repeat_text(audit_result)),
        ("in a new process", _rescoring_text(audit_result.fresh_process.model_dump())),
        ("at the top reward", _top_reward_text(audit_result)),
        ("time of a score", _score_time_text(audit_result.score_seconds_p95)),
        ("answers of the exam in a new process", _rescoring_text(rescored(dossier.run))),
    ]
    return [(name, text) for name, text in facts if text]


def _scored_text(audit_result: Audit) -> str:
    """How many rows the audit scored; "" if an older audit did not record that."""
    # Only fields that the audit wrote are in `model_fields_set`; others have a default.
    if "share" not in audit_result.model_fields_set:
        return ""
    share = percent(audit_result.share, digits=0)
    return f"{audit_result.rows_scored} of {audit_result.rows} rows, {share}"


def _score_time_text(seconds: float | None) -> str:
    """The time below which 95 % of the scores stay; "" if none was measured."""
    return f"{1000 * seconds:.2g} ms (95 %)" if seconds else ""


def _top_reward_text(audit_result: Audit) -> str:
    """How many answers earn the highest reward, and how many different rewards there are.

    Returns "" if that was not measured.
    """
    saturation = audit_result.saturation
    if saturation.gold_at_top is None or saturation.others_at_top is None:
        return ""
    gold_text = f"{percent(saturation.gold_at_top, digits=0)} of the reference answers"
    others_text = f"{percent(saturation.others_at_top)} of the others"
    levels_text = f"{counted(saturation.levels, 'level')} in all"
    return f"{gold_text}, {others_text}; {levels_text}"


def _repeat_text(audit_result: Audit) -> str:
    """Whether answers got the same reward when the audit scored them again; "" if it did not do
    so."""
    if "order_dependent" not in audit_result.model_fields_set:
        return ""
    if audit_result.order_dependent:
        return "another reward once other answers had been scored"
    if not audit_result.deterministic:
        return "two rewards for one answer scored twice"
    return "the same reward when scored again, at once and after other answers"


def _rescoring_text(scores: Mapping[str, object]) -> str:
    """How many answers got a different reward when a fresh process scored them again, and whether
    their reward differs each time.

    `scores` is a stored rescoring. Returns "" if no answers were scored again.
    """
    if not scores.get("scored"):
        return ""
    text = f"{differing_count(scores)} of {scores['scored']} earn another reward"
    if scores.get("wavering"):  # how many got two different new rewards
        text += ", and another one each time"
    return text


def contamination(dossier: Dossier) -> Section | None:
    """The section on training rows that contain held-out tasks. Returns None if nothing was
    compared."""
    overlap = dossier.contamination
    if not overlap.headline:
        return None
    conclusion = (Tag(overlap.verdict), _contamination_text(overlap))
    # In Markdown only: the page shows the conclusion in the lead of the section (below).
    section_blocks: list[Block] = [blocks.Paragraph(conclusion, shown_in="markdown")]
    if overlap.sources:
        section_blocks.append(_sources_table(overlap.sources[:_SOURCES]))
    match_facts = _match_facts(overlap.sources)
    if match_facts:
        section_blocks.append(blocks.Facts(match_facts[:_MATCHES]))
    title = "Were the held-out tasks in the training rows?"
    lead = ("Every row trained on, held against every held-out task. ", *conclusion)
    return Section(title=title, short="Contamination", blocks=section_blocks, lead=lead)


def _contamination_text(overlap: Contamination) -> str:
    """The result in a sentence, and how many tasks the verdict leaves out because of it.

    The text begins with a blank, because it follows a tag.
    """
    text = f" {sentence_case(overlap.headline)}."
    leaked_count = len(overlap.leaked)
    if not leaked_count:
        return text
    tasks = "1 task is" if leaked_count == 1 else f"{leaked_count} tasks are"
    return f"{text} {tasks} left out of the verdict: the rows teach them."


def _sources_table(sources: Sequence[SharedRows]) -> blocks.Table:
    """The table of what was trained on, with one row per source (dataset or run) of training rows.

    A row counts the held-out tasks that match rows of the source, by kind of match.
    """
    matches = ("same text", "same words", "long sequence")  # in the order of `KINDS`
    heads = ("trained on", "by", "rows", "tasks held out", *matches)  # "by" is the run
    styles = ("name", "", "num rest", "num", "num", "num", "num")
    return blocks.Table(heads, [_source_row(source) for source in sources], styles)


def _match_facts(sources: Sequence[SharedRows]) -> list[tuple[str, str]]:
    """(held-out task, training row that contains it) for each example of a match."""
    return [
        (f"held-out {match.heldout}", _match_text(match))
        for source in sources
        for match in source.examples
    ]


def _match_text(match: SharedPair) -> str:
    """Where the text of a held-out task stands, such as "in row t-12 (exact, prompt)", or which row
    is its twin (asks the same task in other words or with other numbers)."""
    if match.kind in TWIN_KINDS:
        return f"has a twin in row {match.train} ({match.kind})"
    return f"in row {match.train} ({match.kind}, {match.part})"


def _source_row(source: SharedRows) -> list[str]:
    """The table row of one source: what was trained on, and the number of held-out tasks by kind of
    match."""
    row_count, task_count = value_text(source.train), value_text(source.heldout)
    match_counts = [str(source.count(kind)) for kind in KINDS]
    return [source.env_id, source.run_id or "this run", row_count, task_count, *match_counts]


def cost(dossier: Dossier) -> Section | None:
    """The section on device time and money, estimated and used. Returns None if neither is
    known."""
    hours, estimate = dossier.device_hours, dossier.estimate
    panel_blocks: list[Block] = []
    facts = []
    if hours is not None:
        name = "device time used" if dossier.row.state in TERMINAL else "device time used so far"
        facts.append((name, duration(hours)))
    if estimate is not None:
        panel_blocks.append(_estimate_figure(estimate, hours))
        facts += _estimate_facts(estimate, hours)
    if not facts:
        return None
    panel_blocks.append(blocks.Facts(facts))
    lead = "What was predicted before the run, and what it took."
    return Section(
        title="Cost against the estimate",
        short="Cost",
        blocks=[blocks.Panel(panel_blocks)],
        lead=[lead],
    )


def _estimate_figure(estimate: Estimate, hours_used: float | None) -> blocks.Figure:
    """The drawing of the estimated device hours as a bar; `hours_used`, if known, is a mark on
    it."""
    expected_hours = estimate.gpu_hours
    used_text = f"used {duration(hours_used)}" if hours_used is not None else ""
    estimated_range = charts.Range(
        low=expected_hours.low,
        likely=expected_hours.likely,
        high=expected_hours.high,
        actual=hours_used,
        texts=(
            duration(expected_hours.low),
            f"likely {duration(expected_hours.likely)}",
            duration(expected_hours.high),
            used_text,
        ),
    )
    wide = charts.range_bar(estimated_range, charts.WIDE, "Estimated and used")
    narrow = charts.range_bar(estimated_range, charts.NARROW - 20, "Estimated and used")
    return blocks.Figure(wide, narrow)


def _estimate_facts(estimate: Estimate, hours_used: float | None) -> list[tuple[str, str]]:
    """The facts of an estimate, as (name, value): device time, its basis, peak memory.

    The money spent is included only if the price per hour and the hours used are known.
    """
    expected_hours = estimate.gpu_hours
    bounds = f"{duration(expected_hours.low)} to {duration(expected_hours.high)}"
    facts = [
        ("estimated", f"{duration(expected_hours.likely)} ({bounds})"),
        ("basis of the estimate", estimate.basis),
        ("estimated peak memory", size(estimate.peak_memory.total)),
    ]
    price = estimate.gpu_hour_price
    if price and hours_used is not None:
        facts.append(("money", f"{price * hours_used:.2f} at {price:g} an hour"))
    return facts


def settings(dossier: Dossier) -> Section | None:
    """The section with every setting, its value and its source. Returns None if there are no
    settings."""
    rows = [(name, value_text(value), source) for name, value, source in dossier.settings]
    if not rows:
        return None
    lead = (
        "Every value the run used and where it came from; what a person or an agent chose comes "
        "first."
    )
    table = blocks.Table(("setting", "value", "source"), rows, style="knobs")
    return Section(title="Settings", short="Settings", blocks=[table], lead=[lead])


def lineage(dossier: Dossier) -> Section:
    """The section on the runs that this run descends from, or on the models that were evaluated."""
    if dossier.row.kind == "train":
        steps = blocks.Steps(dossier.lineage, style="way")
        lead = "From the base model to this run."
        return Section(title="Where it comes from", short="Lineage", blocks=[steps], lead=[lead])
    steps = blocks.Steps(dossier.lineage, style="flat")
    lead = "These models, in this evaluation."
    return Section(title="What was evaluated", short="Evaluated", blocks=[steps], lead=[lead])


def provenance(dossier: Dossier) -> Section | None:
    """The section on the run's chain of hashes, which has one link for each stage of the run.

    A link holds the hashes of the stage's files and of the previous link. Returns None if there is
    no link.
    """
    chain = dossier.provenance
    if chain is None or not chain.links:
        return None
    links = [_link_station(link) for link in chain.links]
    verify = (
        Code(f"honesmith verify {dossier.row.run_id}"),
        " reads every file again and names what was changed.",
    )
    line_on_page = ("Sealed when it was done: each link carries the one before it. ", *verify)
    line_in_markdown = ("Head: ", Code(chain.head), ". ", *verify)
    section_blocks = [
        blocks.Paragraph(line_on_page, style="lead chainlead", shown_in="page"),
        blocks.Steps(links, style="chain"),
        blocks.Paragraph(line_in_markdown, shown_in="markdown"),
    ]
    # No title: on the page this continues the section on the lineage.
    return Section(title="", short="Chain", blocks=section_blocks)


def _link_station(link: SealedLink) -> Station:
    """A link of the chain of hashes as a step: its name, how many files it holds, and its hash."""
    files = counted(len(link.files), "file") if link.files else "nothing to seal"
    return Station("link", link.name, detail=files, code=link.hash[:_LINK_HASH])


def hashes(dossier: Dossier) -> Section | None:
    """The section with the hashes of what the run used, and the versions of the software that ran
    it.

    Returns None if neither is known.
    """
    section_blocks: list[Block] = []
    if dossier.hashes:
        digests = [(name, digest[:_HASH]) for name, digest in dossier.hashes]
        section_blocks.append(blocks.Facts(digests, code=True))
    versions = _versions(dossier.manifest)
    if versions:
        section_blocks.append(blocks.Facts(versions))
    if not section_blocks:
        return None
    title = "Hashes and versions"
    return Section(title, short=title, blocks=[blocks.Panel(section_blocks)], folded=True)


def _versions(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, version) of the software that ran the run; then ("machine", its hardware); then
    ("switched off", name and reason) for each fast path that does not work on the device."""
    recorded_versions = manifest.get("versions") or {}
    versions = [(str(name), str(version)) for name, version in recorded_versions.items()]
    hardware = manifest.get("hardware")
    if hardware:
        machine = ", ".join(f"{name} {value_text(value)}" for name, value in hardware.items())
        versions.append(("machine", machine))
    for name, why in (manifest.get("switched_off") or {}).items():
        versions.append(("switched off", f"{name}: {why}"))
    return versions


def card_head(dossier: Dossier) -> str:
    """The first sentence of a model card: what the model is and when it was made.

    For example "A LoRA adapter trained by grpo from pebble on the environment sums@3f2a,
    2026-03-01."
    """
    row = dossier.row
    date = time.strftime("%Y-%m-%d", time.gmtime(row.ended or row.created))
    if row.kind != "train":
        return f"An evaluation on {row.env_id}, {date}."
    return (
        f"A LoRA adapter trained by {row.algorithm} from {row.model} on the environment "
        f"{row.env_id}, {date}."
    )


def training(dossier: Dossier) -> Section | None:
    """The section of a model card on how the model was trained. Returns None for an evaluation."""
    row, config, manifest = dossier.row, dossier.config, dossier.manifest
    if row.kind != "train":
        return None
    # The manifest says which seed the trainer used; the config only which one was asked for.
    seed_asked = config.settings.seed if isinstance(config, TrainConfig) else None
    facts = [
        ("algorithm", row.algorithm),
        ("started from", dossier.started_from),
        ("environment", row.env_id),
        ("seed", value_text(manifest.get("seed", seed_asked))),
        ("precision", value_text(manifest.get("precision", "not recorded"))),
        *_reward_facts(dossier),
    ]
    if dossier.device_hours is not None:
        facts.append(("device time", duration(dossier.device_hours)))
    # No title: only the HTML page shows titles, and a model card is Markdown.
    return Section(title="", short="Training", blocks=[blocks.Facts(facts)])


def _reward_facts(dossier: Dossier) -> list[tuple[str, str]]:
    """Facts on how far the reward can be trusted, as (name, value). Returns [] if there was no
    audit."""
    facts = []
    if dossier.audit is not None and dossier.audit.headline:
        facts.append(("reward audit", dossier.audit.headline))
    if dossier.reward_risk_accepted:
        facts.append(("accept_reward_risk", "the reward audit failed and was overruled"))
    return facts


def how_to_use(dossier: Dossier) -> Section | None:
    """The section of a model card that tells by which calls the model is served and exported.

    Returns None for an evaluation, and if there is no checkpoint.
    """
    if dossier.row.kind != "train" or dossier.run.latest_checkpoint() is None:
        return None
    model_ref = dossier.row.run_id
    if dossier.run.resolve_checkpoint("best"):
        model_ref += "@best"
    line: Line = (
        Code(f'deploy(run_id="{model_ref}")'),
        " serves it over an OpenAI-compatible address; with ",
        Code('action="export"'),
        " it writes the adapter as a PEFT folder.",
    )
    # `short` is the heading in Markdown, `title` that of the HTML page, which has no such section.
    return Section(title="", short="Use", blocks=[blocks.Paragraph(line)])


def limits(dossier: Dossier) -> Section:
    """The section of a model card on what the verdict does not cover."""
    text = (
        f"The verdict rests on {dossier.verdict.comparison.outcome.n} held-out tasks of this one "
        "environment version. It says nothing about other tasks, about skills that were not "
        "evaluated, or about safety."
    )
    # No title: only the HTML page shows titles, and a model card is Markdown.
    return Section(title="", short="What is not known", blocks=[blocks.Paragraph([text])])
