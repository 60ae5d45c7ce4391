"""What an environment folder may say: its settings file, problems in it, new ones from a template.
The ground of `envs`; start with `settings.py`.

    problem.py   what is wrong, as an exception
    scaffold.py  templates by name
    settings.py  environment.toml
"""
