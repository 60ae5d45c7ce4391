"""Which held-out tasks the training rows hold or teach: copies, twins, families on both sides of
the split. Used at push, dry run and submit, and by verdict and report; start with `overlap.py`.

    families.py      rows that are likely of one family, on both sides of the split
    leaks.py         training rows that teach a held-out task, each with the task
    overlap.py       held-out tasks in training rows: exact, normalised, by word sequences
    row_texts.py     question and reference answer of a stored task row
    twin_scan.py     the twins that are found in a given time, counted and named
    twin_texts.py    a question and its answer as words, numbers, signs and grammar
    twins.py         training rows that ask a held-out task in other words, numbers or names
    words.py         a text as normalised words, and its lines, sentences and word sequences
"""
