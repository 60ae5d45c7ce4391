"""What an agent and a person see: the MCP server and the command line.

dev.py  the server object that `mcp dev` looks for
"""

__version__ = "0.1.0"
