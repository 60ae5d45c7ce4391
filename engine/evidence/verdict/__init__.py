"""One word per run and what it rests on: lineage, skills kept, reuse of held-out tasks, provenance.
Start with `verdict.py`.

    comparison.py     two evaluations of the same tasks, compared
    contamination.py  held-out tasks in training rows
    flips.py          tasks whose result changed, with both answers
    fresh_scores.py   what a fresh env process says of a run's answers
    holdout_reuse.py  how often held-out tasks were used to choose
    lineage.py        where a run's model comes from, and whether to go on from it
    provenance.py     the seal of a finished run, and whether it still holds
    regression.py     skills of before, compared with after; replayed rows as the remedy
    row_facts.py      the rows of a run in numbers: copies, contradictions, an exam of other words
    side_notes.py     beside the verdict: the reward where success ties, the audit's word
    sides.py          which rows a verdict compares
    verdict.py        one word per run, from its files
"""
