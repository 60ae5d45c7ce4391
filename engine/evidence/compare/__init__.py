"""Comparing models on the same tasks: candidates, seeds, and what differs in their settings. Start
with `compare.py`.

    by_metadata.py    results by a key of the tasks' metadata
    candidate_rows.py  a row for each model, and how it compares with the first
    candidates.py     which evaluations an id stands for
    compare.py        two to eight models on the same tasks
    described.py      what two trainings were told, side by side
    further_evidence.py  what would settle an inconclusive comparison
    named_metric.py   rows judged by a named metric of the environment
    rank_changes.py   how a new reward changes the order of models, tasks and attempts
    remarks.py        what stands beside a comparison
    seeds.py          seeds of one configuration as a group
    settings_diff.py  what was changed between two models
    unevaluated.py    what can be said of runs without an evaluation
"""
