"""What crosses a process or is read from disk, each as one typed record with one reader. Everyone
above `core` may use it; start with `settings.py` and `record.py`.
"""
