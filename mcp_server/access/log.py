"""Where tracebacks go: a file of the home, never a result."""

import contextlib
import logging
import logging.handlers
from pathlib import Path

from engine.home.run_dir import Home

log = logging.getLogger("honesmith")


def log_file(home: Home) -> Path:
    """Return the path of the server's log file in `home`, which holds tracebacks of internal
    errors."""
    return home.cache / "mcp_server.log"


class _QuietHandler(logging.handlers.RotatingFileHandler):
    """Writes records to a file. A record that cannot be written, because the disk is full or
    read-only, is dropped silently; the library's handler would print a traceback for each."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a record that could not be written: the code that logged it has told the user."""


def log_to(home: Home) -> None:
    """Let the server's log be written to the log file of `home`, and nowhere else.

    Handlers that were set up before are removed. The file is made when the first record is written.
    When it reaches 1 MB it is renamed to `mcp_server.log.1`, and a new one begins.
    """
    for handler in list(log.handlers):
        log.removeHandler(handler)
        with contextlib.suppress(OSError):  # closing writes what is buffered: the disk may be full
            handler.close()
    handler = _QuietHandler(
        log_file(home), maxBytes=1_000_000, backupCount=1, encoding="utf-8", delay=True
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.propagate = False  # handlers of the root logger would print to stderr
