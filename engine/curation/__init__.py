"""Answers become training rows: which runs left them, which are chosen, how they are pushed. Start
with `curate.py`.
"""
