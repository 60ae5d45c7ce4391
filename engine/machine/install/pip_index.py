"""Where pip looks for packages on this machine: its configuration, read outside the sandbox.

Only settings about indexes, proxies and certificates are passed on to the pip in the sandbox, which
cannot read the files of this user.
"""

import ast
import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# The options of pip that are passed on, as its configuration spells them.
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
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_VARIABLES = (*_PROXY_VARIABLES, "no_proxy", "REQUESTS_CA_BUNDLE")
# Options whose values are one or more addresses of indexes; and options that name a file.
_ADDRESS_OPTIONS = ("index-url", "extra-index-url", "find-links")
_FILE_OPTIONS = ("cert", "client-cert")
_DEFAULT_PORT = 443  # the port of the index that pip uses without configuration
_PATIENCE_S = 30.0  # time limit of `pip config list` in seconds
# Runs the pip at a given path. It is started with -I, so that neither the working folder nor an
# environment variable can put another pip first.
_LIST = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("pip", run_name="__main__")
"""


@dataclass(frozen=True)
class PipIndex:
    """Where packages come from.

    Attributes:
        variables: the environment variables that tell pip this.
        paths: folders and files that pip must be able to read.
        ports: TCP ports that pip connects to; () if every index is a local folder.
    """

    variables: dict[str, str]
    paths: tuple[str, ...]
    ports: tuple[int, ...]


def read(pip: Path) -> PipIndex:
    """Return where pip looks for packages, as this user has configured it.

    `pip` is the folder that holds the package pip, or a wheel of pip.
    """
    options = _options(pip)
    # pip also reads an option such as index-url from the environment variable PIP_INDEX_URL.
    pip_variables = {
        f"PIP_{name.upper().replace('-', '_')}": text for name, text in options.items()
    }
    network_variables = {
        name: os.environ[name] for name in _both_cases(_VARIABLES) if os.environ.get(name)
    }
    # A path is "" if an index is on the network or an option is not set; those are left out below.
    paths = [_local_path(address) for address in _addresses(options)]
    paths += [options.get(name, "") for name in _FILE_OPTIONS]
    paths.append(network_variables.get("REQUESTS_CA_BUNDLE", ""))
    return PipIndex(
        variables=pip_variables | network_variables,
        paths=tuple(os.path.abspath(path) for path in paths if path),
        ports=tuple(sorted(_ports(options, network_variables))),
    )


def _ports(options: dict[str, str], network_variables: dict[str, str]) -> set[int]:
    """Return the TCP ports of the indexes and proxies that pip uses with these options and
    environment variables (both name -> value)."""
    ports = {_port(address) for address in _addresses(options) if not _local_path(address)}
    uses_default_index = not _is_on(options.get("no-index", "")) and not options.get("index-url")
    if uses_default_index:
        ports.add(_DEFAULT_PORT)
    if ports:  # a proxy is needed only if an index is on the network
        proxies = [options.get("proxy", "")]
        proxies += [network_variables.get(name, "") for name in _both_cases(_PROXY_VARIABLES)]
        ports |= {_port(proxy) for proxy in proxies if proxy}
    return ports


def _addresses(options: dict[str, str]) -> list[str]:
    """Return the addresses and folders that pip searches with these `options` (name -> value),
    without pip's default index."""
    names = _ADDRESS_OPTIONS
    if _is_on(options.get("no-index", "")):  # pip then ignores every index
        names = ("find-links",)
    return [address for name in names for address in options.get(name, "").split()]


def _options(pip: Path) -> dict[str, str]:
    """Return pip's configured options that are in `_OPTIONS`, by name; {} if pip cannot be asked.

    If an option is set several times, an environment variable wins over the section [install] of
    the configuration, and that over [global].
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(
            [sys.executable, "-I", "-c", _LIST, str(pip), "config", "list"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
        return _listed_options(listing.stdout)
    return {}


def _listed_options(listing: str) -> dict[str, str]:
    """Return the options in `_OPTIONS`, by name, from the output of `pip config list`.

    A line looks like global.index-url='https://...', where the value is a Python literal.
    """
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        with contextlib.suppress(ValueError, SyntaxError):  # the value is not a literal
            if section in sections and name in _OPTIONS:
                sections[section][name] = " ".join(str(ast.literal_eval(value)).split())
    return sections["global"] | sections["install"] | sections[":env:"]  # the last one wins


def _both_cases(names: tuple[str, ...]) -> list[str]:
    """Return each name as given and in capitals, because programs read proxy variables in both
    forms. A name that is in capitals already occurs once."""
    return [spelling for name in names for spelling in dict.fromkeys((name, name.upper()))]


def _local_path(address: str) -> str:
    """Return the path of an index that is a local folder; "" for an index on the network."""
    if address.startswith("file:"):
        path = Path(unquote(urlsplit(address).path))
        # The pages of a "simple" index link to files beside its folder, so the parent is needed.
        return str(path.parent if path.name == "simple" else path)
    return "" if _is_url(address) else os.path.expanduser(address)


def _is_url(address: str) -> bool:
    """Return whether the address of an index has a scheme, such as https://; if not, it is a
    path."""
    return "://" in address


def _is_on(text: str) -> bool:
    """Return whether pip reads this value of an option as true."""
    return text.lower() in ("1", "true", "yes", "on", "y", "t")


def _port(url: str) -> int:
    """Return the TCP port of an address with or without a scheme.

    If the address names no port, this is 80 for http:// and 443 otherwise; also 443 if the address
    cannot be parsed.
    """
    try:
        parts = urlsplit(url if _is_url(url) else f"//{url}")
        port = parts.port
    except ValueError:
        return _DEFAULT_PORT
    if port:
        return port
    return 80 if parts.scheme == "http" else _DEFAULT_PORT
