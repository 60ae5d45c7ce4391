"""The life of a run outside its processes: submit, admit, look, wait, cancel, delete, score again.
Start with `submit.py`.

    admission.py       what may not be queued: too dear, too large, too risky
    contamination.py   which held-out tasks a model was taught, by version and by descent
    deletion.py        runs thrown away: what stands against it, what stays
    ledger.py          what was tried and what came of it; what not to try again
    lifecycle.py       submit, look, wait, cancel
    overview.py        the state of a home in one answer
    regrade.py         stored answers scored again by another reward; a process without torch
    stored_answers.py  stored answers scored by an env process; a sample of the last exam again
    submit.py          queuing a training run, an evaluation, a probe
"""
