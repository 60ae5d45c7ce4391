"""Sections on what a run is based on: its reward, its rows, its settings, its history."""

import time
from collections.abc import Mapping

from engine.core.format import counted, size
from engine.evidence.report import blocks, charts
from engine.evidence.report.blocks import Block, Cell, Code, Line, Note, Section, Tag
from engine.evidence.report.dossier import Dossier, Station
from engine.evidence.report.outcome import sentence_case
from engine.evidence.report.values import duration, value_text
from engine.evidence.stats.overlap import KINDS
from engine.evidence.verdict.fresh_scores import rescored
from engine.home.rows import TERMINAL
from engine.records.audit import Audit, ProbeLine
from engine.records.run_config import TrainConfig
from envs.audit.rescore import differing

_SOURCES, _PAIRS = 6, 5  # versions trained on, and pairs of task and row, shown at most
_PROBLEMS = 6  # of an audit, shown at most
_LINK_HASH = 12  # digits of a link's hash shown; `honesmith verify` checks all of them
_HASH = 64  # digits of a sha256; longer values are cut


def audit(dossier: Dossier) -> Section | None:
    """The section on the reward audit: what the environment pays for answers that solve nothing.

    None where the environment was not audited.
    """
    audit_result = dossier.audit
    if audit_result is None:
        return None
    # The headline reads "verdict: text"; the verdict is shown as a tag.
    headline = sentence_case(audit_result.headline.partition(": ")[2])
    accepted = ""
    if dossier.reward_risk_accepted:
        accepted = " The failed audit was accepted when the run was submitted."
    conclusion = (Tag(audit_result.verdict), f" {headline}{accepted}")
    section_blocks: list[Block] = [blocks.Paragraph(conclusion, only="markdown")]
    if audit_result.problems:
        section_blocks.append(
            blocks.Notes([Note(text) for text in audit_result.problems[:_PROBLEMS]])
        )
    if audit_result.probes:
        heads = ("answer", "mean reward", "", "paid on", "gold above on", "")
        styles = ("", "num", "rest", "num", "num rest", "")
        rows = [_probe_row(probe) for probe in audit_result.probes]
        section_blocks.append(blocks.Table(heads, rows, styles))
    facts = audit_facts(dossier, audit_result)
    if facts:
        section_blocks.append(blocks.Facts(facts))
    lead = ("What the environment pays for answers that are none. ", *conclusion)
    return Section("Can the reward be trusted?", "Reward audit", section_blocks, lead)


def _probe_row(probe: ProbeLine) -> tuple[str | Tag | Cell, ...]:
    """A row of the table: one kind of answer that solves nothing, and what it earns."""
    return (
        Cell(probe.probe, probe.what),
        value_text(probe.mean),
        Cell(share=probe.mean, mood=probe.verdict),
        f"{100 * probe.paid:.0f} %",
        f"{100 * probe.separated:.0f} %" if probe.separated is not None else "",
        Tag(probe.verdict),
    )


def audit_facts(dossier: Dossier, audit_result: Audit) -> list[tuple[str, str]]:
    """(name, value) facts of the audit that the table of probes does not show.

    Fields that the audit did not write are left out: older audits looked at less.
    """
    facts = []
    # Only fields that the audit wrote are in `model_fields_set`; others have a default.
    if "share" in audit_result.model_fields_set:
        facts.append(
            (
                "scored",
                f"{audit_result.rows_scored} of {audit_result.rows} rows, "
                f"{100 * audit_result.share:.0f} %",
            )
        )
    if "order_dependent" in audit_result.model_fields_set:
        repeat_result = "the same reward when scored again, at once and after other answers"
        if audit_result.order_dependent:
            repeat_result = "another reward once other answers had been scored"
        elif not audit_result.deterministic:
            repeat_result = "two rewards for one answer scored twice"
        facts.append(("repeated", repeat_result))
    facts += _fresh_fact("in a new process", audit_result.fresh_process.model_dump())
    saturation = audit_result.saturation
    if saturation.gold_at_top is not None and saturation.others_at_top is not None:
        top = f"{100 * saturation.gold_at_top:.0f} % of the reference answers"
        others_at_top = f"{100 * saturation.others_at_top:.1f} % of the others"
        facts.append(
            (
                "at the top reward",
                f"{top}, {others_at_top}; {counted(saturation.levels, 'level')} in all",
            )
        )
    if audit_result.score_seconds_p95:
        facts.append(("time of a score", f"{1000 * audit_result.score_seconds_p95:.2g} ms (95 %)"))
    return facts + _fresh_fact("answers of the exam in a new process", rescored(dossier.run))


def _fresh_fact(name: str, scores: Mapping[str, object]) -> list[tuple[str, str]]:
    """A fact (name, value) on answers that a fresh process rewarded differently, as a list.

    `scores` is a stored rescoring. [] where no answers were scored again.
    """
    if not scores.get("scored"):
        return []
    difference_text = f"{differing(scores)} of {scores['scored']} earn another reward"
    return [
        (name, difference_text + (", and another one each time" if scores.get("wavering") else ""))
    ]


def contamination(dossier: Dossier) -> Section | None:
    """The section on training rows that contain held-out tasks; None where nothing was compared."""
    overlap = dossier.contamination
    if not overlap.headline:
        return None
    leaked_count = len(overlap.leaked)
    left_out_note = ""
    if leaked_count:
        tasks = "1 task is" if leaked_count == 1 else f"{leaked_count} tasks are"
        left_out_note = f" {tasks} left out of the verdict: the rows teach them."
    conclusion = (Tag(overlap.verdict), f" {sentence_case(overlap.headline)}.{left_out_note}")
    matches = ("same text", "same words", "long sequence")  # exact, normalised, n-grams
    heads = ("trained on", "by", "rows", "tasks held out", *matches)
    rows = [
        (
            source.env_id,
            source.run_id or "this run",
            *(value_text(number) for number in (source.train, source.heldout)),
            *(str(source.count(kind)) for kind in KINDS),
        )
        for source in overlap.sources[:_SOURCES]
    ]
    section_blocks: list[Block] = [blocks.Paragraph(conclusion, only="markdown")]
    if rows:
        styles = ("name", "", "num rest", *["num"] * 4)
        section_blocks.append(blocks.Table(heads, rows, styles))
    pair_facts = [
        (f"held-out {pair.heldout}", f"in row {pair.train} ({pair.kind}, {pair.part})")
        for source in overlap.sources
        for pair in source.examples
    ]
    if pair_facts:
        section_blocks.append(blocks.Facts(pair_facts[:_PAIRS]))
    title = "Were the held-out tasks in the training rows?"
    lead = ("Every row trained on, held against every held-out task. ", *conclusion)
    return Section(title, "Contamination", section_blocks, lead)


def cost(dossier: Dossier) -> Section | None:
    """The section on device time and money, estimated and used; None where neither is known."""
    hours, estimate = dossier.hours, dossier.estimate
    section_blocks: list[Block] = []
    facts = []
    if hours is not None:
        used_text = "used" if dossier.row.state in TERMINAL else "used so far"
        facts.append((f"device time {used_text}", duration(hours)))
    if estimate is not None:
        expected = estimate.gpu_hours
        range_hours = (expected.low, expected.likely, expected.high)
        low, likely, high = (duration(end) for end in range_hours)
        used_text = f"used {duration(hours)}" if hours is not None else ""
        estimate_range = charts.Range(
            *range_hours, hours, (low, f"likely {likely}", high, used_text)
        )
        wide = charts.range_bar(estimate_range, charts.WIDE, "Estimated and used")
        narrow = charts.range_bar(estimate_range, charts.NARROW - 20, "Estimated and used")
        section_blocks.append(blocks.Figure(wide, narrow))
        facts.append(("estimated", f"{likely} ({low} to {high})"))
        facts.append(("basis of the estimate", estimate.basis))
        facts.append(("estimated peak memory", size(estimate.peak_memory.total)))
        if estimate.gpu_hour_price and hours is not None:
            price = estimate.gpu_hour_price
            facts.append(("money", f"{price * hours:.2f} at {price:g} an hour"))
    if not facts:
        return None
    lead = "What was predicted before the run, and what it took."
    panel = blocks.Panel([*section_blocks, blocks.Facts(facts)])
    return Section("Cost against the estimate", "Cost", [panel], [lead])


def settings(dossier: Dossier) -> Section | None:
    """The section with every setting, its value and where that came from; None without settings."""
    rows = [(name, value_text(value), source) for name, value, source in dossier.settings]
    lead = (
        "Every value the run used and where it came from; what a person or an agent chose comes "
        "first."
    )
    table = blocks.Table(("setting", "value", "source"), rows, style="knobs")
    return Section("Settings", "Settings", [table], [lead]) if rows else None


def lineage(dossier: Dossier) -> Section:
    """The section on the runs this one descends from, or on the models that were evaluated."""
    if dossier.row.kind == "train":
        steps = blocks.Steps(dossier.lineage, "way")
        lead = "From the base model to this run."
        return Section("Where it comes from", "Lineage", [steps], [lead])
    steps = blocks.Steps(dossier.lineage, "flat")
    lead = "These models, in this evaluation."
    return Section("What was evaluated", "Evaluated", [steps], [lead])


def provenance(dossier: Dossier) -> Section | None:
    """The section on the sealed links, each of which contains the hash of the one before.

    None where nothing was sealed.
    """
    chain = dossier.provenance
    if chain is None or not chain.links:
        return None
    links = []
    for link in chain.links:
        files = counted(len(link.files), "file") if link.files else "nothing to seal"
        links.append(Station("link", link.name, files, code=link.hash[:_LINK_HASH]))
    verify = (
        Code(f"honesmith verify {dossier.row.run_id}"),
        " reads every file again and names what was changed.",
    )
    line_on_page = ("Sealed when it was done: each link carries the one before it. ", *verify)
    line_in_markdown = ("Head: ", Code(chain.head), ". ", *verify)
    section_blocks = [
        blocks.Paragraph(line_on_page, "lead chainlead", only="page"),
        blocks.Steps(links, "chain"),
        blocks.Paragraph(line_in_markdown, only="markdown"),
    ]
    return Section("", "Chain", section_blocks)


def hashes(dossier: Dossier) -> Section | None:
    """The section with the hashes of what the run used, and the versions of what ran it.

    None where neither is known.
    """
    manifest = dossier.manifest
    versions = [(str(name), str(value)) for name, value in (manifest.get("versions") or {}).items()]
    hardware = manifest.get("hardware")
    if hardware:
        machine = ", ".join(f"{name} {value_text(value)}" for name, value in hardware.items())
        versions.append(("machine", machine))
    section_blocks: list[Block] = []
    if dossier.hashes:
        section_blocks.append(
            blocks.Facts([(what, digest[:_HASH]) for what, digest in dossier.hashes], code=True)
        )
    if versions:
        section_blocks.append(blocks.Facts(versions))
    title = "Hashes and versions"
    return (
        Section(title, title, [blocks.Panel(section_blocks)], folded=True)
        if section_blocks
        else None
    )


def card_head(dossier: Dossier) -> str:
    """The first sentence of a model card: what the model is and when it was made.

    For example "A LoRA adapter trained by grpo from pebble on the environment sums@3f2a,
    2026-03-01."
    """
    row = dossier.row
    when = time.strftime("%Y-%m-%d", time.gmtime(row.ended or row.created))
    if row.kind != "train":
        return f"An evaluation on {row.env_id}, {when}."
    return (
        f"A LoRA adapter trained by {row.algorithm} from {row.model} on the environment "
        f"{row.env_id}, {when}."
    )


def training(dossier: Dossier) -> Section | None:
    """The section of a model card on how the model was trained; None for an evaluation."""
    row, config, manifest = dossier.row, dossier.config, dossier.manifest
    if row.kind != "train":
        return None
    seed = config.settings.seed if isinstance(config, TrainConfig) else None
    # The manifest says what the trainer used, which counts more than what was asked for.
    facts = [
        ("algorithm", row.algorithm),
        ("started from", dossier.started_from),
        ("environment", row.env_id),
        ("seed", value_text(manifest.get("seed", seed))),
        ("precision", value_text(manifest.get("precision", "not recorded"))),
    ]
    if dossier.audit is not None and dossier.audit.headline:
        facts.append(("reward audit", dossier.audit.headline))
    if dossier.reward_risk_accepted:
        facts.append(("accept_reward_risk", "the reward audit failed and was overruled"))
    if dossier.hours is not None:
        facts.append(("device time", duration(dossier.hours)))
    return Section("", "Training", [blocks.Facts(facts)])


def use(dossier: Dossier) -> Section | None:
    """The section of a model card on serving and exporting the model.

    None for an evaluation, and where there is no checkpoint.
    """
    if dossier.row.kind != "train" or dossier.run.latest_checkpoint() is None:
        return None
    best = "@best" if dossier.run.resolve_checkpoint("best") else ""
    line: Line = (
        Code(f'deploy(run_id="{dossier.row.run_id}{best}")'),
        " serves it over an OpenAI-compatible address; with ",
        Code('action="export"'),
        " it writes the adapter as a PEFT folder.",
    )
    return Section("", "Use", [blocks.Paragraph(line)])


def limits(dossier: Dossier) -> Section:
    """The section of a model card on what the verdict does not cover."""
    text = (
        f"The verdict rests on {dossier.verdict.comparison.outcome.n} held-out tasks of this one "
        "environment version. It says nothing about other tasks, about skills that were not "
        "evaluated, or about safety."
    )
    return Section("", "What is not known", [blocks.Paragraph([text])])
