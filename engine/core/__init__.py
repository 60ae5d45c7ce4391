"""What needs no home: errors, metric names, files, hardware, text. Everyone may use it and it
imports nothing of ours; start with `errors.py` and `files.py`.

    agent_files.py   places that coding agents obey, where nothing is written
    errors.py        error codes, failure kinds, UserError
    files.py         writing and reading that survives kills and full disks
    filters.py       filter expressions over rows
    format.py        numbers as people say them
    hardware.py      devices, memory, cores, as containers allow
    hints.py         the next move as data: Hint, Call, Change
    metrics.py       the one list of metric names
    paging.py        pages of files that only grow
    reply.py         what a client gets for a call, and how large it may be
    slow_clients.py  connections on which nothing comes, closed; sooner where there are too many
    split.py         which rows are held out
    wording/         tasks asked in other words, by rules and a seed
"""
