"""Twins: training rows that ask a held-out task in other words, with other numbers or other names,
and so teach the exam without holding any of its texts. Used by overlap.py; start with `scan.py`.

    scan.py      the twins of two sets of rows in a given time, counted and named
    search.py    which rows are twins of which tasks
    texts.py     a question and its answer as words, numbers, signs and grammar
"""
