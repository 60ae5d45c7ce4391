"""Numbers without a judgement: intervals, tests, power, rows as sides, shared rows. The ground of
the other folders of the evidence; start with `inference.py` and `results.py`.
"""
