"""Versions of tasks: a folder is pushed, stored, read, compared and thrown away. Start with
`push.py` for how one is made and `registry.py` for how it is found.
"""
