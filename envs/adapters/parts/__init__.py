"""What several adapters share.

harbor_task.py       one Harbor task: its folder, what it needs, what is refused
local_server.py      starts a server from the folder and asks it over loopback
mcp_stdio.py         an MCP client over the standard streams of a server
options.py           reads the options of [adapter] into a dataclass
rllm_names.py        the types that rLLM's evaluators import, for machines without the package
rows.py              rows of data files as they are, with their splits
user_code.py         functions in files of the environment's folder
verifiers_play.py    an Env of verifiers, driven turn by turn from outside
verifiers_plugin.py  loads a taskset of verifiers by its id; refuses what is not supported
verifiers_trace.py   one exchange with a task of verifiers: messages, hooks, scores
"""
