"""Where tracebacks go: a file of the home, never a result."""

import contextlib
import logging
import logging.handlers
from pathlib import Path

from engine.home.run_dir import Home

log = logging.getLogger("honesmith")


def log_file(home: Home) -> Path:
    """The file that holds what went wrong on our side."""
    return home.cache / "mcp_server.log"


def log_to(home: Home) -> None:
    """Send our log to the file of `home`, and nowhere else."""
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
