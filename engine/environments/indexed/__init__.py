"""Data files too large to be held in memory: hashed and indexed by byte offset instead of copied.

Start with `build.py`: it is what a push and `data inspect` call, and the process they start.

    build.py    the process that reads the files once; waited for, kept in the home's cache
    columns.py  numbers of every row, on disk; duplicates named in little memory
    scan.py     one pass over a file, in parts: every row checked and measured
    sides.py    which rows are held out
    rows.py     the training rows of a version, read from where they lie
"""
