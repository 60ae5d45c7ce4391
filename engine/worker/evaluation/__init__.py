"""Held-out tasks and earlier skills, asked at the start, on the way and at the end. Start with
`during_training.py`.
"""
