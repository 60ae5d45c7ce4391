"""What becomes of a model when its tasks are asked in other words. Used by the verdict, the report
and the comparison of models. Start with `robustness.py`.

    probe_calls.py   the call that asks a trained model in other words
    robustness.py    the answers to tasks in other words, paired with those to the tasks as they are
"""
