"""What the HTML report says about trust: kept skills, shared rows, looks, reward, seal."""

from collections.abc import Mapping
from typing import Any

from engine.evidence.report.dossier import Dossier
from engine.evidence.report.markdown import sentence_case, value_text
from engine.evidence.stats.overlap import KINDS
from engine.evidence.verdict.fresh_scores import rescored
from engine.evidence.verdict.regression import every_battery
from envs.audit.rescore import differing

_SOURCES, _PAIRS = 6, 5  # lines of the table of shared rows, and pairs named below it


def kept_section(dossier: Dossier) -> dict[str, Any]:
    """Skills of before, by battery: one line each where a battery names its skills."""
    kept = dossier.verdict.get("kept_skills") or {}
    batteries = []
    for battery in every_battery(kept):
        skills: list[dict[str, Any]] = battery["skills"] or [battery | {"skill": "all tasks"}]
        share = battery["metric"] == "success"
        batteries.append(
            {
                "name": str(battery["battery"]),
                "verdict": battery["verdict"],
                "said": f"{_level(battery['before'], share)} before, "
                f"{_level(battery['after'], share)} after; {battery['lost']} of {battery['n']} "
                f"tasks lost, {battery['gained']} gained",
                "skills": [
                    {
                        "name": str(skill["skill"]),
                        "before": _level(skill["before"], share),
                        "after": _level(skill["after"], share),
                        "was": _percent(skill["before"]),
                        "now": _percent(skill["after"]),
                        "lost": (skill["after"] or 0.0) < (skill["before"] or 0.0),
                    }
                    for skill in skills
                ],
            }
        )
    return {"verdict": kept.get("verdict", ""), "batteries": batteries} if batteries else {}


def _level(value: float | None, share: bool) -> str:
    if value is None:
        return "?"
    return f"{100 * value:.0f} %" if share else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return f"{100 * min(max(value or 0.0, 0.0), 1.0):.1f}"


def exam_use_line(dossier: Dossier) -> str:
    """How often these held-out tasks were used to choose, "" where they were not."""
    use = dossier.verdict.get("exam_use") or {}
    if not use.get("looks"):
        return ""
    evaluated = f", {use['evaluations']} models evaluated" if use["evaluations"] else ""
    runs = "1 run" if use["judged"] == 1 else f"{use['judged']} runs"
    return (
        f"These held-out tasks have been used to choose {use['looks']} times up to this run: "
        f"{runs} judged, {use['checkpoints']} checkpoints compared{evaluated}."
    )


def contamination_section(dossier: Dossier) -> dict[str, Any]:
    """What training rows share with the held-out tasks: one line for each version trained on."""
    found = dossier.contamination
    if not found.get("headline"):
        return {}
    sources = [source for source in found.get("sources") or [] if isinstance(source, Mapping)]
    left_out = len(found.get("leaked") or [])
    return {
        "verdict": str(found.get("verdict", "")),
        "headline": sentence_case(str(found["headline"])),
        "left_out": f"{left_out} {'task is' if left_out == 1 else 'tasks are'} left out of the "
        "verdict: the rows teach them." if left_out else "",
        "lines": [
            {
                "env": str(source.get("env_id", "")),
                "by": str(source.get("run_id") or "this run"),
                "rows": value_text(source.get("train")),
                "tasks": value_text(source.get("heldout")),
                "counts": [value_text(source.get(kind, 0)) for kind in KINDS],
            }
            for source in sources[:_SOURCES]
        ],
        "pairs": [
            {
                "heldout": str(pair.get("heldout", "")),
                "train": str(pair.get("train", "")),
                "how": f"{pair.get('kind', '')}, {pair.get('part', '')}",
            }
            for source in sources
            for pair in (source.get("examples") or [])
        ][:_PAIRS],
    }  # fmt: skip


def chain_section(dossier: Dossier) -> list[dict[str, str]]:
    """The sealed links in order."""
    return [
        {
            "name": str(link.get("name")),
            "files": _files(len(link.get("files") or {})),
            "hash": str(link.get("hash"))[:12],
        }
        for link in dossier.chain.get("links") or []
    ]


def _files(count: int) -> str:
    return "nothing to seal" if not count else "1 file" if count == 1 else f"{count} files"


def audit_section(dossier: Dossier) -> dict[str, Any]:
    """The reward audit: its word, its table, what the table does not say."""
    audit = dossier.audit
    probes = audit.get("probes") or []
    if not audit:
        return {}
    return {
        "verdict": str(audit.get("verdict", "")),
        "headline": sentence_case(str(audit.get("headline", "")).partition(": ")[2]),
        "problems": [str(text) for text in (audit.get("problems") or [])[:6]],
        "facts": _audit_facts(audit)
        + _fresh_fact("answers of the exam in a new process", rescored(dossier.run)),
        "accepted": bool((dossier.config.get("settings") or {}).get("accept_reward_risk")),
        "probes": [
            {
                "name": str(line.get("probe", "")),
                "what": str(line.get("what", "")),
                "mean": value_text(line.get("mean")),
                "share": f"{100 * min(max(float(line.get('mean') or 0.0), 0.0), 1.0):.1f}",
                "paid": f"{100 * float(line.get('paid') or 0.0):.0f} %",
                "below": f"{100 * line['separated']:.0f} %" if "separated" in line else "",
                "verdict": str(line.get("verdict", "")),
            }
            for line in probes
        ],
    }


def _audit_facts(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the table does not say."""
    facts = []
    if "share" in audit:
        rows = f"{audit.get('rows_scored', '?')} of {audit.get('rows', '?')} rows"
        facts.append(("scored", f"{rows}, {100 * float(audit['share']):.0f} %"))
    if "order_dependent" in audit:
        said = "the same reward when scored again, at once and after other answers"
        if audit["order_dependent"]:
            said = "another reward once other answers had been scored"
        elif not audit.get("deterministic", True):
            said = "two rewards for one answer scored twice"
        facts.append(("repeated", said))
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


def _fresh_fact(name: str, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a process that had scored nothing else said of rewards."""
    if not found.get("scored"):
        return []
    said = f"{differing(found)} of {found['scored']} earn another reward"
    return [(name, said + (", and another one each time" if found.get("wavering") else ""))]
