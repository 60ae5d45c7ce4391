"""Detectors of faults in what the model writes: answers that are cut, overlong thinking,
repetition, answers that the scorer cannot parse. Each returns a finding, or None if it sees no
fault."""

import math
from collections.abc import Mapping

from engine.core.format import whole_percent
from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.learning import too_short
from engine.evidence.detect.setbacks import cut_is_paid
from engine.evidence.detect.views import START_STEPS, Facts, is_learning, never_solved
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.trends import level_if_lasting, mean, mean_or_none, recent_mean
from engine.records.settings import ROW_ALGORITHMS, SAMPLING_ALGORITHMS


def truncation(facts: Facts) -> Finding | None:
    """Detect that too many answers, or training rows, are cut by a limit on length or turns.

    Returns None if few are cut, and if the answers grew longer for a reason that a higher limit
    does not mend (see `length_grew`).
    """
    if facts.algorithm in ROW_ALGORITHMS:
        return _cut_rows(facts) or _cut_heldout_answers(facts)
    if facts.algorithm == "evaluate":
        return _cut_heldout_answers(facts)
    cut_share = level_if_lasting(facts.series("truncated_share"), limits.HIGH_CUT_SHARE)
    if cut_share is None:
        return _no_room_from_the_start(facts)
    if _reason_beyond_limit(facts) and not _reference_is_cut(facts):
        return None  # the detector `length_grew` reports these cuts
    out_of_turns_share = recent_mean(facts.view_values("out_of_turns_share")) or 0.0
    evidence = {
        "truncated_share": cut_share,
        "out_of_turns": out_of_turns_share,
        "length_p95": recent_mean(facts.series("length_p95")),
        "max_tokens": facts.settings.max_tokens,
        "reward_when_cut": recent_mean(facts.view_values("cut_reward")),
        "reward_when_whole": recent_mean(facts.view_values("uncut_reward")),
    }
    return _cut_finding(facts, evidence, cut_share, out_of_turns_share, which="of the last steps")


def length_grew(facts: Facts) -> Finding | None:
    """Detect answers that are cut because length is rewarded or grew during training.

    Returns None if few answers are cut, or if they may simply need a higher limit (see
    `truncation`).
    """
    cut_share = level_if_lasting(facts.series("truncated_share"), limits.HIGH_CUT_SHARE)
    reason = _reason_beyond_limit(facts)
    if cut_share is None or not reason or _reference_is_cut(facts):
        return None  # the detector `truncation` reports other cuts
    sentence = (
        f"{whole_percent(cut_share)} of the answers of the last steps are cut at max_tokens = "
        f"{facts.settings.max_tokens}, and {reason}."
    )
    lever = edit_lever(
        "score(): pay nothing for length, and nothing for an answer that is cut; not max_tokens"
    )
    evidence = _length_evidence(facts, cut_share)
    return Finding(
        "length_grew", sentence, evidence, lever, playbook="rewards", examples="truncated"
    )


def _length_evidence(facts: Facts, cut_share: float) -> dict[str, object]:
    """The numbers, by name, on answers that are cut because they grew, or because length is
    rewarded."""
    length_start, cut_share_start = _level_at_start(facts)
    return {
        "truncated_share": cut_share,
        "truncated_share_start": cut_share_start,
        "length_start": length_start,
        "length": recent_mean(facts.view_values("mean_tokens")),
        "max_tokens": facts.settings.max_tokens,
        "gold_tokens": facts.gold_tokens,
        "reward_when_cut": recent_mean(facts.view_values("cut_reward")),
        "reward_when_whole": recent_mean(facts.view_values("uncut_reward")),
    }


def _reason_beyond_limit(facts: Facts) -> str:
    """Why answers are cut although the limit is high enough, as the end of a sentence.

    Returns "" if a higher limit may be what is needed: answers run out of turns, or they get longer
    while more of them become right.
    """
    out_of_turns_share = recent_mean(facts.view_values("out_of_turns_share")) or 0.0
    if out_of_turns_share > 0.5 * limits.HIGH_CUT_SHARE:  # the cuts are not mainly about length
        return ""
    # Whether cut answers are paid can be told only by comparison with answers that are not cut.
    uncut_reward_known = recent_mean(facts.view_values("uncut_reward")) is not None
    cut_answers_paid = uncut_reward_known and cut_is_paid(facts)
    # In a run that learns, and does not pay cut answers, longer answers may simply be better ones.
    growth_counts = cut_answers_paid or not is_learning(facts)
    growth = _growth_text(facts) if growth_counts else ""
    if growth:
        return growth
    return "earn as much as the others, though hardly one is right" if cut_answers_paid else ""


def _growth_text(facts: Facts) -> str:
    """The remark that few answers were cut at the start, but that they grew much longer since.

    For example "at the start 2% were: their length grew from 80 to 210". Returns "" if that is not
    so, or if the lengths are not known.
    """
    length = recent_mean(facts.view_values("mean_tokens"))
    if length is None:
        return ""
    length_start, cut_share_start = _level_at_start(facts)
    if cut_share_start > limits.HIGH_CUT_SHARE or length < limits.LONGER_FACTOR * length_start:
        return ""
    return (
        f"at the start {whole_percent(cut_share_start)} were: their length grew from "
        f"{length_start:.3g} to {length:.3g}"
    )


def _level_at_start(facts: Facts) -> tuple[float, float]:
    """(mean length in tokens, share of cut answers) at the start of the run.

    Each number is that of the held-out answers before training, or of the first rollouts if that is
    larger. Without held-out answers it is the mean of the first steps.
    """
    lengths, cut_shares = facts.view_values("mean_tokens"), facts.view_values("cut_share")
    heldout = facts.exam_start
    if heldout is None:
        return mean(lengths[:START_STEPS]), mean(cut_shares[:START_STEPS])
    # The larger one, because held-out answers are greedy, and sampled ones are longer even without
    # training. `[:1]` because there may be no rollouts.
    length_start = max([heldout.mean_tokens, *lengths[:1]])
    cut_share_start = max([heldout.cut_share, *cut_shares[:1]])
    return length_start, cut_share_start


def _cut_heldout_answers(facts: Facts) -> Finding | None:
    """Detect too many cut answers among the last held-out ones, or among those of an evaluation
    run.

    Returns None if few are cut, or if there are too few answers to tell.
    """
    view = facts.last_answers
    if view is None or view.answer_count < limits.FEWEST_ANSWERS:
        return None
    if view.cut_share <= limits.HIGH_CUT_SHARE:
        return None
    evidence = {
        "truncated_share": view.cut_share,
        "out_of_turns": view.out_of_turns_share,
        "answers": view.answer_count,
        "max_tokens": facts.settings.max_tokens,
        "reward_when_cut": view.cut_reward,
        "reward_when_whole": view.uncut_reward,
    }
    if facts.algorithm in ROW_ALGORITHMS:
        if too_short(facts) is not None:
            return None  # a model learns last where an answer ends: it only needs more training
        sentence = (
            f"{whole_percent(view.cut_share)} of the held-out answers after training do not "
            "come to an end."
        )
        lever = edit_lever(
            "reference answers that end where the answer ends, none cut at max_length"
        )
        return Finding(
            "truncation", sentence, evidence, lever, playbook="sft", examples="truncated"
        )
    return _cut_finding(
        facts, evidence, view.cut_share, view.out_of_turns_share, which="of the evaluation"
    )


def _cut_finding(
    facts: Facts,
    evidence: Mapping[str, object],
    cut_share: float,
    out_of_turns_share: float,
    *,
    which: str,
) -> Finding:
    """The finding that answers are cut, with the advice to raise the limit that cuts most of them:
    the one on turns (`max_turns`), else the one on tokens (`max_tokens`).

    Args:
        evidence: the numbers of the finding; the length of reference answers may be added.
        cut_share, out_of_turns_share: the share of answers cut, and the share cut by the limit on
            turns.
        which: which answers, such as "of the last steps".
    """
    max_turns = facts.settings.max_turns
    if out_of_turns_share > cut_share / 2:
        sentence = (
            f"{whole_percent(cut_share)} of the answers {which} ran out of turns (max_turns = "
            f"{max_turns})."
        )
        lever = setting_lever("max_turns", now=max_turns, to=_doubled(max_turns))
        return Finding(
            "truncation", sentence, evidence, lever, playbook="failures", examples="truncated"
        )
    return _out_of_tokens_finding(
        facts, evidence, f"{whole_percent(cut_share)} of the answers {which}"
    )


def _out_of_tokens_finding(facts: Facts, evidence: Mapping[str, object], subject: str) -> Finding:
    """The finding that answers are cut at `max_tokens`, with the advice for one of three cases:

    - the reference answers are cut too: raise the limit to what they need;
    - they fit easily and the model does not think first: ask for shorter answers;
    - otherwise: double the limit.

    `subject` begins the sentence, such as "20% of the answers".
    """
    max_tokens, gold_tokens = facts.settings.max_tokens, facts.gold_tokens
    sentence = f"{subject} were cut at max_tokens = {max_tokens}."
    if _reference_is_cut(facts) and gold_tokens is not None:
        return _no_room_finding(facts, evidence, sentence, gold_tokens)
    if _references_fit_easily(facts) and not facts.settings.thinking:
        evidence = {**evidence, "gold_tokens": gold_tokens}
        sentence += f" Reference answers take {gold_tokens:.0f} tokens."
        edit = "ask for short answers in the prompt, or show them by SFT"
        lever = edit_lever(f"{edit}; more max_tokens only where an answer must be worked out")
    else:
        lever = setting_lever("max_tokens", now=max_tokens, to=_doubled(max_tokens))
    return Finding(
        "truncation", sentence, evidence, lever, playbook="failures", examples="truncated"
    )


def _reference_is_cut(facts: Facts) -> bool:
    """Whether the usual reference answer needs more than `max_tokens`, so that it would be cut.
    False if either number is not known."""
    gold_tokens, max_tokens = facts.gold_tokens, facts.settings.max_tokens
    return gold_tokens is not None and isinstance(max_tokens, int) and gold_tokens > max_tokens


def _no_room_finding(
    facts: Facts, evidence: Mapping[str, object], sentence: str, gold_tokens: float
) -> Finding:
    """The finding that no right answer fits into max_tokens: a cause, whatever else is wrong.

    Args:
        evidence: the numbers that the finding shows.
        sentence: what was observed, in words.
        gold_tokens: tokens that nearly all reference answers stay below.
    """
    needed_tokens = math.ceil(gold_tokens)
    lever = setting_lever(
        "max_tokens",
        now=facts.settings.max_tokens,
        to=math.ceil(limits.ROOM_FACTOR * needed_tokens),
        why="no reference answer fits: nothing else can be judged before",
    )
    return Finding(
        "truncation",
        f"{sentence} Reference answers take {needed_tokens} tokens: a right answer cannot end.",
        {**evidence, "gold_tokens": gold_tokens},
        lever,
        playbook="failures",
        examples="truncated",
        is_cause=True,
    )


def _no_room_from_the_start(facts: Facts) -> Finding | None:
    """Detect that no reference answer fits into max_tokens and no answer is ever right, in a run
    whose answers do end.

    Returns None if reference answers fit, if their length is not known, or if tasks were solved.
    """
    gold_tokens = facts.gold_tokens
    if gold_tokens is None or not _reference_is_cut(facts) or not never_solved(facts):
        return None
    evidence = {
        "truncated_share": recent_mean(facts.series("truncated_share")),
        "length_p95": recent_mean(facts.series("length_p95")),
        "max_tokens": facts.settings.max_tokens,
    }
    sentence = f"No answer is right at max_tokens = {facts.settings.max_tokens}."
    return _no_room_finding(facts, evidence, sentence, gold_tokens)


def uncut_answers_fail_too(facts: Facts) -> bool:
    """Whether answers that come to an end are never right either, though the limit is high enough.

    Returns False if too few of the last answers end to tell, if turns run out, if the model thinks
    first, or if it is not known that the reference answers fit easily.
    """
    views = facts.views[-limits.RECENT_STEPS :]
    uncut_count = sum(view.answer_count * (1 - view.cut_share) for view in views)
    if uncut_count < limits.FEWEST_ANSWERS or facts.settings.thinking:
        return False
    if any(view.out_of_turns_share for view in views):
        return False
    solved_count = sum(view.answer_count * (view.solved_share or 0.0) for view in views)
    if solved_count > limits.HARDLY_SOLVED_SHARE * uncut_count or not never_solved(facts):
        return False
    return _references_fit_easily(facts)


def _references_fit_easily(facts: Facts) -> bool:
    """Whether reference answers need at most half of `max_tokens`. False if either is not known."""
    gold_tokens, max_tokens = facts.gold_tokens, facts.settings.max_tokens
    if gold_tokens is None or not isinstance(max_tokens, int):
        return False
    return gold_tokens <= limits.EASY_FIT_PART * max_tokens


def _doubled(limit: object) -> int | None:
    """Twice a limit; None if it is not a whole number."""
    return 2 * limit if isinstance(limit, int) else None


def _cut_rows(facts: Facts) -> Finding | None:
    """Detect that too many training rows of SFT were cut or dropped at `max_length` (in tokens).

    From a row that is cut, the model learns to stop in the middle. Returns None if few rows are
    cut, or if the rows were not counted.
    """
    counts = facts.training_rows
    row_count = counts.rows + counts.dropped  # `counts.rows` are those that were trained on
    if not row_count:
        return None
    cut_or_dropped_share = (counts.truncated + counts.dropped) / row_count
    if cut_or_dropped_share <= limits.HIGH_CUT_SHARE:
        return None
    max_length = facts.settings.max_length
    evidence = {
        "rows": row_count,
        "cut": counts.truncated,
        "dropped": counts.dropped,
        "max_length": max_length,
    }
    sentence = (
        f"{whole_percent(cut_or_dropped_share)} of the training rows were cut or dropped at "
        f"max_length = {max_length}."
    )
    lever = setting_lever("max_length", now=max_length, to=_doubled(max_length))
    return Finding("truncation", sentence, evidence, lever, playbook="sft", is_cause=True)


def overthinking(facts: Facts) -> Finding | None:
    """Detect think blocks that take so much of `max_tokens` that little is left for the answer.

    Returns None while there are too few steps, if few answers have a think block, or if the blocks
    are short.
    """
    thinking_share = mean_or_none(facts.recent_view_values("thinking_share"))
    think_size = mean_or_none(facts.recent_view_values("think_size"))
    if thinking_share is None or think_size is None:
        return None
    if thinking_share < limits.LEAST_THINKING_SHARE or think_size <= limits.HIGH_THINK_PART:
        return None
    return _overthinking_finding(facts, thinking_share, think_size)


def _overthinking_finding(facts: Facts, thinking_share: float, think_size: float) -> Finding:
    """The finding that think blocks take too many tokens; a known cause if answers are cut too.

    `thinking_share` is the share of answers with a think block, `think_size` the median size of a
    block as a part of `max_tokens`.
    """
    cut_share = mean_or_none(facts.recent_view_values("cut_share")) or 0.0
    max_tokens = facts.settings.max_tokens
    evidence = {
        "think_of_max_tokens": think_size,
        "thinking_share": thinking_share,
        "truncated_share": cut_share,
        "reward_when_cut": mean_or_none(facts.recent_view_values("cut_reward")),
        "reward_when_whole": mean_or_none(facts.recent_view_values("uncut_reward")),
        "max_tokens": max_tokens,
    }
    return Finding(
        "overthinking",
        f"The median think block takes {whole_percent(think_size)} of max_tokens = {max_tokens}.",
        evidence,
        _overthinking_lever(facts),
        playbook="failures",
        examples="truncated",
        is_cause=cut_share > limits.HIGH_CUT_SHARE,
    )


def _overthinking_lever(facts: Facts) -> Lever:
    """The advice (a lever) against long think blocks: for GRPO with thinking switched on, a penalty
    on their length; else a larger `max_tokens`."""
    if facts.settings.thinking and facts.algorithm == "grpo":
        penalty = facts.settings.thinking_length_penalty or 0.0
        new_penalty = min(1.0, max(0.1, 2 * penalty))  # twice as much, between 0.1 and 1
        return setting_lever("thinking_length_penalty", now=penalty, to=new_penalty)
    max_tokens = facts.settings.max_tokens
    return setting_lever("max_tokens", now=max_tokens, to=_doubled(max_tokens))


def repetition(facts: Facts) -> Finding | None:
    """Detect answers that repeat phrases: far more than at the start, or heavily from the start on.

    The measure is the share of four-word phrases that repeat an earlier one. An evaluation has no
    start, so only heavy repetition counts there. Returns None otherwise, and with too few steps.
    """
    recent_shares = facts.recent_view_values("repeated_share")
    if not recent_shares:
        return None
    share = mean(recent_shares)
    share_start = mean(facts.view_values("repeated_share")[:START_STEPS])
    from_start = share_start >= limits.HEAVY_REPEATED_SHARE or facts.algorithm == "evaluate"
    least_grown_share = max(limits.HIGH_REPEATED_SHARE, limits.REPEATED_GROWTH * share_start)
    has_grown = share >= least_grown_share
    is_heavy_from_start = from_start and share >= limits.HEAVY_REPEATED_SHARE
    if not has_grown and not is_heavy_from_start:
        return None
    return _repetition_finding(facts, share, share_start, from_start=from_start)


def _repetition_finding(
    facts: Facts, share: float, share_start: float, *, from_start: bool
) -> Finding:
    """The finding that answers repeat phrases: `share` now, `share_start` in the first steps.

    `from_start` says whether they repeated phrases before any training.
    """
    evidence = {
        "repeated_share": share,
        "repeated_share_start": share_start,
        "length_mean": recent_mean(facts.series("length_mean")),
        "kl_coef": facts.settings.kl_coef,
        "temperature": facts.settings.temperature,
    }
    if from_start:
        since = ", and did so from the start"
    else:
        since = f"; at the start {whole_percent(share_start)} did"
    subject = f"{whole_percent(share)} of the four-word phrases of an answer"
    sentence = f"{subject} repeat an earlier one{since}."
    lever = _repetition_lever(facts.settings.kl_coef or 0.0, from_start=from_start)
    return Finding("repetition", sentence, evidence, lever, playbook="failures", examples="worst")


def _repetition_lever(kl_coef: float, *, from_start: bool) -> Lever:
    """The advice (a lever) against answers that repeat phrases.

    If they did so from the start on, another start model. Else a stronger pull towards the start
    model, which is `kl_coef`: twice as much, and at least 0.02.
    """
    if from_start:
        return edit_lever(
            "a base or an SFT start that ends its answers; max_tokens near what an answer needs"
        )
    new_coef = max(0.02, 2 * kl_coef)
    return setting_lever("kl_coef", now=kl_coef, to=new_coef, why="and start from before it began")


def unparsed(facts: Facts) -> Finding | None:
    """Detect answers that the scorer cannot parse, or that it pays less because they are wrapped.

    Returns None if it parses them and pays them alike.
    """
    return _unreadable_form(facts) or _wrapping_paid_less(facts)


def _unreadable_form(facts: Facts) -> Finding | None:
    """Detect that, by the scorer's own metric, it cannot parse many of the answers.

    Returns None if it parses most of them, or has no such metric.
    """
    unread_share = _unread_share(facts)
    if unread_share is None:
        return None
    metric = _name_of_form_metric(facts)
    # The form score of a step is the share of its answers that the scorer can parse.
    unread_at_start = [1.0 - score for score in facts.view_values("form_score")[:START_STEPS]]
    evidence = {
        "unparsed_share": unread_share,
        "metric": metric,
        "unparsed_start": mean_or_none(unread_at_start),
        "truncated_share": recent_mean(facts.view_values("cut_share")),
    }
    sentence = (
        f"The scorer's {metric} is {1 - unread_share:.2f}: {whole_percent(unread_share)} of the "
        "answers cannot be read."
    )
    lever = _unreadable_lever(facts, unread_share)
    where = f"{metric} < 1"
    return Finding(
        "unparsed", sentence, evidence, lever, playbook="rewards", examples="worst", where=where
    )


def _unreadable_lever(facts: Facts, unread_share: float) -> Lever:
    """The advice (a lever) if the scorer cannot parse `unread_share` of the answers: SFT first, or
    a change of the scorer or the prompt."""
    hardly_any_is_read = 1.0 - unread_share <= limits.HARDLY_PARSED_SHARE
    if hardly_any_is_read and facts.algorithm in SAMPLING_ALGORITHMS:
        return edit_lever('show the form first, by SFT on reference answers (algorithm="sft")')
    return edit_lever(
        "score(): read the right answers that miss the form, or ask for it in the prompt"
    )


def _name_of_form_metric(facts: Facts) -> str:
    """The name of the metric by which the scorer says whether it can parse an answer; "" if there
    is none.

    If several steps name one, the last counts.
    """
    views = [view for view in (*facts.views, facts.exam) if view is not None]
    names = [view.form_metric for view in views if view.form_metric]
    return names[-1] if names else ""


def _unread_share(facts: Facts) -> float | None:
    """The share of answers that the scorer cannot parse, if it is high enough for a finding.

    Else None, also if the share is not known, or if there are too few answers to tell.
    """
    if facts.algorithm in SAMPLING_ALGORITHMS:
        return _lasting_unread_share(facts)
    view = facts.last_answers
    if view is None or view.form_score is None or view.answer_count < limits.FEWEST_ANSWERS:
        return None
    share = 1.0 - view.form_score
    return share if share > limits.HIGH_UNPARSED_SHARE else None


def _lasting_unread_share(facts: Facts) -> float | None:
    """The share of sampled answers that the scorer cannot parse, if it is high and training does
    not reduce it; else None.

    While a run is early, only a very high share (`URGENT_SHARE`) is reported: training usually
    teaches the form first.
    """
    unread_shares = [1.0 - score for score in facts.view_values("form_score")]
    share = level_if_lasting(unread_shares, limits.HIGH_UNPARSED_SHARE)
    can_wait = facts.is_early and share is not None and share <= limits.URGENT_SHARE
    return None if can_wait else share


def _wrapping_paid_less(facts: Facts) -> Finding | None:
    """Detect wrapped answers (in a code fence, for example) that earn much less than unwrapped
    ones.

    Returns None for runs that do not sample, if few answers are wrapped, if unwrapped ones earn
    nothing, or if both earn similar rewards.
    """
    if facts.algorithm not in SAMPLING_ALGORITHMS:  # there is no series of steps to judge by
        return None
    wrapped_share = level_if_lasting(facts.view_values("wrapped_share"), limits.HIGH_UNPARSED_SHARE)
    reward_wrapped = recent_mean(facts.view_values("wrapped_reward"))
    reward_unwrapped = recent_mean(facts.view_values("unwrapped_reward"))
    if wrapped_share is None or reward_wrapped is None or reward_unwrapped is None:
        return None
    if reward_unwrapped <= 0 or reward_wrapped > limits.WRAPPED_REWARD_PART * reward_unwrapped:
        return None
    evidence = {
        "wrapped_share": wrapped_share,
        "reward_wrapped": reward_wrapped,
        "reward_bare": reward_unwrapped,
    }
    sentence = (
        f"{whole_percent(wrapped_share)} of the answers stand in a code fence, quotes or behind a "
        f"phrase, and earn {reward_wrapped:.2g} where bare ones earn {reward_unwrapped:.2g}."
    )
    lever = edit_lever("score(): take the answer out of its wrapping before comparing")
    return Finding("unparsed", sentence, evidence, lever, playbook="rewards", examples="worst")
