"""What is on disk: paths, rows, metrics, text made safe to show. Everything above `core` uses it;
start with `run_dir.py` for files and `store.py` for rows.

    database.py     opening the database, mending it
    halves.py       which half of the held-out tasks a number speaks of
    hashes.py       SHA-256 of large files, remembered
    owner_marks.py  checkpoints that are kept, exams that are sealed
    recovery.py     the rows read back from folders, when the database is lost
    rows.py         the rows as types; states and what may follow what
    run_dir.py      every path inside the home
    sanitize.py     untrusted text made safe to show
    schema/         its tables, as a list of migrations
    store.py        the rows: environments, deployments, estimates; all tables as one object
    store_connection.py  one connection: transactions, reads, the write-ahead log
    store_runs.py   the rows of runs and of requests: queued, leased, changed
    team/           whose things are whose, and whose queued run starts next
    user_config.py  what its owner set in config.toml; models behind a URL, their keys
"""
