"""Estimates of what a run will cost, made before it starts: operations, memory, time. Start with
`estimate.py`.

    batteries.py        questions that show what a model forgets
    calibration.py      corrections of the next estimate from finished runs
    estimate.py         hours, money, memory, disk: low, likely, high
    evaluation_cost.py  hours in which models answer tasks
    exam.py             what the held-out tasks of a run can show, before it
    flops.py            operations and tokens of a run from its settings
    hours.py            hours of a run, corrected by finished runs
    lowering.py         which settings to lower until a run fits, or takes less time
    memory.py           memory that a run needs, disk space of its files
    plan_total.py       what all runs of a plan take together
    run_work.py         the work of training, evaluations and checkpoints of a run
    throughput.py       seconds from operations and bytes: by a table, or as measured
"""
