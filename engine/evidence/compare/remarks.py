"""Remarks beside a comparison: sentences that belong to its verdict, and the call that diagnoses a
model that did not get better."""

import contextlib
from collections.abc import Sequence

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.evidence.compare.candidates import Candidate
from engine.evidence.compare.settings_diff import swapped_base
from engine.evidence.reported import number_to_report
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.side_notes import (
    audit_sentences,
    rival_constant,
    sentences_on,
    tie_sentences,
)
from engine.evidence.verdict.sides import Sides, is_same_checkpoint
from engine.home.hashes import shown
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, redactor_for
from engine.home.store import Store


def notes(home: Home, first: Candidate, other: Candidate, comparison: Comparison) -> list[str]:
    """Sentences beside the verdict: one answer to all tasks that would do as well, what the reward
    did if success is equal, and what a failed reward audit means
    (engine/evidence/verdict/side_notes.py). Returns [] if none applies."""
    sides = Sides(first.rows, other.rows, first.label, other.label)
    config = home.run(other.source).find_config()
    constant = rival_constant(sides, comparison, config)
    return [
        *sentences_on(constant),
        *tie_sentences(sides, comparison),
        *audit_sentences(config),
    ]


def numbers_to_report(home: Home, candidates: Sequence[Candidate]) -> list[str]:
    """Sentences with the numbers to report of trained models, if those were measured in another
    evaluation than the one compared here. (A comparison uses only tasks that all models
    answered.)"""
    sentences = []
    with Store(home) as store:
        for candidate in candidates:
            if candidate.members or not candidate.run_id:
                continue  # several seeds together, or a model that no run trained
            answered_in_training = candidate.source == candidate.run_id
            ref, _, _ = candidate.label.partition(" in ")  # a label may be "r-1@best in r-1"
            best_ref = f"{candidate.run_id}@best"
            if answered_in_training and is_same_checkpoint(home, ref, best_ref):
                sentences += _number_elsewhere(home, store, candidate)
    return sentences


def swapped_bases(home: Home, candidates: Sequence[Candidate]) -> list[str]:
    """A sentence for each candidate whose base model has the name of the base of the first
    candidate, but other weights."""
    first, *others = candidates
    sentences = []
    for other in others:
        bases = swapped_base(home, first, other)
        if bases is not None:
            before, after = bases
            sentences.append(
                f"{other.label} and {first.label} do not rest on one base: {before.folder} had the "
                f"weights {shown(after.weights)} for {other.label} and {shown(before.weights)} for "
                f"{first.label} (SHA-256). What differs may be the base alone."
            )
    return sentences


def _number_elsewhere(home: Home, store: Store, candidate: Candidate) -> list[str]:
    """A sentence with the number to report of a candidate's run, if it was measured in another run
    than the candidate's answers. Returns [] otherwise."""
    number = number_to_report(home, store, store.get_run(candidate.run_id))
    if number is None or number.measured_in == candidate.source:
        return []
    return [f"{number.sentence} It is of {number.measured_in}, not of this comparison."]


def diagnosis(home: Home, other: Candidate, comparison: Comparison) -> list[Call]:
    """The call that diagnoses the run of `other`, as a list of one, if its model is not better than
    the first. Returns [] if it is better or came out as was expected of it at submit, or if `other`
    stands for several seeds or for no run."""
    if comparison.outcome.verdict == "better" or other.members:
        return []
    run_id, _, _ = other.label.partition("@")  # a label may be "r-1@step20"
    with Store(home) as store, contextlib.suppress(UserError):  # raised if no run has this id
        row = store.get_run(run_id)
        # `get_run` also accepts a unique beginning of an id, which must not count here.
        if row.run_id == run_id and row.expect != comparison.outcome.verdict:
            return [Call("diagnose", {"run_id": run_id})]
    return []


def redactor_of(home: Home, run_id: str) -> Redactor:
    """The redactor (hides secrets) for the environment of a run; a general one if its config is
    missing."""
    config = home.run(run_id).find_config()
    return redactor_for(home, config.env_dir if config else None)
