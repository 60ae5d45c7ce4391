"""Where pip looks for packages on this machine: its own configuration, read outside the box.

Only what names an index, a proxy or a certificate is passed on; pip in the box reads no file of
this user.
"""

import ast
import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Options of pip, as its configuration spells them.
_OPTIONS = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "cert",
    "client-cert",
    "timeout",
    "default-timeout",
    "retries",
    "prefer-binary",
    "pre",
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_VARIABLES = (*_PROXIES, "no_proxy", "REQUESTS_CA_BUNDLE")
_PLACES = ("index-url", "extra-index-url", "find-links")
_FILES = ("cert", "client-cert")
_DEFAULT_PORT = 443  # of the index that pip knows by itself
_PATIENCE_S = 30.0
# -I: neither this folder nor any variable decides which pip that is.
_LIST = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("pip", run_name="__main__")
"""


@dataclass(frozen=True)
class PipIndex:
    """Where packages come from.

    Args:
        variables: what tells pip so.
        paths: folders and files it has to read for it.
        ports: TCP ports it connects to; none where every index is a folder.
    """

    variables: dict[str, str]
    paths: tuple[str, ...]
    ports: tuple[int, ...]


def read(pip: Path) -> PipIndex:
    """What the configuration of `pip` (its folder, or a wheel of it) says for this user."""
    options = _options(pip)
    variables = {f"PIP_{name.upper().replace('-', '_')}": text for name, text in options.items()}
    named = {name: os.environ[name] for name in _cased(_VARIABLES) if os.environ.get(name)}
    no_index = _is_on(options.get("no-index", ""))
    asked = [name for name in _PLACES if name == "find-links" or not no_index]
    places = " ".join(options.get(name, "") for name in asked).split()
    files = [options.get(name, "") for name in _FILES] + [named.get("REQUESTS_CA_BUNDLE", "")]
    paths = filter(None, [*map(_local, places), *files])
    ports = {_port(place) for place in places if not _local(place)}
    if not no_index and not options.get("index-url"):
        ports.add(_DEFAULT_PORT)
    if ports:  # a proxy alone is no index
        proxies = [options.get("proxy", ""), *(named.get(name, "") for name in _cased(_PROXIES))]
        ports |= {_port(proxy) for proxy in proxies if proxy}
    return PipIndex(variables | named, tuple(map(os.path.abspath, paths)), tuple(sorted(ports)))


def _options(pip: Path) -> dict[str, str]:
    """Options by name; a variable goes before a command's own, that before what holds for all."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [sys.executable, "-I", "-c", _LIST, str(pip), "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
        sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
        for line in done.stdout.splitlines():
            key, _, value = line.partition("=")
            section, _, name = key.rpartition(".")
            with contextlib.suppress(ValueError, SyntaxError):
                if section in sections and name in _OPTIONS:
                    sections[section][name] = " ".join(str(ast.literal_eval(value)).split())
        return sections["global"] | sections["install"] | sections[":env:"]
    return {}


def _cased(names: tuple[str, ...]) -> list[str]:
    return [form for name in names for form in dict.fromkeys((name, name.upper()))]


def _local(place: str) -> str:
    """The path of an index that is a folder, "" for one on the network."""
    if place.startswith("file:"):
        path = Path(unquote(urlsplit(place).path))
        # Its pages link to files beside it.
        return str(path.parent if path.name == "simple" else path)
    return "" if _is_url(place) else os.path.expanduser(place)


def _is_url(place: str) -> bool:
    return "://" in place


def _is_on(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on", "y", "t")


def _port(url: str) -> int:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url if _is_url(url) else f"//{url}")
        return parts.port or (80 if parts.scheme == "http" else _DEFAULT_PORT)
    return _DEFAULT_PORT
