"""Model options: the demo model is the default if it exists; otherwise a model must be given.

Run: pytest tests/model/commands/test_model_options.py
"""

from __future__ import annotations

import pytest

from model.commands import model_options
from model.commands.command_line import UserError, config_of
from model.commands.model_options import DEFAULT_MODEL, ModelOptions


def test_the_demo_model_is_the_default_of_a_checkout() -> None:
    assert DEFAULT_MODEL == str(model_options.DEMO_MODEL) == ModelOptions().model_path


def test_a_model_is_asked_for_in_one_line_where_there_is_no_default() -> None:
    with pytest.raises(UserError, match=r"^model_path: got none; give --model-path, [^\n]*$"):
        config_of(ModelOptions, {"model_path": ""})


def test_graphs_are_on_or_off() -> None:
    assert ModelOptions(graphs="off").graphs == "off"
    with pytest.raises(UserError, match=r"^graphs: got [^\n]*$"):
        config_of(ModelOptions, {"graphs": "on"})
