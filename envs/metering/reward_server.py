"""Asks a server what a rollout earned: one HTTP request, once nothing of the rollout lives.

The request is made outside the box, so a program without a network needs none for it, and cannot
answer in the server's place. No redirect and no proxy is used. Standard library only.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from envs.metering.relay import NoRedirects

MOST_ASKED, MOST_ANSWERED = 4 << 20, 64 << 10  # bytes of a question and of a reply
_CHUNK = 16 << 10  # bytes that are read at once


class NoReward(Exception):
    """The server gave no reward; the text says why.

    Attributes:
        timed_out: whether it took too long.
    """

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        """Store `text`, the reason, and whether the server took too long."""
        super().__init__(text)
        self.timed_out = timed_out


def ask_reward(url: str, question: Any, seconds: float) -> str:
    """Send a question as JSON by one POST, and return the text of the reply.

    Raises NoReward if the server cannot be reached, takes longer than `seconds` in all, answers
    with another status than 200 or with more than MOST_ANSWERED bytes; and without asking, if the
    question has more than MOST_ASKED bytes.
    """
    data = json.dumps(question).encode()
    if len(data) > MOST_ASKED:
        raise NoReward(f"the rollout is too long to ask {url} about: {len(data):,} bytes")
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    no_proxies = urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(NoRedirects, no_proxies)
    deadline = time.monotonic() + seconds
    try:
        with opener.open(request, timeout=seconds) as reply:
            if reply.status != 200:
                raise NoReward(f"{url} answered {reply.status}; 200 with a reward is needed")
            return _text_of(reply, url, seconds, deadline)
    except urllib.error.HTTPError as error:
        is_redirect = 300 <= error.code < 400
        note = " (no redirect is followed)" if is_redirect else ""
        text = f"{url} answered {error.code}{note}; 200 with a reward is needed"
        raise NoReward(text) from error
    except TimeoutError as error:
        raise _too_slow(url, seconds) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        # urllib wraps a time limit that ended while it connected in an URLError.
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise _too_slow(url, seconds) from error
        raise NoReward(f"{url} gave no reward: {error}; is the server running?") from error


def _text_of(reply: Any, url: str, seconds: float, deadline: float) -> str:
    """Read a reply up to its end and return it as text.

    The time is checked after each piece, so a server that sends its reply drop by drop has no more
    time than others. Raises NoReward if the reply is longer than MOST_ANSWERED bytes, or not
    complete at `deadline` (on the monotonic clock); `url` and `seconds` (the time allowed) are for
    the message.
    """
    data = b""
    while chunk := reply.read1(_CHUNK):
        data += chunk
        if len(data) > MOST_ANSWERED:
            raise NoReward(f"{url} answered with more than {MOST_ANSWERED >> 10} KiB")
        if time.monotonic() > deadline:
            raise _too_slow(url, seconds)
    return data.decode("utf-8", "replace")


def _too_slow(url: str, seconds: float) -> NoReward:
    """Return the NoReward for a server that did not answer within `seconds`."""
    return NoReward(f"{url} gave no reward within {seconds:g} s", timed_out=True)
