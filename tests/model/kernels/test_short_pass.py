"""The kernel for few rows: exact, the same bits for any number of rows, and a message if it is missing.

Run: pytest tests/model/kernels/test_short_pass.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from model.kernels import short_pass as module
from model.kernels.short_pass import DTYPES, short_pass_kernel

needs_kernel = pytest.mark.skipif(
    module.this_kind()[0] not in (*module.INSTRUCTIONS, module.ARM),
    reason="the kernel is for AVX2, AVX-512 and ARM",
)


def run(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the kernel's result."""
    outputs: torch.Tensor = torch.ops.token_recycling.few_rows(rows, weight, bias)
    return outputs


@pytest.fixture
def kernel() -> None:
    """Load the kernel."""
    assert short_pass_kernel()


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("inputs", [1, 7, 40, 129, 704, 5001])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_float32_and_rounds_once(dtype: torch.dtype, has_bias: bool, inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    outputs = 37
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    rows = torch.randn(1, 21, inputs, generator=generator).to(dtype)
    exact = rows.double() @ weight.double().t()
    if bias is not None:
        exact += bias.double()
    found = run(rows, weight, bias)
    assert found.dtype == dtype and found.shape == (1, 21, outputs)
    # Sums in half precision would be off by more than this from the third term on.
    torch.testing.assert_close(
        found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7 * inputs
    )


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("inputs", [91, 3001])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others(
    dtype: torch.dtype, threads: int, inputs: int
) -> None:
    before = torch.get_num_threads()
    weight, bias = torch.randn(300, inputs).to(dtype), torch.randn(300).to(dtype)
    rows = torch.randn(40, inputs).to(dtype)
    together = run(rows, weight, bias)
    try:
        torch.set_num_threads(threads)
        for num_rows in (*range(1, 18), 31, 32, 39):
            for first in (0, 1, 40 - num_rows):
                part = run(rows[first : first + num_rows], weight, bias)
                assert torch.equal(part, together[first : first + num_rows]), num_rows
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.usefixtures("kernel")
def test_tensors_need_not_be_in_order() -> None:
    rows, weight, bias = torch.randn(40, 5).t(), torch.randn(40, 24).t(), torch.randn(48)[::2]
    expected = torch.nn.functional.linear(rows, weight, bias)
    torch.testing.assert_close(run(rows, weight, bias), expected)
    assert run(rows[:0], weight, bias).shape == (0, 24)


@needs_kernel
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("rows", "weight", "bias"),
    [
        (torch.randn(2, 5), torch.randn(3, 4), None),
        (torch.randn(2, 4), torch.randn(3, 4), torch.randn(2)),
        (torch.randn(2, 4), torch.randn(3, 4).bfloat16(), None),
        (torch.randn(2, 4).double(), torch.randn(3, 4).double(), None),
        (torch.randn(2, 0), torch.randn(3, 0), None),
    ],
    ids=["inputs", "bias", "two dtypes", "float64", "no inputs"],
)
def test_what_does_not_fit_is_refused(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with pytest.raises(RuntimeError, match=r"few_rows: got .*; allowed: "):
        run(rows, weight, bias)


@needs_kernel
@pytest.mark.usefixtures("kernel")
def test_a_compiler_knows_its_shapes() -> None:
    checks = ("test_schema", "test_faketensor")
    rows, weight = torch.randn(2, 3, 40), torch.randn(24, 40)
    ops = torch.ops.token_recycling
    torch.library.opcheck(ops.few_rows.default, (rows, weight, None), test_utils=checks)
    torch.library.opcheck(ops.largest.default, (weight, 8), test_utils=checks)


@pytest.fixture
def unbuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for the kernel."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def load_again() -> str | None:
    """Load the kernel, whatever was loaded before."""
    return short_pass_kernel.__wrapped__()


@needs_kernel
@pytest.mark.parametrize(
    ("compiler", "why"),
    [("no-such-compiler", "no C++ compiler: got no-such-compiler"), ("false", "false failed: 1")],
)
def test_without_a_compiler_it_is_said_why(
    compiler: str,
    why: str,
    unbuilt: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: compiler)
    assert load_again() is None
    lines = caplog.messages
    assert len([line for line in lines if why in line]) == 1
    assert not list(unbuilt.rglob("*.*")), "something is left"


@needs_kernel
def test_a_folder_that_cannot_be_written_is_said(
    unbuilt: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (unbuilt / "token-recycling").write_text("a file")
    assert load_again() is None
    assert "token-recycling" in caplog.text


@needs_kernel
def test_without_tools_for_extensions_it_is_said_why(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)
    monkeypatch.delattr(torch.utils, "cpp_extension")
    assert load_again() is None
    assert "cpp_extension" in caplog.text


def test_other_processors_use_what_torch_has(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert load_again() is None
    assert "got DEFAULT" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for linux")
@pytest.mark.parametrize(
    ("capability", "has_units", "uses_them"),
    [("AVX512", True, True), ("AVX512", False, False), ("AVX2", True, False)],
)
def test_units_for_bfloat16_are_used_where_they_are(
    capability: str, has_units: bool, uses_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    assert module.this_kind() in module.kinds()
    assert (module.BFLOAT16_UNITS in module._instructions(*module.this_kind())) == uses_them


@pytest.mark.skipif(sys.platform != "linux", reason="the kernels are for linux")
def test_on_arm_there_is_one_kind_with_simde_for_the_instructions_of_avx2(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: module.ARM)
    assert module.kinds() == (module.this_kind(),) == (("aarch64", False),)
    assert not any(word.startswith("-m") for word in module._instructions(*module.this_kind()))
