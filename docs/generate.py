"""Writes the reference pages that are made from the code: `make docs`.

`docs/settings.md` comes from the settings schema, `docs/tools.md` from the tools a server offers,
`docs/metrics.md` from the list of metric names.
`tests/test_docs.py` fails when a page differs from what this makes.
"""

from pathlib import Path
from typing import Any

from engine.core.metrics import METRICS
from engine.home.run_dir import Home
from engine.settings.resolution import settings_reference
from mcp_server.protocol.tools import all_tools

DOCS = Path(__file__).parent
NOTE = "<!-- made by docs/generate.py (`make docs`); edit the code, not this page -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated page: its path and its whole text."""
    return {
        DOCS / "settings.md": NOTE + settings_reference().strip() + "\n",
        DOCS / "tools.md": NOTE + tools_reference(),
        DOCS / "metrics.md": NOTE + metrics_reference(),
    }


def tools_reference() -> str:
    """The tools of the server with their arguments, as Markdown."""
    parts = [
        "# Tools\n\n"
        "Arguments are flat and checked before anything happens; an unknown one is refused with "
        "the nearest name. Every result holds `summary`, `next` (calls that make sense now) and "
        "`warnings`; where a result was cut, `next_cursor` asks for the rest.\n"
    ]
    for tool in all_tools(Home(Path("home")), ()):
        parts.append(
            f"## {tool.name}\n\n{tool.description.strip()}\n\n{_effect(tool.annotations)}\n"
        )
        rows = [_row(name, part, tool.parameters) for name, part in _arguments(tool.parameters)]
        if rows:
            head = "| argument | type | default | |\n|---|---|---|---|\n"
            parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def metrics_reference() -> str:
    """The columns of `metrics.jsonl` as Markdown."""
    lines = [
        "# Metrics",
        "",
        "The columns of `metrics.jsonl`, beside `step` and `time`. A share lies between 0 and 1.",
        "",
        "| name | meaning | unit | written by |",
        "|---|---|---|---|",
    ]
    for metric in METRICS.values():
        when = " at evaluations" if metric.where == "evaluation" else ""
        by = ", ".join(metric.algorithms) + when
        lines.append(f"| `{metric.name}` | {metric.meaning} | {metric.unit} | {by} |")
    return "\n".join(lines) + "\n"


def _effect(hints: Any) -> str:
    return "Only reads." if hints.read_only_hint else "Changes something."


def _arguments(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(schema.get("properties", {}).items())


def _row(name: str, part: dict[str, Any], schema: dict[str, Any]) -> str:
    if name in schema.get("required", []):
        default = "needed"
    elif part.get("default") is None:
        default = {"object": "`{}`", "array": "`[]`"}.get(part.get("type", ""), "")
    else:
        default = f"`{_literal(part['default'])}`"
    return f"| `{name}` | {_type(part)} | {default} | {_bounds(part)} |"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _type(part: dict[str, Any]) -> str:
    if "enum" in part:
        return " \\| ".join(f"`{value}`" for value in part["enum"] if value != "")
    if part.get("type") == "array":
        return f"list of {part.get('items', {}).get('type', 'any')}"
    return str(part.get("type", "any"))


def _bounds(part: dict[str, Any]) -> str:
    text = part.get("description", "").replace("|", "\\|")
    low = part.get("minimum", part.get("exclusiveMinimum", part.get("minItems")))
    high = part.get("maximum", part.get("exclusiveMaximum", part.get("maxItems")))
    if low is not None and high is not None:
        above = "above " if "exclusiveMinimum" in part else ""
        text = f"{text} ({above}{low} to {high})".strip()
    return text


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
