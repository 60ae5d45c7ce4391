"""Kept skills: did the training break something the model could do before?

The trainer asks the same few dozen tasks at step 0 and with the checkpoint it chose; here the two
are compared battery by battery. Forgotten means significantly worse, task by task; no loss found is
said with the smallest loss that would have shown.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.evidence.results import Row, load_rows, rounded, side
from engine.evidence.stats import PairedVerdict, paired_verdict
from engine.run_dir import RunDir

_SHOWN = 5  # skills named in a sentence


def kept_skills(run_dir: RunDir) -> dict[str, Any]:
    """The comparison of a training run, {} where it asked nothing.

    Returns `verdict` (forgotten, kept, improved or unknown), `summary` and `batteries`: each with
    before, after, n, interval, lost, gained and its `skills` with their levels.
    """
    before, after = (load_rows(run_dir.kept(when)) for when in ("before", "after"))
    if not before:
        return {}
    names = list(dict.fromkeys(str(row.get("battery")) for row in before))
    batteries = [_battery(name, _of(before, name), _of(after, name)) for name in names]
    words = {battery["verdict"] for battery in batteries}
    word = next(w for w in ("forgotten", "unknown", "improved", "kept") if w in words)
    said = " ".join(_sentence(battery) for battery in batteries)
    return {"verdict": word, "summary": said, "batteries": batteries}


def _of(rows: Sequence[Row], battery: str) -> list[Row]:
    return [row for row in rows if str(row.get("battery")) == battery]


def _battery(name: str, before: Sequence[Row], after: Sequence[Row]) -> dict[str, Any]:
    measure = "success" if all(isinstance(r.get("success"), bool) for r in before) else "reward"
    found = paired_verdict(side(before, measure), side(after, measure))
    return {
        "battery": name,
        "verdict": _word(found),
        "metric": measure,
        "before": rounded(found.before),
        "after": rounded(found.after),
        "difference": rounded(found.diff),
        "interval": [rounded(found.low), rounded(found.high)],
        "n": found.n,
        "gained": len(found.gained),
        "lost": len(found.lost),
        "smallest_detectable_gap": rounded(found.detectable),
        "reason": found.reason if found.verdict == "unknown" else "",
        "skills": _skills(before, after),
    }


def _word(found: PairedVerdict) -> str:
    if found.verdict == "unknown":
        return "unknown"
    return {"worse": "forgotten", "better": "improved"}.get(found.verdict, "kept")


def _skills(before: Sequence[Row], after: Sequence[Row]) -> list[dict[str, Any]]:
    """Levels by skill, the largest loss first."""
    names = list(dict.fromkeys(str(row.get("family") or "") for row in before))
    if names == [""]:
        return []
    found = []
    for name in names:
        levels = [_mean([r for r in rows if str(r.get("family") or "") == name])
                  for rows in (before, after)]  # fmt: skip
        found.append({"skill": name, "before": levels[0], "after": levels[1]})
    return sorted(found, key=lambda s: ((s["after"] or 0.0) - (s["before"] or 0.0), s["skill"]))


def _mean(rows: Sequence[Mapping[str, Any]]) -> float | None:
    values = [
        float(r["reward"]) for r in rows if not r.get("error") and r.get("reward") is not None
    ]
    return rounded(sum(values) / len(values)) if values else None


def _sentence(battery: Mapping[str, Any]) -> str:
    name = battery["battery"]
    if battery["verdict"] == "unknown":
        return f"Kept skills ({name}): unknown, {battery['reason']}."
    levels = f"{_show(battery, 'before')} to {_show(battery, 'after')} on {battery['n']} tasks"
    if battery["verdict"] == "forgotten":
        lost = [s for s in battery["skills"] if (s["after"] or 0.0) < (s["before"] or 0.0)]
        named = ", ".join(
            f"{s['skill']} {s['before']:.2f} to {s['after'] or 0.0:.2f}" for s in lost[:_SHOWN]
        )
        return f"Forgotten ({name}): {levels}" + (f"; most of all {named}." if named else ".")
    if battery["verdict"] == "improved":
        return f"Kept skills ({name}): better, {levels}."
    if battery["before"] == 0.0 and not battery["gained"]:
        return f"Kept skills ({name}): nothing to lose, 0 before on {battery['n']} tasks."
    gap = 100 * (battery["smallest_detectable_gap"] or 0.0)
    unit = f"{gap:.0f} points" if battery["metric"] == "success" else f"{gap / 100:.2g}"
    return f"Kept skills ({name}): no loss found, {levels} (a loss of {unit} would have shown)."


def _show(battery: Mapping[str, Any], when: str) -> str:
    value = battery[when]
    if value is None:
        return "?"
    return f"{100 * value:.0f} %" if battery["metric"] == "success" else f"{value:.3g}"
