"""Detectors of faults in what the model writes: answers that are cut, overlong thinking,
repetition, unreadable answers. Each returns a finding, or None where it sees no fault."""

from collections.abc import Mapping

from engine.evidence.detect.findings import Finding, edit_lever, setting_lever
from engine.evidence.detect.groups import is_learning
from engine.evidence.detect.setbacks import cut_is_paid
from engine.evidence.detect.views import AT_START, Facts, mean, mean_or_none, stuck_at, window
from engine.evidence.stats import thresholds as limits


def truncation(facts: Facts) -> Finding | None:
    """Detect that too many answers are cut by `max_tokens` or run out of turns.

    What is looked at depends on the kind of run:
        grpo: the answers of the last steps.
        sft: training rows cut at `max_length`, else the answers of the last exam.
        evaluate: the answers of the evaluation.

    None where few are cut. Also None where the answers grew longer for a reason that more room does
    not mend (see `length_grew`).
    """
    if facts.algorithm == "sft":
        return _cut_rows(facts) or _cut_exam(facts)
    if facts.algorithm == "evaluate":
        return _cut_exam(facts)
    cut_share = stuck_at(facts.series("truncated_share"), limits.TRUNCATED)
    if cut_share is None or _why_longer(facts):
        return None
    out_of_turns_share = mean_or_none(window(facts.of_views("out_of_turns"))) or 0.0
    evidence = {
        "truncated_share": cut_share,
        "out_of_turns": out_of_turns_share,
        "length_p95": mean_or_none(facts.recent("length_p95")),
        "max_tokens": facts.settings.max_tokens,
        "reward_when_cut": mean_or_none(window(facts.of_views("cut_reward"))),
        "reward_when_whole": mean_or_none(window(facts.of_views("whole_reward"))),
    }
    return _cut_finding(facts, evidence, cut_share, out_of_turns_share, "of the last steps")


def length_grew(facts: Facts) -> Finding | None:
    """Detect answers that are cut because length is rewarded or grew during training.

    None where few answers are cut, or where they may simply need more room (then see `truncation`).
    """
    cut_share = stuck_at(facts.series("truncated_share"), limits.TRUNCATED)
    reason = _why_longer(facts)
    if cut_share is None or not reason:
        return None
    max_tokens = facts.settings.max_tokens
    length_start, cut_share_start = _level_at_start(facts)
    evidence = {
        "truncated_share": cut_share,
        "truncated_share_start": cut_share_start,
        "length_start": length_start,
        "length": mean(window(facts.of_views("length"))),
        "max_tokens": max_tokens,
        "gold_tokens": facts.gold_tokens,
        "reward_when_cut": mean_or_none(window(facts.of_views("cut_reward"))),
        "reward_when_whole": mean_or_none(window(facts.of_views("whole_reward"))),
    }
    what = (
        f"{cut_share:.0%} of the answers of the last steps are cut at max_tokens = "
        f"{max_tokens}, and {reason}."
    )
    edit = "score(): pay nothing for length, and nothing for an answer that is cut; not max_tokens"
    return Finding(
        "length_grew", what, evidence, edit_lever(edit), playbook="rewards", pick="truncated"
    )


def _why_longer(facts: Facts) -> str:
    """Why answers are cut for another reason than a lack of room, as the end of a sentence.

    For example "at the start 2% were: their length grew from 80 to 210". "" where more room may be
    what is needed: answers run out of turns, or get longer while more of them become right.
    """
    lengths = facts.of_views("length")
    # Without the reward of answers that are not cut there is nothing to compare with.
    whole_answers_known = mean_or_none(window(facts.of_views("whole_reward"))) is not None
    cut_answers_paid = whole_answers_known and cut_is_paid(facts)
    # With many answers out of turns the cuts are not mainly about length.
    if (mean_or_none(window(facts.of_views("out_of_turns"))) or 0.0) > 0.5 * limits.TRUNCATED:
        return ""
    # In a run that learns, and does not pay cut answers, longer answers may simply be better ones.
    if len(lengths) >= limits.LEAST and (cut_answers_paid or not is_learning(facts)):
        length_start, cut_share_start = _level_at_start(facts)
        length_now = mean(window(lengths))
        if cut_share_start <= limits.TRUNCATED and length_now >= limits.LENGTH_UP * length_start:
            return (
                f"at the start {cut_share_start:.0%} were: their length grew from "
                f"{length_start:.3g} to {length_now:.3g}"
            )
    return "earn as much as the others, though hardly one is right" if cut_answers_paid else ""


def _level_at_start(facts: Facts) -> tuple[float, float]:
    """(mean length in tokens, share of cut answers) at the start of the run.

    Each is the larger one of two values, that of the exam before training and that of the first
    rollouts: the exam is greedy, and sampled answers are longer without any training.
    """
    lengths, cut_shares = facts.of_views("length"), facts.of_views("cut")
    if facts.exam_start is None:
        return mean(lengths[:AT_START]), mean(cut_shares[:AT_START])
    length = max([facts.exam_start.length, *lengths[:1]])
    cut_share = max([facts.exam_start.cut, *cut_shares[:1]])
    return length, cut_share


def _cut_exam(facts: Facts) -> Finding | None:
    """Detect too many cut answers in the last exam, or among the answers of an evaluation run.

    None where few are cut, or where there are too few answers to tell.
    """
    view = facts.exam or (facts.views[-1] if facts.views else None)
    if view is None or view.n < limits.FEWEST_ANSWERS or view.cut <= limits.TRUNCATED:
        return None
    evidence = {
        "truncated_share": view.cut,
        "out_of_turns": view.out_of_turns,
        "answers": view.n,
        "max_tokens": facts.settings.max_tokens,
        "reward_when_cut": view.cut_reward,
        "reward_when_whole": view.whole_reward,
    }
    if facts.algorithm == "sft":
        what = f"{view.cut:.0%} of the held-out answers after training do not come to an end."
        lever = edit_lever(
            "reference answers that end where the answer ends, none cut at max_length"
        )
        return Finding("truncation", what, evidence, lever, playbook="sft", pick="truncated")
    return _cut_finding(facts, evidence, view.cut, view.out_of_turns, "of the evaluation")


def _cut_finding(
    facts: Facts,
    evidence: Mapping[str, object],
    cut_share: float,
    out_of_turns_share: float,
    when: str,
) -> Finding:
    """The finding that answers are cut, with the limit to raise as its lever.

    The limit is the number of turns if it causes most of the cuts, else the number of tokens. Where
    the reference answers fit easily and the model does not think first, the advice is to shorten
    the answers instead.

    Args:
        evidence: the numbers of the finding; the length of reference answers is added to them.
        when: which answers, such as "of the last steps".
    """
    if out_of_turns_share > cut_share / 2:
        current_limit = facts.settings.max_turns
        what = (
            f"{cut_share:.0%} of the answers {when} ran out of turns (max_turns = {current_limit})."
        )
        lever = setting_lever(
            "max_turns",
            current_limit,
            2 * current_limit if isinstance(current_limit, int) else None,
        )
    else:
        current_limit, gold_tokens = facts.settings.max_tokens, facts.gold_tokens
        what = f"{cut_share:.0%} of the answers {when} were cut at max_tokens = {current_limit}."
        lever = setting_lever(
            "max_tokens",
            current_limit,
            2 * current_limit if isinstance(current_limit, int) else None,
        )
        gold_fits_easily = (
            gold_tokens is not None
            and isinstance(current_limit, int)
            and gold_tokens <= limits.GOLD_FITS * current_limit
        )
        if gold_tokens is not None and gold_fits_easily and not facts.settings.thinking:
            evidence = {**evidence, "gold_tokens": gold_tokens}
            what += f" Reference answers take {gold_tokens:.0f} tokens."
            edit = "ask for short answers in the prompt, or show them by SFT"
            lever = edit_lever(f"{edit}; more max_tokens only where an answer must be worked out")
    return Finding("truncation", what, evidence, lever, playbook="failures", pick="truncated")


def _cut_rows(facts: Facts) -> Finding | None:
    """Detect that too many training rows of SFT were cut or dropped at `max_length`.

    From a row that is cut the model learns to stop in the middle. None where few rows are cut.
    """
    kept_rows, cut_rows, dropped_rows = facts.rows.rows, facts.rows.truncated, facts.rows.dropped
    if (
        kept_rows + dropped_rows == 0
        or (cut_rows + dropped_rows) / (kept_rows + dropped_rows) <= limits.TRUNCATED
    ):
        return None
    share = (cut_rows + dropped_rows) / (kept_rows + dropped_rows)
    max_length = facts.settings.max_length
    evidence = {
        "rows": kept_rows + dropped_rows,
        "cut": cut_rows,
        "dropped": dropped_rows,
        "max_length": max_length,
    }
    what = f"{share:.0%} of the training rows were cut or dropped at max_length = {max_length}."
    lever = setting_lever(
        "max_length", max_length, 2 * max_length if isinstance(max_length, int) else None
    )
    return Finding("truncation", what, evidence, lever, playbook="sft")


def overthinking(facts: Facts) -> Finding | None:
    """Detect think blocks that take so much of `max_tokens` that little is left for the answer.

    None where few answers have a think block, or the blocks are short. The lever is a penalty on
    the length of thinking for GRPO with thinking switched on, else more tokens. The finding counts
    as a root cause where many answers are cut.
    """
    thinking_shares, think_sizes = facts.recent_views("thinking"), facts.recent_views("think")
    if not thinking_shares or mean(thinking_shares) < limits.THINKING_AT_ALL or not think_sizes:
        return None
    think_size = mean(think_sizes)
    if think_size <= limits.THINK_BUDGET:
        return None
    cut_share = mean_or_none(facts.recent_views("cut")) or 0.0
    evidence = {
        "think_of_max_tokens": think_size,
        "thinking_share": mean(thinking_shares),
        "truncated_share": cut_share,
        "reward_when_cut": mean_or_none(facts.recent_views("cut_reward")),
        "reward_when_whole": mean_or_none(facts.recent_views("whole_reward")),
        "max_tokens": facts.settings.max_tokens,
    }
    max_tokens = facts.settings.max_tokens
    what = f"The median think block takes {think_size:.0%} of max_tokens = {max_tokens}."
    if facts.settings.thinking and facts.algorithm == "grpo":
        penalty = facts.settings.thinking_length_penalty or 0.0
        # Twice as much, between 0.1 and 1.
        lever = setting_lever("thinking_length_penalty", penalty, min(1.0, max(0.1, 2 * penalty)))
    else:
        lever = setting_lever(
            "max_tokens", max_tokens, 2 * max_tokens if isinstance(max_tokens, int) else None
        )
    return Finding(
        "overthinking",
        what,
        evidence,
        lever,
        playbook="failures",
        pick="truncated",
        root=cut_share > limits.TRUNCATED,
    )


def repetition(facts: Facts) -> Finding | None:
    """Detect answers that repeat phrases: far more than at the start, or heavily from the start on.

    What is measured is the share of four-word phrases that repeat an earlier one. An evaluation has
    no start, so only heavy repetition counts there. None where answers repeat little.
    """
    values = facts.of_views("repeated")
    recent = facts.recent_views("repeated")
    if not recent:
        return None
    share, share_start = mean(recent), mean(values[:AT_START])
    from_start = share_start >= limits.REPEATED_FROM_START or facts.algorithm == "evaluate"
    has_grown = share >= max(limits.REPEATED, limits.REPEATED_TIMES * share_start)
    if not (has_grown or (from_start and share >= limits.REPEATED_FROM_START)):
        return None
    evidence = {
        "repeated_share": share,
        "repeated_share_start": share_start,
        "length_mean": mean_or_none(facts.recent("length_mean")),
        "kl_coef": facts.settings.kl_coef,
        "temperature": facts.settings.temperature,
    }
    what = f"{share:.0%} of the four-word phrases of an answer repeat an earlier one"
    if from_start:
        edit = "a base or an SFT start that ends its answers; max_tokens near what an answer needs"
        lever = edit_lever(edit)
        what += ", and did so from the start."
    else:
        what += f"; at the start {share_start:.0%} did."
        kl_coef = facts.settings.kl_coef or 0.0
        lever = setting_lever(
            "kl_coef", kl_coef, max(0.02, 2 * kl_coef), "and start from before it began"
        )
    return Finding("repetition", what, evidence, lever, playbook="failures", pick="worst")


def unparsed(facts: Facts) -> Finding | None:
    """Detect answers that the scorer cannot read, or pays less because they are wrapped.

    None where it reads them and pays them alike.
    """
    return _unreadable_form(facts) or _wrapping_paid_less(facts)


def _unreadable_form(facts: Facts) -> Finding | None:
    """Detect that, by the scorer's own metric, it cannot read many of the answers.

    For GRPO the level counts at which training is stuck; in the first half of a run only a high
    level does. For other runs the last exam or evaluation counts, if it has enough answers. None
    where the level is low or not measured.
    """
    unread_shares = [1.0 - value for value in facts.of_views("form")]
    if facts.algorithm == "grpo":
        unread_share = stuck_at(unread_shares, limits.UNPARSED)
        if unread_share is not None and unread_share <= limits.TOO_MUCH_TO_WAIT and facts.early:
            return None  # training usually teaches the form first; give it time
    else:
        view = facts.exam or (facts.views[-1] if facts.views else None)
        unread_share = None
        if view is not None and view.n >= limits.FEWEST_ANSWERS and view.form is not None:
            share = 1.0 - view.form
            unread_share = share if share > limits.UNPARSED else None
    if unread_share is None:
        return None
    # The name of the scorer's metric, as the last view that has one gives it.
    views = [view for view in (*facts.views, facts.exam) if view is not None and view.form_name]
    metric = views[-1].form_name if views else ""
    evidence = {
        "unparsed_share": unread_share,
        "metric": metric,
        "unparsed_start": mean_or_none(unread_shares[:AT_START]),
        "truncated_share": mean_or_none(window(facts.of_views("cut"))),
    }
    what = (
        f"The scorer's {metric} is {1 - unread_share:.2f}: {unread_share:.0%} of the answers "
        "cannot be read."
    )
    if 1.0 - unread_share <= limits.PARSED_NEVER and facts.algorithm == "grpo":
        edit = 'show the form first, by SFT on reference answers (algorithm="sft")'
    else:
        edit = "score(): read the right answers that miss the form, or ask for it in the prompt"
    return Finding(
        "unparsed",
        what,
        evidence,
        edit_lever(edit),
        playbook="rewards",
        pick="worst",
        where=f"{metric} < 1",
    )


def _wrapping_paid_less(facts: Facts) -> Finding | None:
    """Detect answers in a wrapping (a code fence, say) that are paid much less than bare ones.

    None where few are wrapped or the pay is similar. Only GRPO runs are judged: other runs have no
    series that shows whether the level persists.
    """
    wrapped_shares = facts.of_views("wrapped")
    wrapped_share = stuck_at(wrapped_shares, limits.UNPARSED) if facts.algorithm == "grpo" else None
    reward_wrapped = mean_or_none(facts.recent_views("wrapped_reward"))
    reward_bare = mean_or_none(facts.recent_views("bare_reward"))
    if wrapped_share is None or reward_wrapped is None or reward_bare is None or reward_bare <= 0:
        return None
    if reward_wrapped > limits.WRAPPED_PAYS * reward_bare:
        return None
    evidence = {
        "wrapped_share": wrapped_share,
        "reward_wrapped": reward_wrapped,
        "reward_bare": reward_bare,
    }
    what = (
        f"{wrapped_share:.0%} of the answers stand in a code fence, quotes or behind a phrase, "
        f"and earn {reward_wrapped:.2g} where bare ones earn {reward_bare:.2g}."
    )
    lever = edit_lever("score(): take the answer out of its wrapping before comparing")
    return Finding("unparsed", what, evidence, lever, playbook="rewards", pick="worst")
