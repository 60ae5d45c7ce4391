"""A smoke run: `python -P -m engine.worker.smoke FOLDER` does two real training steps, to show that
a run would work, and reads the saved adapter back. Start with `__main__.py`.

    __main__.py  the process: the steps, the adapter read back, the result or the failure
"""
