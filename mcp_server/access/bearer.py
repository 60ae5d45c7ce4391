"""The bearer token of the HTTP server: a file in the home that only its owner can read."""

import contextlib
import os
import secrets

from engine.core.errors import UserError
from engine.home.run_dir import Home

MIN_TOKEN_CHARS = 16


def load_token(home: Home) -> str:
    """Return the owner's token of `home`; the first call makes the file.

    Raises:
        UserError: HOME_UNUSABLE if the file cannot be read or written, or if its text is shorter
            than `MIN_TOKEN_CHARS` or not printable ASCII.
    """
    try:
        if not home.token.exists():
            _create_token_file(home)
        token = home.token.read_text("utf-8").strip()
        # 0o077: the group or others have some right, e.g. after a restore from a backup.
        if home.token.stat().st_mode & 0o077:
            home.token.chmod(0o600)
    except (OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: the file is not text
        raise UserError(
            "HOME_UNUSABLE",
            f"the token {home.token} cannot be used: {error}",
            hint="Make it readable for this user, or delete it: the next start makes a new one.",
        ) from error
    # A person may have written the file: refuse a token that is short enough to be guessed, or that
    # no HTTP header can hold.
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        raise UserError(
            "HOME_UNUSABLE",
            f"the token {home.token} holds {len(token)} characters, too few or unprintable ones",
            hint="Delete it: the next start makes a new one.",
        )
    return token


def _create_token_file(home: Home) -> None:
    """Write a new token under a temporary name, then link it into place.

    Making the link is atomic, and fails if the token file exists. So if two servers start at the
    same time, both use the token of the one that was first.
    """
    draft = home.token.with_name(f".token.{secrets.token_hex(6)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another server was first: its token stays
            os.link(draft, home.token)
    finally:
        draft.unlink(missing_ok=True)
