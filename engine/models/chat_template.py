"""Renders chat templates in the same way as transformers.

It uses the same sandboxed jinja environment with the same extras (raise_exception, strftime_now,
tojson without HTML escapes, loop controls, the `generation` tag), so a template gives the same text
in both. Templates come from model repositories and are untrusted: the sandbox keeps them from
running Python code. Only `chat_format.py` imports this module, when it renders, because jinja2
would slow down the server's start.

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
    """Render the template `source` with `variables` and return the text.

    Raises UserError MODEL_UNSUPPORTED if the template does not compile. Exceptions that the
    template raises while rendering pass through.
    """
    return _compile(source).render(**variables)


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}...{% endgeneration %}, which renders its content unchanged.

    Templates mark assistant turns with it for transformers.
    """

    tags = {"generation"}  # noqa: RUF012  jinja declares it a plain set

    def parse(self, parser: Any) -> nodes.Node:
        """Parse the tag into a call of `_body` with the content between the tags.

        jinja calls this method where the tag begins.
        """
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        # The two empty lists are the parameters of the block and their defaults: it has none.
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        """Return the content between the tags unchanged."""
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace, except that a template cannot set attributes that begin with an
    underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # `self` may be a key
        """Set attributes given as `dict` takes them: as keywords, as one mapping, or both.

        `self` is not in the signature, because a template may pass a keyword of that name. Raises
        SecurityError for an attribute that begins with an underscore.
        """
        self, *mappings = args
        attributes = dict(*mappings, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one attribute. Raises SecurityError if its name begins with an underscore."""
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    """Raise SecurityError for an attribute name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store the attribute {name!r}")


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """Compile a template. Raises UserError MODEL_UNSUPPORTED for a syntax error."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise model_files.unsupported(
            f"the chat template does not compile: {error}", "Correct chat_template.jinja."
        ) from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Make the sandboxed jinja environment with the extras of transformers, once per process."""
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
    """The filter `tojson`. It replaces jinja's own, which escapes HTML characters: no model was
    trained on such escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    """Refuse a conversation: a chat template calls this as `raise_exception`."""
    raise jinja2.TemplateError(message)
