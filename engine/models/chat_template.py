"""Chat templates rendered as transformers renders them.

The same sandboxed jinja environment with the same extras (raise_exception, strftime_now, tojson
without HTML escapes, loop controls, the `generation` tag), so that a template gives the same text
here as there. Templates come from model repositories and are untrusted: the sandbox keeps them from
Python. Imports jinja2, which a start of the server does not need: reached through `chat_format.py`.

Source: transformers/utils/chat_template_utils.py.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.models import model_files


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that the template `source` makes of `variables`.

    Raises UserError MODEL_UNSUPPORTED when the template does not compile, and whatever it raises
    when it refuses the variables.
    """
    return _compiled(source).render(**variables)


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}...{% endgeneration %}: transformers marks assistant turns with it,
    here it only has to render."""

    tags = {"generation"}  # noqa: RUF012  jinja declares it a plain set

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # `self` may be a key
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store the attribute {name!r}")


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise model_files.unsupported(
            f"the chat template does not compile: {error}", "Correct chat_template.jinja."
        ) from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
