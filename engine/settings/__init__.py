"""Settings of a run: other trainers' names, defaults, and all of it resolved. Their schema is
`records/settings.py`; start with `resolution.py`.
"""
