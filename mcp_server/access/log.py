"""Where tracebacks go: a file of the home, never a result."""

import contextlib
import logging
import logging.handlers
from pathlib import Path

from engine.home.run_dir import Home

log = logging.getLogger("honesmith")


def log_file(home: Home) -> Path:
    """The log file of `home`, which holds the tracebacks of our own faults."""
    return home.cache / "mcp_server.log"


def log_to(home: Home) -> None:
    """Send our log to the file of `home`, and nowhere else, whatever was set up before.

    The file is made when the first record is written; a full one is kept as `mcp_server.log.1`.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
    handler = logging.handlers.RotatingFileHandler(
        log_file(home), maxBytes=1_000_000, backupCount=1, encoding="utf-8", delay=True
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False
