"""Faster ways to compute the same: which there are, and whether each works on this machine.

A worker process tries each of them against the plain way, once for each device, driver and set of
libraries. What differs, is slower or fails is switched off there, with the reason. Used by `doctor`
and by workers when they start; start with `catalogue.py`.

    catalogue.py  the fast paths, and what a worker does without each
    examine.py    tries them in processes of their own, which may die of it
    results.py    the results, kept in the home
"""
