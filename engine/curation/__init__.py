"""Answers become training rows: which runs left them, which are chosen, how they are pushed. Start
with `curate.py`.

    curate.py     what a model did well becomes training rows
    curated.py    those rows and the held-out tasks as a dataset, pushed
    selection.py  rules over a task's attempts, choices within them
    sources.py    answers that runs left: attempts to curate, files to score again
    training_traces.py  rollouts with their tokens, for other trainers
"""
