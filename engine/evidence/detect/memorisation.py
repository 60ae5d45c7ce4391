"""Detector of rows learnt by heart: their loss is next to nothing, and held-out rows gain nothing
more."""

from engine.core.format import whole_percent
from engine.evidence.detect.findings import Finding, edit_lever
from engine.evidence.detect.views import Facts
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.trends import recent_mean


def memorised_rows(facts: Facts) -> Finding | None:
    """Detect an SFT run that knows its rows by heart and solves few held-out tasks.

    Its training loss is a small part of the held-out loss, which no longer falls: what the rows
    have in common is learnt, and what differs between them does not come from more of the same
    steps. Where the held-out loss rises, `overfitting` is reported instead.

    Returns None for a run that is not finished, that solves most of the tasks, that saw its rows a
    few times only, or if one of the numbers is not known.
    """
    solved_shares = facts.curve_values("heldout_success")
    if facts.comparison is None or not solved_shares:
        return None
    if solved_shares[-1] > limits.MEMORISED_SOLVED_SHARE:
        return None
    passes = facts.passes_over_rows
    if passes < limits.SEVERAL_PASSES:
        return None
    training_loss = recent_mean(facts.series("loss"))
    heldout_losses = facts.curve_values("heldout_loss")
    if training_loss is None or len(heldout_losses) < limits.FEWEST_EVALUATIONS:
        return None
    heldout_loss, halfway_loss = heldout_losses[-1], heldout_losses[(len(heldout_losses) - 1) // 2]
    is_known_by_heart = training_loss <= limits.MEMORISED_LOSS_PART * heldout_loss
    still_falls = heldout_loss <= (1 - limits.STILL_FALLING_PART) * halfway_loss
    if not is_known_by_heart or still_falls:
        return None
    return _finding(facts, training_loss, heldout_loss, solved_shares[-1], passes)


def _finding(
    facts: Facts, training_loss: float, heldout_loss: float, solved_share: float, passes: float
) -> Finding:
    """The finding, with the advice to show more different rows.

    Both losses are in nats per token; `passes` is how often each row was seen.
    """
    rows = facts.training_rows.rows
    evidence = {
        "loss": training_loss,
        "heldout_loss": heldout_loss,
        "heldout_success": solved_share,
        "rows": rows,
        "passes": passes,
    }
    sentence = (
        f"The {rows:,} rows are known by heart after {passes:.2g} passes (loss "
        f"{training_loss:.2g}), the held-out loss rests at {heldout_loss:.2g}, and "
        f"{whole_percent(solved_share)} of the held-out tasks are solved."
    )
    lever = edit_lever(
        f"more different rows (say {limits.MORE_ROWS_FACTOR * rows:,}): other values of what the "
        "answer depends on; more steps over these teach nothing new"
    )
    return Finding("memorised_rows", sentence, evidence, lever, playbook="sft", examples="worst")
