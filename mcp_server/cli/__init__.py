"""`honesmith`: serve, setup, demo, doctor, init, and the verbs as commands. Start with `main.py`.

__main__.py        `python -m mcp_server.cli`, as client configurations start it
client_config.py   the entry in each agent's configuration file
data_commands.py   commands about data files
judge_commands.py  commands about language models as judges
env_commands.py    commands about environments
main.py            `honesmith`: serve, setup, demo, doctor, init, and the verbs
model_commands.py  commands about trained models
overview_page.py   all runs, environments and reports on one page
run_commands.py    commands about runs
run_options.py     their arguments and options
starter.py         a new environment from a template, a new project
"""
