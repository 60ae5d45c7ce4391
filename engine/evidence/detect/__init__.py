"""Detectors: what goes wrong in a run, with numbers and what to change. Start with `views.py` for
what they read, and with `diagnose.py` for how their findings become a result.

    alerts.py     the same detectors while a run is going on
    answers.py    detectors: truncation, grown lengths, overthinking, repetition, unparsed
    baseline.py   step 0, and the later exams compared with it
    detectors.py  every detector by name
    diagnose.py   findings on a run, ranked, with example rollouts
    examples.py   rollouts that show a finding
    findings.py   one cause with its numbers and its lever; their order
    groups.py     detectors: uniform groups, too hard, too easy, solved, entropy collapse
    learning.py   detectors: overfitting, too short, no update, unstable, underpowered, the machine
    scoring.py    detectors: scoring that fails, moves, is slow; plateaus, exploits; falling rewards
    setbacks.py   detectors: below its start, skills forgotten, faults of rows
    views.py      what detectors read: metrics, and each step's answers in a few numbers
"""
