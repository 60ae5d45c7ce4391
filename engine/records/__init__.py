"""What crosses a process or is read from disk, each as one typed record with one reader. Everyone
above `core` may use it; start with `settings.py` and `record.py`.

    record.py      how a record is read and what a damaged one says
    run_config.py  what submit resolved: config.json
    settings.py    the settings of a run: names, types, ranges
"""
