"""What several adapters share.

local_server.py      a server of the folder, started and asked over loopback
mcp_stdio.py         an MCP client over the standard streams of a server
options.py           the options of [adapter], read into a dataclass
rllm_names.py        the types that rLLM's evaluators import, where the package is not installed
rows.py              rows of data files as they are, with their splits
user_code.py         functions in files of the environment's folder
verifiers_play.py    an Env of verifiers, driven turn by turn from outside
verifiers_plugin.py  a taskset of verifiers by its id, and what of it is refused
verifiers_trace.py   one exchange with a task of verifiers: messages, hooks, scores
"""
