"""Weights that begin within a cache line are copied to the beginning of one; others stay where they are.

Run: pytest tests/model/machine/test_cache_lines.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from model.api.loading.weights import read_weights
from model.machine.hardware import LINE, begin_at_lines
from tests.model.api.loading.tiny_gguf import tiny_llama


def within_a_line(*size: int) -> nn.Parameter:
    numbers = torch.arange(1.0 + torch.Size(size).numel())
    return nn.Parameter(numbers[1:].view(size))


def test_weights_within_a_line_move_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(8, 6))
    model[0].weight = model[1].weight = within_a_line(6, 8)
    aligned = model[2].weight.data_ptr()
    begin_at_lines(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.data_ptr() % LINE == 0
    assert torch.equal(model[0].weight, torch.arange(1.0, 49.0).view(6, 8))
    assert model[2].weight.data_ptr() == aligned


@pytest.mark.parametrize("shift", [0, 8])
def test_the_weights_of_a_file_begin_at_lines(tmp_path: Path, shift: int) -> None:
    given = tiny_llama()
    given.save_pretrained(tmp_path)
    # Its header ends with spaces: another length puts every weight elsewhere.
    (file,) = tmp_path.glob("*.safetensors")
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size] + b" " * shift
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    model = read_weights(tmp_path, dtype=given.dtype)
    assert all(weight.data_ptr() % LINE == 0 for weight in model.parameters())
    read = model.state_dict()
    assert all(torch.equal(read[name], weight) for name, weight in given.state_dict().items())
