"""What clients ask for beside questions: a function to call, and a form to fill in."""

from __future__ import annotations

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
}
WISH = "How will the weather in Rome be over the next three days?"


def check(arguments: dict[str, object]) -> None:
    """Refuse arguments that the schema does not allow."""
    assert arguments["city"] in ("Rome", "Oslo", "Lima"), arguments
    assert arguments["days"] in range(1, 10) and len(arguments) == 2, arguments
