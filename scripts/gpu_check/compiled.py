r"""Compile the kernels of fused passes for GPUs that are not here; print registers, spills and shared memory.

It needs Triton, and no GPU. The shape is the 7B's of `scripts.enlarge`, in float16.

Examples:
    python -m scripts.gpu_check.compiled
    python -m scripts.gpu_check.compiled --capabilities 80 90 --nodes 1 88

Exit code: 0 if every kernel compiles and none spills more than 256 bytes, 1 otherwise.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from evaluation.reporting.tables import markdown_table
from model.backends.fused.decoder import Decoder, Layer, Norm, Rope, Weight
from model.backends.fused.fused_pass import FusedPass
from model.commands.command_line import OptionParser, UserError, run_command
from scripts.enlarge import SHAPES

# Of a kernel: "Used 96 registers", "16 bytes spill stores".
REGISTERS, SPILLS = re.compile(r"Used (\d+) registers"), re.compile(r"(\d+) bytes spill stores")
NUM_ROWS, VOCABULARY = 2048, 32_000
SETTINGS = ("num_warps", "num_stages", "enable_fp_fusion")
# Bytes of a thread's numbers that do not fit registers: so few cost nothing.
MOST_SPILLED = 256


class Launch(NamedTuple):
    """A kernel as a pass launches it."""

    name: str
    given: Sequence[Any]
    options: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.gpu_check.compiled", description=__doc__)
    add = parser.add_argument
    add("--capabilities", type=int, nargs="+", default=[80, 90], metavar="SM", help="such as 90")
    add(
        "--nodes",
        type=int,
        nargs="+",
        default=[1, 32, 64, 88, 128],
        metavar="N",
        help="nodes of passes",
    )
    options = parser.parse_args(argv)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError("triton: got none; pip install triton") from error
    rows, is_bad = [], False
    for capability in options.capabilities:
        seen = set()
        for num_nodes in options.nodes:
            for launch in launches(num_nodes):
                key = (launch.name, str(sorted(launch.options.items())))
                if key not in seen:
                    seen.add(key)
                    registers, spilled, shared = resources(launch, capability)
                    is_bad |= spilled > MOST_SPILLED
                    rows.append(
                        [f"sm_{capability}", launch.name, num_nodes, registers, spilled, shared]
                    )
    header = ["GPU", "kernel", "nodes", "registers", "bytes spilled", "bytes shared"]
    print(markdown_table(header, [[str(cell) for cell in row] for row in rows], 2))
    return int(is_bad)


def launches(num_nodes: int) -> list[Launch]:
    """Return the kernels of a pass of one layer over so many nodes."""
    found: list[Launch] = []

    def note(name: str, grid: Any, given: Sequence[Any], options: Mapping[str, Any]) -> None:
        found.append(Launch(name, given, dict(options)))

    shape = SHAPES["7b"]
    hidden, inner, heads = (
        shape[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = hidden // heads
    with torch.device("meta"), torch.inference_mode():

        def weight(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=torch.float16)

        norm = Norm(weight(hidden), 1e-5, from_one=False)
        layer = Layer(
            *(norm, None, norm, None),
            *(
                Weight(weight(3 * hidden, hidden), None),
                None,
                None,
                Weight(weight(hidden, hidden), None),
            ),
            *(Weight(weight(2 * inner, hidden), None), Weight(weight(hidden, inner), None)),
            rope=Rope(torch.empty(NUM_ROWS, size // 2), torch.empty(NUM_ROWS, size // 2)),
            scale=size**-0.5,
            window=0,
            softcap=0.0,
        )
        embedding = nn.Embedding(VOCABULARY, hidden, dtype=torch.float16)
        sizes = (0.0, heads, heads, size, False)
        decoder = Decoder(embedding, None, [layer], norm, weight(VOCABULARY, hidden), *sizes)
        rows = weight(1, NUM_ROWS, heads, size).transpose(1, 2)
        cache = SimpleNamespace(keys=rows, values=rows)
        ids, start = (torch.zeros(shape, dtype=torch.long) for shape in ((1, num_nodes), (1,)))
        sees = torch.ones(1, num_nodes, num_nodes, dtype=torch.bool)
        read = (ids, ids, sees, start, start, [cache], NUM_ROWS)
        FusedPass(decoder, launch=note).logits(*read)
    return found


def resources(launch: Launch, capability: int) -> tuple[int, int, int]:
    """Return the registers of a thread, bytes spilled and bytes of shared memory of a compiled kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    from model.backends.fused import kernels

    function = getattr(kernels, launch.name)
    options = dict(launch.options)
    settings = {name: options.pop(name) for name in SETTINGS}
    options["DEPENDENT"] = capability >= 90
    signature = {
        name: _type_of(value) for name, value in zip(function.arg_names, launch.given, strict=False)
    }
    signature |= dict.fromkeys(options, "constexpr")
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, value in enumerate(launch.given)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and value)
    }
    source = ASTSource(function, signature, options, aligned)
    found = compiled(source, target=GPUTarget("cuda", capability, 32), options=settings)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(found.asm["ptx"], encoding="utf-8")
        arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        words = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={arch}",
            str(text),
            "-o",
            f"{folder}/out",
        ]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    (registers,), (spilled,) = REGISTERS.findall(said), SPILLS.findall(said)
    return int(registers), int(spilled), found.metadata.shared


def _type_of(value: Any) -> str:
    kinds = {
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.uint8: "*u8",
    }
    if isinstance(value, torch.Tensor):
        return kinds[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


if __name__ == "__main__":
    run_command(main)
