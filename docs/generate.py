"""Writes the reference pages that are made from the code: `make docs`.

`docs/settings.md` comes from the settings schema, `docs/tools.md` from the tools a server offers,
`docs/metrics.md` from the list of metric names, `docs/models.md` from what the tests of model
families saw (`tests/families.json`), `docs/skills.md` from the questions models are asked,
`docs/gpus.md` from the estimates of runs on GPUs of many sizes.
`tests/test_docs.py` fails when a page differs from what this makes.
"""

from pathlib import Path
from typing import Any

from engine.core.files import read_json
from engine.core.metrics import METRICS
from engine.dry_run import gpu_plans
from engine.home.run_dir import Home
from engine.settings.resolution import settings_reference
from engine.skills.card import skills_card
from mcp_server.protocol.tools import all_tools

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
NOTE = "<!-- made by docs/generate.py (`make docs`); edit the code, not this page -->\n\n"


def pages() -> dict[Path, str]:
    """Every generated page: its path and its whole text."""
    return {
        DOCS / "settings.md": NOTE + settings_reference().strip() + "\n",
        DOCS / "tools.md": NOTE + tools_reference(),
        DOCS / "metrics.md": NOTE + metrics_reference(),
        DOCS / "skills.md": NOTE + skills_card(),
        DOCS / "models.md": NOTE + models_reference(),
        DOCS / "gpus.md": NOTE + gpu_plans.page(),
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
        when = {"evaluation": " at evaluations", "gpu": " on a GPU"}.get(metric.where, "")
        by = ", ".join(metric.algorithms) + when
        lines.append(f"| `{metric.name}` | {metric.meaning} | {metric.unit} | {by} |")
    return "\n".join(lines) + "\n"


def models_reference() -> str:
    """Families of models, and what the tests saw of each, as Markdown."""
    families = read_json(TESTS / "families.json")
    lines = [
        "# Models",
        "",
        "Whatever transformers loads as a causal language model is trained, also as the part of a "
        "larger model that reads text (`text_config`). A model is refused by name, with the "
        "reason, if it needs its own Python code, is quantized, reads its prompt in an encoder, "
        "has no attention at all, or is unknown to the transformers installed. One that samples "
        "with a cache what it does not compute without one is refused when it is loaded.",
        "",
        "Each family below was trained by its tests on a tiny random model: SFT and GRPO, stopped "
        "after a step and resumed, the log-probabilities of sampled tokens held against the "
        "trainer's, the adapter exported and read by PEFT itself, merged, served "
        "(`make families`).",
        "",
        "| family | model_type | forward | SFT | GRPO | export | deploy | `all-linear` means |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in families.values():
        columns = ("path", "sft", "grpo", "export", "deploy", "targets")
        cells = [row["models"], f"`{row['model_type']}`", *(row[name] for name in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*forward*: `own` is Honesmith's own, held to transformers' logits when a model is loaded; "
        "`transformers` runs the family's own class with PEFT's adapters, and so does a model of "
        "an `own` family with a part that the own forward lacks (sliding windows, dynamic or "
        "partial rotary positions, 4 bits). So Gemma and OLMo 3, whose layers alternate between "
        "windows and full attention, Ministral 3, whose queries grow with their position, and "
        "every model with another part beside the text run through transformers.",
        "",
        "*Experts* are not adapted: of a mixture only attention, and what takes its place, carries "
        "an adapter, because PEFT takes the names of an MLP there for the fused experts. PEFT's "
        "`target_parameters` would adapt them, but compute the changed weights of every expert "
        "anew in each pass, whatever the tokens choose, and allow no dropout. Estimates count all "
        "experts as memory and the chosen ones as work.",
    ]
    return "\n".join(lines) + "\n"


def _effect(hints: Any) -> str:
    return "Only reads." if hints.read_only_hint else "Changes something."


def _arguments(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(schema.get("properties", {}).items())


def _row(name: str, part: dict[str, Any], schema: dict[str, Any]) -> str:
    if name in schema.get("required", []):
        default = "needed"
    elif part.get("default") is None:
        empty = {"object": "`{}`", "array": "`[]`", "string": '`""`', "boolean": "`false`"}
        default = empty.get(part.get("type", ""), "")
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
