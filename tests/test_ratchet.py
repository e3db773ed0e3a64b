"""The size of the product may fall and not rise: its lines, its folders, and how many files a step runs through.

A change that lowers a number lowers it here, too. One that raises a number says beside it why.

Run: pytest tests/test_ratchet.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from model import SpeculativeDecoder
from tests.tracer import PRODUCT, ROOT, listed, num_lines, traced

# Lines of the product: .py, .cpp and .h of model, evaluation, scripts and integrations.
# More than before: what a model computes with is checked at every text, GGUF says all, the library application
# developers expect; reports hold every identity of honest runs, sidecars name the machine, and trajectories
# are read in all their forms; the published method and ours have names of their own, tables their commands, and
# two more engines take part; acceptance is shown over the age of the memory; models are recorded, methods replayed;
# the server keeps conversations, takes several texts a request, limits connections, and calls functions; texts obey
# grammars and follow predictions, in the harness too; ToolSpec; wheels carry their C++; SSSD, AdaPLD, STAND with
# drafts that are drawn, block drafters in three forms of checkpoints; passes of known decoders on a GPU are fused,
# what heads read and draft there is replayed, and P-EAGLE; quantised weights are multiplied in whole numbers, and
# whatever class their embedding has; the texts of a batch are attended in one call; MTP layers of MiMo are read;
# the kernels are compiled for ARM; traces share a mode, and no compiler is said once.
MOST_LINES = 54_569
# Files and folders in a folder of the product; Spec-Bench's inference_* commands are one more entry of evaluation,
# recording and replaying two. A method is a folder.
MOST_ENTRIES, MORE_ENTRIES = 16, {"evaluation": 19, "model/methods": 17}
# Of one step of plain decoding on a CPU, called as a user does: files that it runs through, and the lines of these.
# More than before: a text within a text, and a forked process, are answered or refused; logits are rounded for
# drafters, rows of several texts are kept without spare room, drafters are told what probably follows, drafts may
# be drawn, and a backend may fuse passes.
MOST_FILES_OF_A_STEP, MOST_LINES_OF_A_STEP = 16, 2_864
# Files that a comparison of two methods on two questions runs through; one more asks what is known of the answers,
# and two whether an earlier start has proved the same weights and code.
MOST_FILES_OF_A_COMPARISON = 63

SOURCES = (".py", ".cpp", ".h")
# A command of Spec-Bench's for each method is a file of its own.
IS_ONE_ENTRY = "inference_*.py"


def sources() -> list[Path]:
    """Return the source files of the product, without what tools and builds leave there."""
    found = (file for package in PRODUCT for file in (ROOT / package).rglob("*"))
    return [file for file in found if file.suffix in SOURCES and "build" not in file.parts]


def test_the_product_has_no_more_lines() -> None:
    count = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources())
    assert count <= MOST_LINES


def test_no_folder_has_more_entries() -> None:
    entries: dict[Path, set[str]] = {}
    for file in sources():
        name = IS_ONE_ENTRY if file.match(f"evaluation/{IS_ONE_ENTRY}") else file.name
        entries.setdefault(file.parent, set()).add(name)
        for folder in file.relative_to(ROOT).parents[:-2]:
            entries.setdefault((ROOT / folder).parent, set()).add(folder.name)
    counts = {folder.relative_to(ROOT).as_posix(): len(names) for folder, names in entries.items()}
    most = {folder: MORE_ENTRIES.get(folder, MOST_ENTRIES) for folder in counts}
    assert {folder: count for folder, count in counts.items() if count > most[folder]} == {}


def test_a_plain_step_runs_through_no_more_files() -> None:
    folder = str(ROOT / "data/demo/model")
    decoder = SpeculativeDecoder.from_pretrained(folder, method="vanilla", dtype=torch.float32)
    pieces = decoder.stream("USER: Tell me about the sea. ASSISTANT:", max_new_tokens=8)
    for _ in range(4):
        next(pieces)
    with traced() as called:
        next(pieces)
    assert len(called) <= MOST_FILES_OF_A_STEP, listed(called)
    assert num_lines(called) <= MOST_LINES_OF_A_STEP, listed(called)


def test_a_comparison_runs_through_no_more_files(tmp_path: Path) -> None:
    # In a process of its own: what other tests have found or built already would not run again.
    code = (
        "import sys; from evaluation.compare import main; from tests.tracer import listed, traced\n"
        "with traced() as called: code = main(sys.argv[2:])\n"
        "open(sys.argv[1], 'w').write(listed(called)); sys.exit(code)"
    )
    given = [
        "--methods",
        "vanilla",
        "recycling",
        "--num-questions",
        "2",
        "--max-new-tokens",
        "8",
        "--threads",
        "1",
    ]
    command = [sys.executable, "-c", code, str(tmp_path / "called"), *given, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    called = (tmp_path / "called").read_text(encoding="utf-8")
    assert 10 < len(called.splitlines()) <= MOST_FILES_OF_A_COMPARISON, called
