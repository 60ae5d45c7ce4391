"""What an environment folder may say: its settings file, problems in it, new ones from a template;
and how long a push of it may take. The ground of `envs`; start with `settings.py`.

    adapters.py     formats of others, and the packages each brings along
    endpoints.py    models behind a URL that an environment may ask by name
    problem.py      what is wrong, as an exception
    push_limits.py  seconds a push and its parts may take
    scaffold.py     templates by name
    settings.py     environment.toml
"""
