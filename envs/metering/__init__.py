"""What user code takes beyond its time, counted where it is taken. Knows nothing of the rest.

judge_calls.py  what judge calls took, and how many more a run allows
relay.py        models behind a URL, asked by name out of the box of user code
"""
