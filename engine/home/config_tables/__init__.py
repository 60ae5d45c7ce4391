"""Tables of config.toml that describe things of one kind; `user_config.py` beside reads the rest.

checks.py  what names and numbers may be, and the error for those that are not
hosts.py   [hosts.NAME]: other machines that runs can go to
"""
