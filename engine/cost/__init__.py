"""What a run will cost: operations, memory, speed, and what finished runs teach. Used before
anything is spent; start with `estimate.py`.
"""
