"""Evaluations without a device, and what all evaluations share. No torch.

asking.py           models behind a URL alone are asked, as a process of its own
endpoint_models.py  models behind a URL play the tasks: rows, calls, caps
exam.py             the tasks of evaluations: their order, their two halves
process.py          a process of such an evaluation: its end, its exit status
regrade.py          stored answers scored again by another reward, as a process of its own
result.py           what an evaluation came to, as result.json has it
stored_answers.py   stored answers scored by an env process; a sample of the last exam again
"""
