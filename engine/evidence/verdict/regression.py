"""Kept skills: did the training break something the model could do before?

The trainer asks the same few dozen tasks at step 0 and with the checkpoint it chose; here the two
are compared battery by battery. Forgotten means significantly worse, task by task; what may be a
loss and may be chance is inconclusive; no loss found is said with the smallest that would show.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.evidence.stats.inference import ALPHA, PairedVerdict, holm, paired_verdict
from engine.evidence.stats.results import (
    Measure,
    Row,
    load_rows,
    rounded,
    rounded_ends,
    show_change,
    side,
)
from engine.evidence.verdict.lineage import line_of, started_from
from engine.home.run_dir import RunDir

# The worst first: a run's word is that of its worst battery.
WORDS = ("forgotten", "unknown", "inconclusive", "improved", "kept")
# Twice the usual level: at half of it a one-sided look would have called the loss significant, so
# nobody can say that there is none.
_PERHAPS = 2 * ALPHA
_SHOWN = 5  # skills named in a sentence


def kept_skills(run_dir: RunDir) -> dict[str, Any]:
    """The comparison of a training run, {} where it asked nothing.

    Where the model it began with was trained in this home too, `against_base` holds the same
    against what the first of those runs began with, and `lost_by`, the runs that forgot.

    Returns `verdict` (forgotten, kept, improved, inconclusive or unknown), `summary`
    and `batteries`: each with before, after, n, interval, lost, gained and its `skills` with
    their levels.
    """
    before, after = (load_rows(run_dir.kept(when)) for when in ("before", "after"))
    if not before:
        return {}
    found = _compared(before, after)
    said = " ".join(sentence_of(battery) for battery in found["batteries"])
    base = _against_base(run_dir, after)
    return found | {"summary": said} | ({"against_base": base} if base else {})


def losses(kept: Mapping[str, Any]) -> list[str]:
    """What a verdict has to say about skills that are gone, nothing where none is."""
    found = [kept, kept.get("against_base") or {}]
    return [str(one["summary"]) for one in found if one.get("verdict") == "forgotten"]


def every_battery(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The batteries of a run, then the same against its base under a name that says so."""
    base = kept.get("against_base") or {}
    since = [
        battery | {"battery": f"{battery['battery']}, against {base['base']}"}
        for battery in base.get("batteries", [])
    ]
    return [*kept.get("batteries", []), *since]


def _compared(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Any]:
    """`verdict` and `batteries` of two sets of answers; `before` holds one at least."""
    names = list(dict.fromkeys(str(row.get("battery")) for row in before))
    sides = [(_of(before, name), _of(after, name)) for name in names]
    judged = [paired_verdict(*(side(rows, _measure(old)) for rows in (old, new)))
              for old, new in sides]  # fmt: skip
    # Each battery is a chance to call luck a loss: Holm over those of one comparison.
    levels = iter(holm([found.p for found in judged if found.p is not None]))
    batteries = [
        _battery(name, *pair, found, None if found.p is None else next(levels))
        for name, pair, found in zip(names, sides, judged, strict=True)
    ]
    words = {battery["verdict"] for battery in batteries}
    return {"verdict": next(w for w in WORDS if w in words), "batteries": batteries}


def _against_base(run_dir: RunDir, after: Sequence[Row]) -> dict[str, Any]:
    """What is left of what the first run of the line began with; {} for a run without parent."""
    first, *later = reversed(line_of(run_dir))
    if not later:
        return {}
    asked = {str(row.get("battery")) for row in after}
    before = [row for row in load_rows(first.kept("before")) if str(row.get("battery")) in asked]
    if not before:
        return {}
    found, base = _compared(before, after), started_from(first)
    lost_by = [run.id for run in (first, *later) if _forgot(run)]
    said = [sentence_of(battery, f" since {base}") for battery in found["batteries"]]
    if found["verdict"] == "forgotten" and lost_by:
        said.append(f"Lost by {', '.join(lost_by)}.")
    return {"base": base} | found | {"summary": " ".join(said), "lost_by": lost_by}


def _forgot(run_dir: RunDir) -> bool:
    before, after = (load_rows(run_dir.kept(when)) for when in ("before", "after"))
    return bool(before and after) and _compared(before, after)["verdict"] == "forgotten"


def _of(rows: Sequence[Row], battery: str) -> list[Row]:
    return [row for row in rows if str(row.get("battery")) == battery]


def _measure(before: Sequence[Row]) -> Measure:
    return "success" if all(isinstance(r.get("success"), bool) for r in before) else "reward"


def _battery(
    name: str, before: Sequence[Row], after: Sequence[Row], found: PairedVerdict, p: float | None
) -> dict[str, Any]:
    return {
        "battery": name,
        "verdict": _word(found, p),
        "metric": _measure(before),
        "before": rounded(found.before),
        "after": rounded(found.after),
        "difference": rounded(found.diff),
        "interval": rounded_ends(found.low, found.high),
        "n": found.n,
        "gained": len(found.gained),
        "lost": len(found.lost),
        "smallest_detectable_gap": rounded(found.detectable),
        "reason": found.reason if found.verdict == "unknown" else "",
        "skills": _skills(before, after),
    }


def _word(found: PairedVerdict, p: float | None) -> str:
    """`p` is corrected for the other batteries."""
    if found.verdict == "unknown":
        return "unknown"
    if found.verdict in ("worse", "better") and (p is None or p < ALPHA):
        return "forgotten" if found.verdict == "worse" else "improved"
    lost = found.diff is not None and found.diff < 0
    perhaps = found.p is not None and found.p < _PERHAPS and found.verdict != "no_difference"
    return "inconclusive" if lost and perhaps else "kept"


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


def sentence_of(battery: Mapping[str, Any], since: str = "") -> str:
    """A battery's comparison in one sentence; `since` names with what it is compared."""
    name = battery["battery"]
    if battery["verdict"] == "unknown":
        return f"Kept skills{since} ({name}): unknown, {battery['reason']}."
    levels = f"{_show(battery, 'before')} to {_show(battery, 'after')} on {battery['n']} tasks"
    if battery["verdict"] == "forgotten":
        lost = [s for s in battery["skills"] if (s["after"] or 0.0) < (s["before"] or 0.0)]
        named = ", ".join(
            f"{s['skill']} {s['before']:.2f} to {s['after'] or 0.0:.2f}" for s in lost[:_SHOWN]
        )
        return f"Forgotten{since} ({name}): {levels}" + (
            f"; most of all {named}." if named else "."
        )
    if battery["verdict"] == "improved":
        return f"Kept skills{since} ({name}): better, {levels}."
    if battery["before"] == 0.0 and not battery["gained"]:
        return f"Kept skills{since} ({name}): nothing to lose, 0 before on {battery['n']} tasks."
    if battery["verdict"] == "inconclusive":
        ends = " to ".join(show_change(end, battery["metric"]) for end in battery["interval"])
        flips = f"{battery['lost']} lost, {battery['gained']} gained"
        said = f"{levels}, {flips}, 95 % interval of the change {ends}"
        return f"Kept skills{since} ({name}): inconclusive, {said}."
    gap = 100 * (battery["smallest_detectable_gap"] or 0.0)
    unit = f"{gap:.0f} points" if battery["metric"] == "success" else f"{gap / 100:.2g}"
    return (
        f"Kept skills{since} ({name}): no loss found, {levels} (a loss of {unit} would have shown)."
    )


def _show(battery: Mapping[str, Any], when: str) -> str:
    value = battery[when]
    if value is None:
        return "?"
    return f"{100 * value:.0f} %" if battery["metric"] == "success" else f"{value:.3g}"
