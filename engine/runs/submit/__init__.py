"""Queuing work. Everything is resolved and refused here, before a row exists: a run that is queued
can start. Used by `runs` alone; start with `requests.py`, then `training.py`.

    admission.py      what may not be queued: too dear, too large, too risky
    cautions.py       what earlier runs say against a new one
    contamination.py  which held-out tasks a model was taught, by version and by descent
    evaluation.py     queuing an evaluation of models on the same tasks
    plan_steps.py     a plan as a list of runs
    plans.py          queuing a plan: several runs at once, all or none
    probe.py          queuing a short run that samples a model
    queued.py         the reply to whoever queued a run
    regrading.py      queuing the scoring of stored answers by another environment version
    requests.py       what a client asks for, typed
    run_folder.py     what is on disk of a run before its row exists
    training.py       queuing a training run, or a new attempt of one
"""
