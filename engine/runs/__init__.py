"""The life of a run outside its processes: submit, admit, look, wait, cancel, delete, score again.
Start with `submit.py`.
"""
