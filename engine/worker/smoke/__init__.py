"""A smoke run: `python -P -m engine.worker.smoke FOLDER` does two real steps and reads the adapter
back. Start with `__main__.py`.

    __main__.py  the process: the steps, the adapter read back, the result or the failure
"""
