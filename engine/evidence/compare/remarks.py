"""What stands beside a comparison: sentences that belong to its verdict, and the call that says why
a model did not get better."""

import contextlib

from engine.core.errors import UserError
from engine.core.hints import Call
from engine.evidence.compare.candidates import Candidate
from engine.evidence.verdict.comparison import Comparison
from engine.evidence.verdict.side_notes import audit_sentences, tie_sentences
from engine.evidence.verdict.sides import Sides
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor, redactor_for
from engine.home.store import Store


def notes(home: Home, first: Candidate, other: Candidate, comparison: Comparison) -> list[str]:
    """What the reward did where success ties, and the word of a failed reward audit, as sentences;
    see verdict/side_notes.py."""
    sides = Sides(first.rows, other.rows, first.label, other.label)
    config = home.run(other.source).find_config()
    return [*tie_sentences(sides, comparison), *audit_sentences(config)]


def diagnosis(home: Home, other: Candidate, comparison: Comparison) -> list[Call]:
    """Where a run's model did not get better, the call that says why; else []."""
    if comparison.outcome.verdict == "better" or other.members:
        return []
    run_id = other.label.partition("@")[0]
    with Store(home) as store, contextlib.suppress(UserError):  # it may be no run
        if store.get_run(run_id).run_id == run_id:
            return [Call("diagnose", {"run_id": run_id})]
    return []


def redactor_of(home: Home, run_id: str) -> Redactor:
    """The redactor for the environment of a run; a general one where its config is gone."""
    config = home.run(run_id).find_config()
    return redactor_for(home, config.env_dir if config else None)
