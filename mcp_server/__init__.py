"""What an agent and a person see: the MCP server and the command line."""

__version__ = "0.1.0"
