"""What the HTML report says about trust: kept skills, shared rows, reuse, reward, provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.evidence.report.dossier import Dossier
from engine.evidence.report.markdown import sentence_case, value_text
from engine.evidence.stats.overlap import KINDS
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.regression import Battery, Skill
from envs.audit.rescore import differing

_SOURCES, _PAIRS = 6, 5  # lines of the table of shared rows, and pairs named below it
_PROBLEMS = 6


@dataclass(frozen=True)
class SkillBar:
    """Levels of one skill as text, and `was` and `now` as widths in percent."""

    name: str
    before: str
    after: str
    was: str
    now: str
    lost: bool


@dataclass(frozen=True)
class BatteryPanel:
    name: str
    verdict: str
    sentence: str
    skills: Sequence[SkillBar]


def kept_panels(dossier: Dossier) -> list[BatteryPanel]:
    """Skills of before, by battery: one bar each where a battery names its skills."""
    kept = dossier.verdict.kept_skills
    return [_battery_panel(battery) for battery in kept.every_battery] if kept else []


def _battery_panel(battery: Battery) -> BatteryPanel:
    share = battery.metric == "success"
    skills = battery.skills or [Skill("all tasks", battery.before, battery.after)]
    return BatteryPanel(
        name=battery.battery,
        verdict=battery.verdict,
        sentence=f"{_level(battery.before, share)} before, {_level(battery.after, share)} after; "
        f"{battery.lost} of {battery.n} tasks lost, {battery.gained} gained",
        skills=[
            SkillBar(
                name=skill.skill,
                before=_level(skill.before, share),
                after=_level(skill.after, share),
                was=_percent(skill.before),
                now=_percent(skill.after),
                lost=skill.lost,
            )
            for skill in skills
        ],
    )


def _level(value: float | None, share: bool) -> str:
    if value is None:
        return "?"
    return f"{100 * value:.0f} %" if share else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return f"{100 * min(max(value or 0.0, 0.0), 1.0):.1f}"


def holdout_use_line(dossier: Dossier) -> str:
    """How often these held-out tasks were used to choose, "" where they were not."""
    training = dossier.verdict.training
    if training is None or not training.holdout_use.total:
        return ""
    use = training.holdout_use
    evaluated = f", {use.evaluations} models evaluated" if use.evaluations else ""
    runs = "1 run" if use.judged == 1 else f"{use.judged} runs"
    return (
        f"These held-out tasks have been used to choose {use.total} times up to this run: "
        f"{runs} judged, {use.checkpoints} checkpoints compared{evaluated}."
    )


@dataclass(frozen=True)
class SharedLine:
    """What one version trained on shares; `counts` by kind of match."""

    env: str
    by: str
    rows: str
    tasks: str
    counts: Sequence[str]


@dataclass(frozen=True)
class PairLine:
    heldout: str
    train: str
    how: str


@dataclass(frozen=True)
class SharedSection:
    """What training rows share with the held-out tasks."""

    verdict: str
    headline: str
    left_out: str
    lines: Sequence[SharedLine]
    pairs: Sequence[PairLine]


def shared_section(dossier: Dossier) -> SharedSection | None:
    """One line for each version trained on; None where nothing was compared."""
    shared = dossier.contamination
    if not shared.headline:
        return None
    count = len(shared.leaked)
    left_out = (
        f"{count} {'task is' if count == 1 else 'tasks are'} left out of the verdict: the rows "
        "teach them."
        if count
        else ""
    )
    pairs = [pair for source in shared.sources for pair in source.examples]
    return SharedSection(
        verdict=shared.verdict,
        headline=sentence_case(shared.headline),
        left_out=left_out,
        lines=[
            SharedLine(
                env=source.env_id,
                by=source.run_id or "this run",
                rows=value_text(source.train),
                tasks=value_text(source.heldout),
                counts=[value_text(source.count(kind)) for kind in KINDS],
            )
            for source in shared.sources[:_SOURCES]
        ],
        pairs=[
            PairLine(pair.heldout, pair.train, f"{pair.kind}, {pair.part}")
            for pair in pairs[:_PAIRS]
        ],
    )


@dataclass(frozen=True)
class LinkLine:
    name: str
    files: str
    hash: str


def provenance_lines(dossier: Dossier) -> list[LinkLine]:
    """The sealed links in order."""
    links = dossier.provenance.links if dossier.provenance else []
    return [LinkLine(link.name, _files(len(link.files)), link.hash[:12]) for link in links]


def _files(count: int) -> str:
    return "nothing to seal" if not count else "1 file" if count == 1 else f"{count} files"


@dataclass(frozen=True)
class ProbeLine:
    """What the scorer pays for one kind of answer; `share` is a width in percent."""

    name: str
    what: str
    mean: str
    share: str
    paid: str
    below: str
    verdict: str


@dataclass(frozen=True)
class AuditSection:
    """The reward audit: its word, its table, and what the table does not say."""

    verdict: str
    headline: str
    problems: Sequence[str]
    facts: Sequence[tuple[str, str]]
    accepted: bool
    probes: Sequence[ProbeLine]


def audit_section(dossier: Dossier) -> AuditSection | None:
    """None where the environment was not audited."""
    audit = dossier.audit
    if not audit:
        return None
    fresh = _fresh_fact("answers of the exam in a new process", rescored(dossier.run))
    return AuditSection(
        verdict=str(audit.get("verdict", "")),
        headline=sentence_case(str(audit.get("headline", "")).partition(": ")[2]),
        problems=[str(text) for text in (audit.get("problems") or [])[:_PROBLEMS]],
        facts=_audit_facts(audit) + fresh,
        accepted=bool((dossier.config.get("settings") or {}).get("accept_reward_risk")),
        probes=[_probe_line(line) for line in audit.get("probes") or []],
    )


def _probe_line(line: Mapping[str, Any]) -> ProbeLine:
    return ProbeLine(
        name=str(line.get("probe", "")),
        what=str(line.get("what", "")),
        mean=value_text(line.get("mean")),
        share=_percent(float(line.get("mean") or 0.0)),
        paid=f"{100 * float(line.get('paid') or 0.0):.0f} %",
        below=f"{100 * line['separated']:.0f} %" if "separated" in line else "",
        verdict=str(line.get("verdict", "")),
    )


def _audit_facts(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the table does not say."""
    facts = []
    if "share" in audit:
        rows = f"{audit.get('rows_scored', '?')} of {audit.get('rows', '?')} rows"
        facts.append(("scored", f"{rows}, {100 * float(audit['share']):.0f} %"))
    if "order_dependent" in audit:
        repeated = "the same reward when scored again, at once and after other answers"
        if audit["order_dependent"]:
            repeated = "another reward once other answers had been scored"
        elif not audit.get("deterministic", True):
            repeated = "two rewards for one answer scored twice"
        facts.append(("repeated", repeated))
    facts += _fresh_fact("in a new process", audit.get("fresh_process") or {})
    full = audit.get("saturation") or {}
    if full.get("gold_at_top") is not None and full.get("others_at_top") is not None:
        top = f"{100 * full['gold_at_top']:.0f} % of the reference answers"
        rest = f"{100 * full['others_at_top']:.1f} % of the others"
        levels = "1 level" if full["levels"] == 1 else f"{full['levels']} levels"
        facts.append(("at the top reward", f"{top}, {rest}; {levels} in all"))
    if audit.get("score_seconds_p95"):
        facts.append(("time of a score", f"{1000 * audit['score_seconds_p95']:.2g} ms (95 %)"))
    return facts


def _fresh_fact(name: str, scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a process that had scored nothing else said of rewards."""
    if not scores.get("scored"):
        return []
    others = f"{differing(scores)} of {scores['scored']} earn another reward"
    return [(name, others + (", and another one each time" if scores.get("wavering") else ""))]
