"""A language model as judge, held against people: how far it agrees, which way it leans, and
whether a verdict may rest on it. Start with `calibration.py`.

    agreement.py    agreement, kappa and biases of values against gold labels, with intervals
    calibration.py  asks a judge about gold answers, and stores what came of it
    gold.py         gold answers, read from a file
    trust.py        whether a verdict may rest on the judge of an environment
    used.py         which models graded the answers of runs, and whether they were the same
"""
