"""Trying the fast paths of a device: `python -P -m engine.worker.fast_paths NAME...`. Used by no
other package; start with `trial.py`.

    __main__.py  the process, a path after the other
    trial.py     one path beside the plain way: numbers, then seconds
    trials.py    what is computed for each path
"""
