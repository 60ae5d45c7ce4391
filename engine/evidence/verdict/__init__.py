"""One word per run and what it rests on: lineage, skills kept, reuse of held-out tasks, provenance.
Start with `verdict.py`.
"""
