from mcp_server.protocol.app import mcp as mcp
