"""Numbers without a judgement: intervals, tests, power, rows as sides. The ground of
the other folders of the evidence; start with `inference.py` and `results.py`.

    any_of_k.py       pass@k of one model, and its paired change
    bootstrap.py      a mean over tasks, with interval and p by resampling
    exam_size.py      what tasks can show before they are asked, groups counted
    inference.py      Wilson, McNemar, Tango, smallest detectable gap, the paired verdict
    learnability.py   what sampled answers of a base say about training on them
    power.py          how many tasks or attempts would show a change; the power of a test
    results.py        evaluation rows as sides that can be compared
    text_metrics.py   what can be measured on answers as text
    thresholds.py     when a detector speaks, each number with its reason
    trends.py         what the values of a run's steps show: recent mean, trend, lasting faults
"""
