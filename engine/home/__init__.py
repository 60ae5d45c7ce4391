"""What is on disk: paths, rows, metrics, text made safe to show. Everything above `core` uses it;
start with `run_dir.py` for files and `store.py` for rows.
"""
