"""Tables of config.toml that describe things of one kind; `user_config.py` beside reads the rest.

hosts.py  [hosts.NAME]: other machines that runs can go to
"""
