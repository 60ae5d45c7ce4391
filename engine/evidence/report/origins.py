"""Sections on what a run rests on: its reward, its rows, its settings, where it comes from."""

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

_SOURCES, _PAIRS = 6, 5  # versions trained on, and pairs of task and row, that are named
_PROBLEMS = 6


def audit(dossier: Dossier) -> Section | None:
    """The reward audit: what the environment pays for answers that are none."""
    made = dossier.audit
    if made is None:
        return None
    headline = sentence_case(made.headline.partition(": ")[2])
    accepted = ""
    if dossier.reward_risk_accepted:
        accepted = " The failed audit was accepted when the run was submitted."
    conclusion = (Tag(made.verdict), f" {headline}{accepted}")
    parts: list[Block] = [blocks.Paragraph(conclusion, only="markdown")]
    if made.problems:
        parts.append(blocks.Notes([Note(text) for text in made.problems[:_PROBLEMS]]))
    if made.probes:
        heads = ("answer", "mean reward", "", "paid on", "gold above on", "")
        styles = ("", "num", "rest", "num", "num rest", "")
        rows = [_probe_row(probe) for probe in made.probes]
        parts.append(blocks.Table(heads, rows, styles))
    if facts := audit_facts(dossier, made):
        parts.append(blocks.Facts(facts))
    lead = ("What the environment pays for answers that are none. ", *conclusion)
    return Section("Can the reward be trusted?", "Reward audit", parts, lead)


def _probe_row(probe: ProbeLine) -> tuple[str | Tag | Cell, ...]:
    return (
        Cell(probe.probe, probe.what),
        value_text(probe.mean),
        Cell(share=probe.mean, mood=probe.verdict),
        f"{100 * probe.paid:.0f} %",
        f"{100 * probe.separated:.0f} %" if probe.separated is not None else "",
        Tag(probe.verdict),
    )


def audit_facts(dossier: Dossier, made: Audit) -> list[tuple[str, str]]:
    """What the table of probes does not say, as far as the audit has looked."""
    facts = []
    if "share" in made.model_fields_set:
        facts.append(
            ("scored", f"{made.rows_scored} of {made.rows} rows, {100 * made.share:.0f} %")
        )
    if "order_dependent" in made.model_fields_set:
        repeated = "the same reward when scored again, at once and after other answers"
        if made.order_dependent:
            repeated = "another reward once other answers had been scored"
        elif not made.deterministic:
            repeated = "two rewards for one answer scored twice"
        facts.append(("repeated", repeated))
    facts += _fresh_fact("in a new process", made.fresh_process.model_dump())
    full = made.saturation
    if full.gold_at_top is not None and full.others_at_top is not None:
        top = f"{100 * full.gold_at_top:.0f} % of the reference answers"
        others = f"{100 * full.others_at_top:.1f} % of the others"
        facts.append(
            ("at the top reward", f"{top}, {others}; {counted(full.levels, 'level')} in all")
        )
    if made.score_seconds_p95:
        facts.append(("time of a score", f"{1000 * made.score_seconds_p95:.2g} ms (95 %)"))
    return facts + _fresh_fact("answers of the exam in a new process", rescored(dossier.run))


def _fresh_fact(name: str, scores: Mapping[str, object]) -> list[tuple[str, str]]:
    """How many answers a process that had scored nothing else rewarded otherwise."""
    if not scores.get("scored"):
        return []
    others = f"{differing(scores)} of {scores['scored']} earn another reward"
    return [(name, others + (", and another one each time" if scores.get("wavering") else ""))]


def contamination(dossier: Dossier) -> Section | None:
    """What the training rows share with the held-out tasks; None where nothing was compared."""
    shared = dossier.contamination
    if not shared.headline:
        return None
    count, left_out = len(shared.leaked), ""
    if count:
        tasks = "1 task is" if count == 1 else f"{count} tasks are"
        left_out = f" {tasks} left out of the verdict: the rows teach them."
    conclusion = (Tag(shared.verdict), f" {sentence_case(shared.headline)}.{left_out}")
    matches = ("same text", "same words", "long sequence")  # exact, normalised, n-grams
    heads = ("trained on", "by", "rows", "tasks held out", *matches)
    rows = [
        (
            source.env_id,
            source.run_id or "this run",
            *(value_text(number) for number in (source.train, source.heldout)),
            *(str(source.count(kind)) for kind in KINDS),
        )
        for source in shared.sources[:_SOURCES]
    ]
    parts: list[Block] = [blocks.Paragraph(conclusion, only="markdown")]
    if rows:
        styles = ("name", "", "num rest", *["num"] * 4)
        parts.append(blocks.Table(heads, rows, styles))
    pairs = [
        (f"held-out {pair.heldout}", f"in row {pair.train} ({pair.kind}, {pair.part})")
        for source in shared.sources
        for pair in source.examples
    ]
    if pairs:
        parts.append(blocks.Facts(pairs[:_PAIRS]))
    title = "Were the held-out tasks in the training rows?"
    lead = ("Every row trained on, held against every held-out task. ", *conclusion)
    return Section(title, "Contamination", parts, lead)


def cost(dossier: Dossier) -> Section | None:
    """Device time and money: what was estimated and what was used."""
    hours, estimate = dossier.hours, dossier.estimate
    parts: list[Block] = []
    facts = []
    if hours is not None:
        used = "used" if dossier.row.state in TERMINAL else "used so far"
        facts.append((f"device time {used}", duration(hours)))
    if estimate is not None:
        expected = estimate.gpu_hours
        ends = (expected.low, expected.likely, expected.high)
        low, likely, high = (duration(end) for end in ends)
        used = f"used {duration(hours)}" if hours is not None else ""
        span = charts.Range(*ends, hours, (low, f"likely {likely}", high, used))
        wide = charts.range_bar(span, charts.WIDE, "Estimated and used")
        narrow = charts.range_bar(span, charts.NARROW - 20, "Estimated and used")
        parts.append(blocks.Figure(wide, narrow))
        facts.append(("estimated", f"{likely} ({low} to {high})"))
        facts.append(("basis of the estimate", estimate.basis))
        facts.append(("estimated peak memory", size(estimate.peak_memory.total)))
        if estimate.gpu_hour_price and hours is not None:
            price = estimate.gpu_hour_price
            facts.append(("money", f"{price * hours:.2f} at {price:g} an hour"))
    if not facts:
        return None
    lead = "What was predicted before the run, and what it took."
    panel = blocks.Panel([*parts, blocks.Facts(facts)])
    return Section("Cost against the estimate", "Cost", [panel], [lead])


def settings(dossier: Dossier) -> Section | None:
    """Every setting with its value and where that came from."""
    rows = [(name, value_text(value), source) for name, value, source in dossier.settings]
    lead = (
        "Every value the run used and where it came from; what a person or an agent chose comes "
        "first."
    )
    table = blocks.Table(("setting", "value", "source"), rows, style="knobs")
    return Section("Settings", "Settings", [table], [lead]) if rows else None


def lineage(dossier: Dossier) -> Section:
    """The runs this one comes from, or the models that were evaluated."""
    if dossier.row.kind == "train":
        steps, lead = blocks.Steps(dossier.lineage, "way"), "From the base model to this run."
        return Section("Where it comes from", "Lineage", [steps], [lead])
    steps, lead = blocks.Steps(dossier.lineage, "flat"), "These models, in this evaluation."
    return Section("What was evaluated", "Evaluated", [steps], [lead])


def provenance(dossier: Dossier) -> Section | None:
    """The sealed links, each resting on the one before it."""
    sealed = dossier.provenance
    if sealed is None or not sealed.links:
        return None
    links = []
    for link in sealed.links:
        files = counted(len(link.files), "file") if link.files else "nothing to seal"
        links.append(Station("link", link.name, files, code=link.hash[:12]))
    verify = (
        Code(f"honesmith verify {dossier.row.run_id}"),
        " reads every file again and names what was changed.",
    )
    before = ("Sealed when it was done: each link carries the one before it. ", *verify)
    after = ("Head: ", Code(sealed.head), ". ", *verify)
    parts = [
        blocks.Paragraph(before, "lead chainlead", only="page"),
        blocks.Steps(links, "chain"),
        blocks.Paragraph(after, only="markdown"),
    ]
    return Section("", "Chain", parts)


def hashes(dossier: Dossier) -> Section | None:
    """Hashes of what the run used, and the versions of what ran it."""
    manifest = dossier.manifest
    versions = [(str(name), str(value)) for name, value in (manifest.get("versions") or {}).items()]
    if hardware := manifest.get("hardware"):
        machine = ", ".join(f"{name} {value_text(value)}" for name, value in hardware.items())
        versions.append(("machine", machine))
    parts: list[Block] = []
    if dossier.hashes:
        parts.append(blocks.Facts([(what, hash[:64]) for what, hash in dossier.hashes], code=True))
    if versions:
        parts.append(blocks.Facts(versions))
    title = "Hashes and versions"
    return Section(title, title, [blocks.Panel(parts)], folded=True) if parts else None


def card_head(dossier: Dossier) -> str:
    """What the model is, in one sentence."""
    row = dossier.row
    when = time.strftime("%Y-%m-%d", time.gmtime(row.ended or row.created))
    if row.kind != "train":
        return f"An evaluation on {row.env_id}, {when}."
    return (
        f"A LoRA adapter trained by {row.algorithm} from {row.model} on the environment "
        f"{row.env_id}, {when}."
    )


def training(dossier: Dossier) -> Section | None:
    """How the model was trained, in a few lines."""
    row, config, manifest = dossier.row, dossier.config, dossier.manifest
    if row.kind != "train":
        return None
    seed = config.settings.seed if isinstance(config, TrainConfig) else None
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
    """How to talk to the model, and how to take it elsewhere."""
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
    """What the verdict does not cover."""
    text = (
        f"The verdict rests on {dossier.verdict.comparison.outcome.n} held-out tasks of this one "
        "environment version. It says nothing about other tasks, about skills that were not "
        "evaluated, or about safety."
    )
    return Section("", "What is not known", [blocks.Paragraph([text])])
