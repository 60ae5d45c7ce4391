"""What the owner of a home set in its config.toml.

The tables `[endpoints.NAME]` name models behind a URL: `openai:NAME` is then a model that can be
asked. A key never stands in the file: `key_env` names the environment variable, or the entry in a
file `.env`, that holds it.

Imported by the supervisor, which must start at once: standard library only.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.format import host_of
from engine.home.config_tables.checks import NAME, VARIABLE, invalid, is_count, is_number
from engine.home.config_tables.hosts import Host, read_hosts
from engine.home.rows import LOCAL, RunRow

PREFIX = "openai:"  # a reference to a model behind a URL is this prefix and the endpoint's name
DOTENV = ".env"  # a file of lines NAME=value, in the home or in the folder of the server process
_LINE = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*")


_CHOICES = {"sandbox": ("auto", "required", "off"), "serve_with": ("auto", "torch", "vllm")}
# Keys that are true or false, keys that list names, and keys with a text. All keys that are in none
# of these four constants are numbers.
_BOOLEANS = ("allow_root", "key_network", "allow_source_builds")
_NAME_LISTS = ("key_secrets",)
_TEXTS = ("serve_on",)
# The keys whose values are tables: [endpoints.NAME] and [hosts.NAME].
_ENDPOINTS, _HOSTS = "endpoints", "hosts"


# Minutes of silence after which a trainer is ended, if its usual pace does not explain them.
DEFAULT_STOP_MINUTES = 10.0


@dataclass(frozen=True)
class Endpoint:
    """A model behind a server that speaks OpenAI's chat API.

    Attributes:
        name: the endpoint's name in config.toml.
        url: the address of the server, up to and including `/v1`.
        model: the model's name on that server.
        key_env: the environment variable that holds the key; "" if no key is needed.
        price_in, price_out: money per million tokens of prompts and of answers; None if not known.
        max_concurrency: the most requests under way at once.
        timeout_s: seconds after which one request is given up.
        context: the longest conversation, in tokens.
        shared: whether callers with other keys than the owner's may ask the model.
    """

    name: str
    url: str
    model: str
    key_env: str = ""
    price_in: float | None = None
    price_out: float | None = None
    max_concurrency: int = 4
    timeout_s: float = 120.0
    context: int = 128_000
    shared: bool = False

    def __str__(self) -> str:
        """Write the model and its host, such as "big at api.example.com"."""
        return f"{self.model} at {host_of(self.url)}"


@dataclass(frozen=True)
class UserConfig:
    """`config.toml` of a home; every key is optional."""

    gpu_hour_price: float = 0.0
    max_gpu_hours_total: float | None = None
    auto_approve_gpu_hours: float | None = None
    idle_stop_minutes: float = 10.0
    sandbox: str = "auto"
    allow_root: bool = False
    serve_with: str = "auto"
    # The most tokens of prompt and answer together in a vLLM deployment; 0: the model's context.
    served_length: float = 16_384.0
    # Where a model is served that is served nowhere yet: "local" or a host such as "ssh:box".
    serve_on: str = LOCAL
    # Whether packages may be built from source distributions, which runs their code in the sandbox.
    allow_source_builds: bool = False
    # The secrets and the network that an environment may use if a key other than the owner's pushed
    # it.
    key_secrets: tuple[str, ...] = ()
    key_network: bool = False
    # How many runs may hold a GPU at once, if its memory has room for all of them.
    runs_per_gpu: float = 1.0
    # Into how many processes a run on a CPU may be divided (its setting `gpus`), to try that out.
    cpu_ranks: float = 1.0
    # A trainer that is silent for this long, and for far longer than usual, is ended; 0: never.
    stop_stalled_minutes: float = DEFAULT_STOP_MINUTES
    # Models behind a URL: NAME of a reference `openai:NAME` -> endpoint.
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    # Other machines, by the name that `compute` refers to.
    hosts: Mapping[str, Host] = field(default_factory=dict)

    def price_of(self, compute: str) -> float:
        """Return the price of an hour of one device where a run with this `compute` runs.

        `compute` is "local", or the kind and the name of a host, such as "ssh:box".
        """
        host = self.hosts.get(compute.partition(":")[2])
        return host.gpu_hour_price if host is not None else self.gpu_hour_price

    def money_of(self, rows: Iterable[RunRow]) -> float:
        """Return the price of the hours that these runs have taken, each at the place where it was
        taken."""
        return sum(
            hours * self.price_of(compute)
            for row in rows
            for compute, hours in row.hours_by_place().items()
        )


def read_config(path: Path) -> UserConfig:
    """Read and check the config file at `path`; return the defaults if there is no file.

    Raises UserError SETTING_UNKNOWN for a key that does not exist, SETTING_INVALID for a value that
    cannot be used or a file that cannot be read.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        return UserConfig()
    # ValueError: the file is not TOML, not UTF-8, or has a number with too many digits.
    # RecursionError: it is nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "SETTING_INVALID",
            f"{path} cannot be read: {error}",
            hint="Correct the file or move it away; every key in it is optional.",
        ) from error
    return _check_values(path, values)


def _check_values(path: Path, values: JsonObject) -> UserConfig:
    """Check the `values` of the parsed file at `path`, and return them as a config.

    Numbers become floats, and lists of names become tuples. A key that is missing gets its default.
    Raises UserError SETTING_UNKNOWN for an unknown key, SETTING_INVALID for an unusable value.
    """
    known_keys = {item.name for item in fields(UserConfig)}
    for name in values:
        if name not in known_keys:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {name!r}, which does not exist",
                hint=f"Known keys: {', '.join(sorted(known_keys))}.",
                field=name,
            )
    other_keys = {*_CHOICES, *_BOOLEANS, *_NAME_LISTS, *_TEXTS, _ENDPOINTS, _HOSTS}
    number_keys = known_keys - other_keys
    # The order decides which of several wrong values is reported: a wrong number before others.
    ordered_names = [*number_keys, *_CHOICES, *_BOOLEANS, *_NAME_LISTS, *_TEXTS]
    checked_values = {
        name: _checked_value(path, name, values[name]) for name in ordered_names if name in values
    }
    if _ENDPOINTS in values:
        checked_values[_ENDPOINTS] = read_endpoints(path, values[_ENDPOINTS])
    if _HOSTS in values:
        checked_values[_HOSTS] = read_hosts(path, values[_HOSTS])
    return UserConfig(**checked_values)


def _checked_value(path: Path, name: str, value: Any) -> Any:
    """Convert the `value` of the key `name` to the type of its field in UserConfig.

    Raises UserError SETTING_INVALID if the value has the wrong type or is out of range.
    """
    if not _is_allowed(name, value):
        raise UserError(
            "SETTING_INVALID",
            f"{path} sets {name} = {value!r}",
            hint=f"{name} must be {_describe_allowed(name)}.",
            field=name,
        )
    if name in _CHOICES or name in _BOOLEANS or name in _TEXTS:
        return value
    return tuple(value) if name in _NAME_LISTS else float(value)  # every other key is a number


def _is_allowed(name: str, value: Any) -> bool:
    """Return whether the key `name` of config.toml (no table) may have this value."""
    if name in _CHOICES:
        return value in _CHOICES[name]
    if name in _BOOLEANS:
        return isinstance(value, bool)
    if name in _TEXTS:
        return isinstance(value, str) and value != ""
    if name in _NAME_LISTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return is_number(value)  # every other key is a number


def _describe_allowed(name: str) -> str:
    """Say which values the key `name` of config.toml may have, such as "true or false"."""
    if name in _CHOICES:
        return " or ".join(f'"{choice}"' for choice in _CHOICES[name])
    if name in _BOOLEANS:
        return "true or false"
    if name in _TEXTS:
        return '"local" or the name of a host, as in "ssh:box"'
    if name in _NAME_LISTS:
        return 'a list of names, as in ["JUDGE_API_KEY"]'
    return "a number that is 0 or more"


def refuse_to_load(ref: str) -> None:
    """Raise UserError MODEL_UNSUPPORTED if `ref` names a model behind a URL.

    Called for work that needs a model whose weights are loaded on this machine.
    """
    if ref.startswith(PREFIX):
        raise UserError(
            "MODEL_UNSUPPORTED",
            f"{ref[:60]} answers behind a URL: it can be asked, and is not loaded here",
            hint="Ask it with evaluate. To train on its right answers: evaluate on split train "
            "with several attempts, curate that run, then submit_train with algorithm sft.",
            field="model",
        )


def read_endpoints(path: Path, tables: Any) -> dict[str, Endpoint]:
    """Check the tables `[endpoints.NAME]` of the config file at `path`; return name -> endpoint.

    Raises UserError SETTING_UNKNOWN for an unknown key, SETTING_INVALID for an unusable value. No
    message repeats a value of the file, because it may be a secret key in the wrong place.
    """
    if not isinstance(tables, dict):
        raise invalid(path, "endpoints", "is no table", "Write [endpoints.NAME] with its keys.")
    return {name: _read_endpoint(path, name, table) for name, table in tables.items()}


def _read_endpoint(path: Path, name: str, table: Any) -> Endpoint:
    """Check one table `[endpoints.NAME]`, and return its endpoint.

    Raises UserError SETTING_UNKNOWN for an unknown key, SETTING_INVALID for a wrong name, a missing
    key or an unusable value.
    """
    if not NAME.fullmatch(name) or not isinstance(table, dict):
        hint = "Give it a name of letters, digits, dot, - and _: [endpoints.NAME]."
        raise invalid(path, f"endpoints.{name[:60]}", "is no table of an endpoint", hint)
    known = [field.name for field in fields(Endpoint) if field.name != "name"]
    for key in table:
        if key not in known:
            raise UserError(
                "SETTING_UNKNOWN",
                f"{path} sets {key[:60]!r} in [endpoints.{name}], which does not exist",
                hint=f"Known keys: {', '.join(known)}. A key for the server never stands in this "
                "file: key_env names the variable that holds it.",
                field=f"endpoints.{name}.{key[:60]}",
            )
    for key in ("url", "model"):
        if key not in table:
            raise invalid(
                path, f"endpoints.{name}.{key}", "is missing", "An endpoint has a url and a model."
            )
    values = {key: _checked_key(path, name, key, value) for key, value in table.items()}
    return Endpoint(name=name, **values)


def _is_text(value: Any) -> bool:
    """Return whether `value` is a text of 1 to 4096 characters."""
    return isinstance(value, str) and 0 < len(value) <= 4096


def _is_url(value: Any) -> bool:
    """Return whether `value` is an http(s) URL without a user, a query or a fragment.

    People tend to put keys into these three parts.
    """
    if not _is_text(value) or not value.startswith(("http://", "https://")):
        return False
    try:
        parts = urlsplit(value)
        return bool(parts.hostname) and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        return False


# Key of an endpoint -> (whether a value is allowed, the allowed values in words).
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "url": (_is_url, "an http:// or https:// URL up to /v1, without user, query or fragment"),
    "model": (_is_text, "the model's name there"),
    "key_env": (
        lambda value: isinstance(value, str) and (not value or bool(VARIABLE.fullmatch(value))),
        "the name of the variable that holds the key, never the key",
    ),
    "price_in": (is_number, "money per million tokens of prompts"),
    "price_out": (is_number, "money per million tokens of answers"),
    "max_concurrency": (lambda value: is_count(value) and value <= 256, "a number from 1 to 256"),
    "timeout_s": (lambda value: is_number(value) and value >= 1, "seconds, at least 1"),
    "context": (is_count, "a number of tokens"),
    "shared": (lambda value: isinstance(value, bool), "true or false"),
}


def _checked_key(path: Path, name: str, key: str, value: Any) -> Any:
    """Check the value of a key of [endpoints.NAME], and convert it to the type of its field.

    Raises UserError SETTING_INVALID if the key may not have this value.
    """
    is_allowed, in_words = _RULES[key]
    if not is_allowed(value):
        field = f"endpoints.{name}.{key}"
        raise invalid(path, field, "cannot be used", f"{key} must be {in_words}.")
    if key == "url":
        return value.rstrip("/")
    return float(value) if key in ("price_in", "price_out", "timeout_s") else value


def key_of(home_root: Path, key_env: str) -> str:
    """Return the secret key that the variable `key_env` holds; "" if it is not set or `key_env` is
    "".

    The key is looked for in this process's environment, then in the file `.env` of the working
    folder, then in that of the home.
    """
    if not key_env:
        return ""
    if os.environ.get(key_env):
        return os.environ[key_env]
    for folder in (Path.cwd(), home_root):
        for name, value in _dotenv_entries(folder / DOTENV):
            if name == key_env and value:
                return value
    return ""


def _dotenv_entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each line NAME=value of a file; nothing if it cannot be read.

    Quotes around a value are removed.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:  # an empty line or a comment
            continue
        value = match[2]
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        yield match[1], value
