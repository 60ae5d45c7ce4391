"""The process of another rank of a run than the first (a rank is one process on one GPU): `python
-P -m engine.worker.helper RUN`.

__main__.py   loads the model and carries out the orders of rank 0 (engine/worker/ranks)
"""
