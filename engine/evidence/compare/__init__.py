"""Models side by side on the same tasks: candidates, seeds, what differs in their settings. Start
with `compare.py`.

    candidates.py     which evaluations an id stands for
    compare.py        two to eight models on the same tasks
    rank_changes.py   what a new reward puts in another order
    seeds.py          seeds of one configuration as a group
    settings_diff.py  what was changed between two models
"""
