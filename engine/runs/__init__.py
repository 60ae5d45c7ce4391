"""The life of a run outside its processes: submit, look, wait, cancel, delete, score again. Start
with `lifecycle.py`; how a run comes to be is in `submit/`, what evaluations share in `evaluation/`,
a search for a prompt in `prompts/`, pages of what a run wrote in `reading/`.

    deletion.py        runs thrown away: what stands against it, what stays
    diff.py            two trainings side by side before either has a result
    forecast.py        when an open run or plan will end, its cost, whether its cap stops it before
    ledger.py          what was tried and what came of it
    lifecycle.py       look, wait, cancel
    overview.py        the state of a home in one answer
    pins.py            checkpoints kept, whatever keep_checkpoints removes
    rerun.py           a training run once more, with the same versions and settings
    plan_status.py     where a plan stands: a verdict per step
    run_status.py      where a run stands, as a client sees it
    targets.py         how far a run is from its target, and what stopping it leaves
"""
