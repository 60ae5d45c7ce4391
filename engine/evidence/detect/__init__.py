"""Detectors: what goes wrong in a run, with numbers and what to change. Start with `views.py` for
what they read and `diagnose.py` for what is made of it.
"""
