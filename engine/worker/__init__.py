"""The training side, the only place with torch; started as `python -m engine.worker`, imported by
nobody. Start with `grpo.py` or `sft.py`, each a loop from top to bottom.
"""
