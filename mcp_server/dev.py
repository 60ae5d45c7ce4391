from mcp_server.app import mcp as mcp
