"""`honesmith`: serve, setup, demo, doctor, init, and the verbs as commands. Start with
`main.py`."""
