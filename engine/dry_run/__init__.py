"""The checks of a run or a plan before anything is spent. Start with `dry_run.py`.

checks.py       one run: each check, and what the checks store for each other
dry_run.py      the dry run of a run or a plan
gpu_plans.py    which model fits on which GPU, and how it runs there: docs/gpus.md
judgements.py   the results of the checks, and what they say of data and of sampled answers
plan.py         the dry run of a plan: its runs, and what they take together
plan_cost.py    the estimate of a plan, a step at a time
planned_run.py  one run of a plan, checked
probe_check.py  the check that lets the model answer some tasks
prompt_check.py  the dry run of a search for a prompt
report.py       the reply: what the checks came to, in words and in numbers
smoke_check.py  the check that does two real steps and throws them away
trials.py       what is tried beside the checks: a probe, a smoke run
"""
