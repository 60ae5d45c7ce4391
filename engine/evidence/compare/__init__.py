"""Models side by side on the same tasks: candidates, seeds, what differs in their settings. Start
with `compare.py`.
"""
