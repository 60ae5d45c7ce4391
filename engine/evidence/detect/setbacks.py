"""Detectors of what a run lost: what it was at its start, and what it could do before."""

from typing import Any

from engine.evidence.detect.findings import Finding, Lever
from engine.evidence.detect.groups import rounded_part
from engine.evidence.detect.views import Facts, mean, mean_or_none, window
from engine.evidence.stats import thresholds as at
from engine.evidence.stats.inference import ALPHA
from engine.evidence.verdict.regression import sentence_of


def below_start(f: Facts) -> Finding | None:
    """The last exam is worse than step 0 on the same tasks, whatever checkpoint was best."""
    found = f.against_start
    if found.get("verdict") != "worse" or found["p"] * found["exams"] >= ALPHA:
        return None  # a run that only wavers has a chance at every exam
    measure, rate = found["metric"], found["metric"] == "success"
    before, after = (_level(found[name], rate) for name in ("before", "after"))
    low, high = (_level(end, rate, sign=True) for end in found["interval"])
    reason, lever = _why(f)
    what = (
        f"Held-out {measure} fell from {before} at step 0 to {after} at step {found['step']}, on "
        f"the same {found['n']} tasks (95 % interval of the change {low} to {high})"
    )
    if measure == "loss":
        what = what.replace(" fell ", " rose ", 1)
    names = ("before", "after", "difference", "interval", "n", "p", "step",
             "reward_before", "reward_after")  # fmt: skip
    evidence: dict[str, Any] = {name: found[name] for name in names}
    evidence |= {
        "truncated_share": mean_or_none(window(f.of_views("cut"))),
        "reward_when_cut": mean_or_none(window(f.of_views("cut_reward"))),
        "learning_rate": f.settings.get("learning_rate"),
    }
    pick = "best" if f.algorithm == "grpo" else "changed"
    section = "rewards" if not lever.setting else "failures"
    return Finding("below_start", f"{what}{reason}.", evidence, lever, section, pick)


def _why(f: Facts) -> tuple[str, Lever]:
    """What the fall is put down to: a reward that is content with it, else steps too large."""
    found = f.against_start
    before, after = found["reward_before"], found["reward_after"]
    if f.algorithm == "grpo" and found["metric"] == "success":
        if before is not None and after is not None and _held(found):
            paid = f"while the reward went from {before:.2g} to {after:.2g}"
            return f", {paid}", Lever(edit=_PAY)
        if cut_is_paid(f, at_start=before):
            paid = mean(window(f.of_views("cut_reward")))
            return f"; answers that are cut earn {paid:.2g}, as much as the mean", Lever(
                edit=_CUT_PAY
            )
    rate = f.settings.get("learning_rate")
    to = rounded_part(rate, 3)
    return "", Lever("learning_rate", rate, to, "from the start again: this run forgot it")


def _held(found: Any) -> bool:
    """Whether the reward fell by much less than success did: a reward that is success falls with
    it, by however little that is."""
    before, after = found["reward_before"], found["reward_after"]
    top, fell = max(1.0, abs(before), abs(after)), found["before"] - found["after"]
    return before - after < min(at.SUCCESS_FOLLOWS, at.HELD_PART * fell) * top


_PAY = "score(): it pays what is no success; see the best answers, push, train from the start"
_CUT_PAY = (
    "score(): pay nothing for length or for an answer that is cut; push, train from the start"
)


def cut_is_paid(f: Facts, *, at_start: float | None = None) -> bool:
    """Whether an answer that is cut earns about what the others do, and not next to nothing, nor
    because it was right before it was cut: where nobody says what is right, nobody can tell."""
    solved = window(f.of_views("cut_solved"))
    if not solved or mean(solved) > at.SOLVED_NEVER:
        return False
    cut, pay = window(f.of_views("cut")), window(f.of_views("cut_reward"))
    reward = window(f.of_views("reward"))
    if not cut or not pay or not reward or mean(cut) <= at.TRUNCATED:
        return False
    floor = max(0.0, at.CUT_PAYS_SOMETHING * (at_start or 0.0))
    return mean(pay) > floor and mean(pay) >= at.CUT_PAYS * mean(reward)


def forgetting(f: Facts) -> Finding | None:
    """Skills the model had before are gone: by this run, or by one it descends from."""
    own = f.kept.get("verdict") == "forgotten"
    since = f.kept.get("against_base") or {}
    if not own and since.get("verdict") != "forgotten":
        return None
    found = f.kept if own else since
    lost = next(each for each in found["batteries"] if each["verdict"] == "forgotten")
    names = ("battery", "before", "after", "interval", "n", "lost", "gained")
    evidence: dict[str, Any] = {name: lost[name] for name in names}
    mix = "mix 10 to 30 % rows of what the model could do before into the training rows"
    if own:
        edit = f"{mix}, fewer steps, and train from the start again"
        return Finding("forgetting", sentence_of(lost), evidence, Lever(edit=edit), "sft")
    by = ", ".join(since["lost_by"]) or "a run before it"
    evidence |= {"base": since["base"], "lost_by": since["lost_by"]}
    edit = f"{mix} of {by} and train that again: a child cannot win back what its parent lost"
    what = f"Inherited from {by}: " + sentence_of(lost, f" since {since['base']}")
    return Finding("forgetting", what, evidence, Lever(edit=edit), "sft", severity="medium")


def _level(value: float | None, rate: bool, *, sign: bool = False) -> str:
    if value is None:
        return "?"
    if not rate:
        return f"{value:+.3g}" if sign else f"{value:.3g}"
    return f"{100 * value:+.1f} points" if sign else f"{value:.1%}"
