"""The bearer token of the HTTP server: a file in the home that only its owner can read."""

import contextlib
import os
import secrets

from engine.core.errors import UserError
from engine.home.run_dir import Home


def load_token(home: Home) -> str:
    """The token of `home`, made on the first call.

    Raises UserError HOME_UNUSABLE when the file cannot be used as one.
    """
    try:
        if not home.token.exists():
            _make(home)
        token = home.token.read_text("utf-8").strip()
        # The file may have come from a backup that lost its mode.
        if home.token.stat().st_mode & 0o077:
            home.token.chmod(0o600)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "HOME_UNUSABLE",
            f"the token {home.token} cannot be used: {error}",
            hint="Make it readable for this user, or delete it: the next start makes a new one.",
        ) from error
    if len(token) < 16 or not token.isascii() or not token.isprintable():
        raise UserError(
            "HOME_UNUSABLE",
            f"the token {home.token} holds {len(token)} characters, too few or unprintable ones",
            hint="Delete it: the next start makes a new one.",
        )
    return token


def _make(home: Home) -> None:
    """Write a new token atomically: two servers that start at once end up with the same one."""
    aside = home.token.with_name(f".token.{secrets.token_hex(6)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(aside, home.token)
    finally:
        aside.unlink(missing_ok=True)
