"""Detectors of what the model writes: cut, thought away, repeated, unreadable."""

from collections.abc import Mapping

from engine.evidence.detect.findings import Finding, edit_lever, setting_lever
from engine.evidence.detect.groups import learning
from engine.evidence.detect.setbacks import cut_is_paid
from engine.evidence.detect.views import Facts, mean, mean_or_none, stuck_at, window
from engine.evidence.stats import thresholds as limits


def truncation(facts: Facts) -> Finding | None:
    """Answers cut by `max_tokens` or out of turns; SFT rows cut at `max_length`."""
    if facts.algorithm == "sft":
        return _cut_rows(facts) or _cut_exam(facts)
    if facts.algorithm == "evaluate":
        return _cut_exam(facts)
    level = stuck_at(facts.series("truncated_share"), limits.TRUNCATED)
    if level is None or _why_longer(facts):
        return None
    turns = mean_or_none(window(facts.of_views("out_of_turns"))) or 0.0
    evidence = {
        "truncated_share": level,
        "out_of_turns": turns,
        "length_p95": mean_or_none(facts.recent("length_p95")),
        "max_tokens": facts.settings.get("max_tokens"),
        "reward_when_cut": mean_or_none(window(facts.of_views("cut_reward"))),
        "reward_when_whole": mean_or_none(window(facts.of_views("whole_reward"))),
    }
    return _cut(facts, evidence, level, turns, "of the last steps")


def length_grew(facts: Facts) -> Finding | None:
    """Answers that came to be cut because length is paid or drifts, not for want of room."""
    level = stuck_at(facts.series("truncated_share"), limits.TRUNCATED)
    why = _why_longer(facts)
    if level is None or not why:
        return None
    now, (start, room) = facts.settings.get("max_tokens"), _began(facts)
    evidence = {
        "truncated_share": level,
        "truncated_share_start": room,
        "length_start": start,
        "length": mean(window(facts.of_views("length"))),
        "max_tokens": now,
        "gold_tokens": facts.gold_tokens,
        "reward_when_cut": mean_or_none(window(facts.of_views("cut_reward"))),
        "reward_when_whole": mean_or_none(window(facts.of_views("whole_reward"))),
    }
    what = f"{level:.0%} of the answers of the last steps are cut at max_tokens = {now}, and {why}."
    edit = "score(): pay nothing for length, and nothing for an answer that is cut; not max_tokens"
    return Finding("length_grew", what, evidence, edit_lever(edit), "rewards", "truncated")


def _why_longer(facts: Facts) -> str:
    """Why answers are cut where more room is not what they lack, "" where it may be.

    Answers that get longer while more of them are right are learning to use the room.
    """
    lengths = facts.of_views("length")
    paid = mean_or_none(window(facts.of_views("whole_reward"))) is not None and cut_is_paid(facts)
    if (mean_or_none(window(facts.of_views("out_of_turns"))) or 0.0) > 0.5 * limits.TRUNCATED:
        return ""
    if len(lengths) >= limits.LEAST and not (learning(facts) and not paid):
        (start, room), now = _began(facts), mean(window(lengths))
        if room <= limits.TRUNCATED and now >= limits.LENGTH_UP * start:
            return f"at the start {room:.0%} were: their length grew from {start:.3g} to {now:.3g}"
    return "earn as much as the others, though hardly one is right" if paid else ""


def _began(facts: Facts) -> tuple[float, float]:
    """Length and cut share at the start: of the exam before training or of the first rollouts,
    whichever is more. The exam is greedy, and sampled answers are longer without any training."""
    lengths, cuts = facts.of_views("length"), facts.of_views("cut")
    if facts.exam_start is None:
        return mean(lengths[:3]), mean(cuts[:3])
    return max([facts.exam_start.length, *lengths[:1]]), max([facts.exam_start.cut, *cuts[:1]])


def _cut_exam(facts: Facts) -> Finding | None:
    """Cut answers of an evaluation, where no rollouts were played."""
    view = facts.exam or (facts.views[-1] if facts.views else None)
    if view is None or view.n < limits.FEWEST_ANSWERS or view.cut <= limits.TRUNCATED:
        return None
    evidence = {
        "truncated_share": view.cut,
        "out_of_turns": view.out_of_turns,
        "answers": view.n,
        "max_tokens": facts.settings.get("max_tokens"),
        "reward_when_cut": view.cut_reward,
        "reward_when_whole": view.whole_reward,
    }
    if facts.algorithm == "sft":
        what = f"{view.cut:.0%} of the held-out answers after training do not come to an end."
        lever = edit_lever(
            "reference answers that end where the answer ends, none cut at max_length"
        )
        return Finding("truncation", what, evidence, lever, "sft", "truncated")
    return _cut(facts, evidence, view.cut, view.out_of_turns, "of the evaluation")


def _cut(
    facts: Facts, evidence: Mapping[str, object], level: float, turns: float, when: str
) -> Finding:
    """The finding on answers that are cut by tokens or turns, with the limit to raise."""
    if turns > level / 2:
        now = facts.settings.get("max_turns")
        what = f"{level:.0%} of the answers {when} ran out of turns (max_turns = {now})."
        lever = setting_lever("max_turns", now, 2 * now if isinstance(now, int) else None)
    else:
        now, gold = facts.settings.get("max_tokens"), facts.gold_tokens
        what = f"{level:.0%} of the answers {when} were cut at max_tokens = {now}."
        lever = setting_lever("max_tokens", now, 2 * now if isinstance(now, int) else None)
        fits = gold is not None and isinstance(now, int) and gold <= limits.GOLD_FITS * now
        if gold is not None and fits and not facts.settings.get("thinking"):
            evidence = {**evidence, "gold_tokens": gold}
            what += f" Reference answers take {gold:.0f} tokens."
            edit = "ask for short answers in the prompt, or show them by SFT"
            lever = edit_lever(f"{edit}; more max_tokens only where an answer must be worked out")
    return Finding("truncation", what, evidence, lever, "failures", "truncated")


def _cut_rows(facts: Facts) -> Finding | None:
    """SFT rows that lost their end: the model learns answers that stop in the middle."""
    kept, cut, dropped = facts.rows.rows, facts.rows.truncated, facts.rows.dropped
    if kept + dropped == 0 or (cut + dropped) / (kept + dropped) <= limits.TRUNCATED:
        return None
    share, now = (cut + dropped) / (kept + dropped), facts.settings.get("max_length")
    evidence = {"rows": kept + dropped, "cut": cut, "dropped": dropped, "max_length": now}
    what = f"{share:.0%} of the training rows were cut or dropped at max_length = {now}."
    lever = setting_lever("max_length", now, 2 * now if isinstance(now, int) else None)
    return Finding("truncation", what, evidence, lever, "sft")


def overthinking(facts: Facts) -> Finding | None:
    """Think blocks that leave no room for the answer."""
    thinking, shares = facts.recent_views("thinking"), facts.recent_views("think")
    if not thinking or mean(thinking) < limits.THINKING_AT_ALL or not shares:
        return None
    if (level := mean(shares)) <= limits.THINK_BUDGET:
        return None
    cut = mean_or_none(facts.recent_views("cut")) or 0.0
    evidence = {
        "think_of_max_tokens": level,
        "thinking_share": mean(thinking),
        "truncated_share": cut,
        "reward_when_cut": mean_or_none(facts.recent_views("cut_reward")),
        "reward_when_whole": mean_or_none(facts.recent_views("whole_reward")),
        "max_tokens": facts.settings.get("max_tokens"),
    }
    now = facts.settings.get("max_tokens")
    what = f"The median think block takes {level:.0%} of max_tokens = {now}."
    if facts.settings.get("thinking") and facts.algorithm == "grpo":
        penalty = facts.settings.get("thinking_length_penalty") or 0.0
        lever = setting_lever("thinking_length_penalty", penalty, min(1.0, max(0.1, 2 * penalty)))
    else:
        lever = setting_lever("max_tokens", now, 2 * now if isinstance(now, int) else None)
    return Finding(
        "overthinking", what, evidence, lever, "failures", "truncated", root=cut > limits.TRUNCATED
    )


def repetition(facts: Facts) -> Finding | None:
    """The same phrase again and again, more than the model did before training."""
    values = facts.of_views("repeated")
    recent = facts.recent_views("repeated")
    if not recent:
        return None
    level, base = mean(recent), mean(values[:3])
    from_start = base >= limits.REPEATED_FROM_START or facts.algorithm == "evaluate"
    grown = level >= max(limits.REPEATED, limits.REPEATED_TIMES * base)
    if not (grown or (from_start and level >= limits.REPEATED_FROM_START)):
        return None
    evidence = {
        "repeated_share": level,
        "repeated_share_start": base,
        "length_mean": mean_or_none(facts.recent("length_mean")),
        "kl_coef": facts.settings.get("kl_coef"),
        "temperature": facts.settings.get("temperature"),
    }
    what = f"{level:.0%} of the four-word phrases of an answer repeat an earlier one"
    if from_start:
        edit = "a base or an SFT start that ends its answers; max_tokens near what an answer needs"
        lever, what = edit_lever(edit), what + ", and did so from the start."
    else:
        what += f"; at the start {base:.0%} did."
        now = facts.settings.get("kl_coef") or 0.0
        lever = setting_lever("kl_coef", now, max(0.02, 2 * now), "and start from before it began")
    return Finding("repetition", what, evidence, lever, "failures", "worst")


def unparsed(facts: Facts) -> Finding | None:
    """Answers the scorer could not read, or reads only without their wrapping."""
    return _unread(facts) or _wrapped(facts)


def _unread(facts: Facts) -> Finding | None:
    """Answers in a form that the scorer's own metric says it cannot read."""
    lost = [1.0 - value for value in facts.of_views("form")]
    if facts.algorithm == "grpo":
        level = stuck_at(lost, limits.UNPARSED)
        if level is not None and level <= limits.TOO_MUCH_TO_WAIT and facts.early:
            return None  # forms are learnt by the way, and first
    else:
        view = facts.exam or (facts.views[-1] if facts.views else None)
        seen = view is not None and view.n >= limits.FEWEST_ANSWERS and view.form is not None
        level = 1.0 - (view.form or 0.0) if seen and view is not None else None
        level = level if level is not None and level > limits.UNPARSED else None
    if level is None:
        return None
    views = [view for view in (*facts.views, facts.exam) if view is not None and view.form_name]
    name = views[-1].form_name if views else ""
    evidence = {
        "unparsed_share": level,
        "metric": name,
        "unparsed_start": mean_or_none(lost[:3]),
        "truncated_share": mean_or_none(window(facts.of_views("cut"))),
    }
    what = f"The scorer's {name} is {1 - level:.2f}: {level:.0%} of the answers cannot be read."
    if 1.0 - level <= limits.PARSED_NEVER and facts.algorithm == "grpo":
        edit = 'show the form first, by SFT on reference answers (algorithm="sft")'
    else:
        edit = "score(): read the right answers that miss the form, or ask for it in the prompt"
    return Finding("unparsed", what, evidence, edit_lever(edit), "rewards", "worst", f"{name} < 1")


def _wrapped(facts: Facts) -> Finding | None:
    """Answers in a wrapping (a code fence, say) that the scorer pays less than bare ones."""
    shares = facts.of_views("wrapped")
    level = stuck_at(shares, limits.UNPARSED) if facts.algorithm == "grpo" else None
    inside, bare = (
        mean_or_none(facts.recent_views("wrapped_reward")),
        mean_or_none(facts.recent_views("bare_reward")),
    )
    if level is None or inside is None or bare is None or bare <= 0:
        return None
    if inside > limits.WRAPPED_PAYS * bare:
        return None
    evidence = {"wrapped_share": level, "reward_wrapped": inside, "reward_bare": bare}
    what = (
        f"{level:.0%} of the answers stand in a code fence, quotes or behind a phrase, and earn "
        f"{inside:.2g} where bare ones earn {bare:.2g}."
    )
    lever = edit_lever("score(): take the answer out of its wrapping before comparing")
    return Finding("unparsed", what, evidence, lever, "rewards", "worst")
