"""What the statistics rest on.

clusters.py       groups of tasks: intervals and tests that count groups instead of tasks
distributions.py  normal, binomial, Student's t, on the standard library
summary.py        means over the answers of one model
target.py         what a run is expected to reach, in words and as a number
"""
