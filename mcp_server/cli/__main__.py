"""`python -m mcp_server.cli`, as client configurations start it."""

from mcp_server.cli.main import main

if __name__ == "__main__":
    main()
