"""What the statistics rest on.

clusters.py       groups of tasks: intervals and tests that count groups instead of tasks
distributions.py  normal, binomial, Student's t, on the standard library
"""
