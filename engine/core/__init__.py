"""What needs no home: errors, metric names, files, hardware, text. Everyone may use it and it
imports nothing of ours; start with `errors.py` and `files.py`.
"""
