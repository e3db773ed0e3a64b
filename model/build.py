"""Builds all C++ of the library ahead, so that no first use waits for a compiler, as in a container image.

Each file is built once for each version of it, of torch and of the processor's kind, and kept where torch
keeps its extensions. `prebuild` writes those of all kinds of processors, which a wheel carries (setup.py).

Run: python -m model.build
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from .commands.command_line import OptionParser, UserError, command_of, run_command
from .machine.files import BuildError

COMMAND = command_of("build")
EXAMPLES = f"""\
examples:
  # once, where the library is installed; later runs find all built
  {COMMAND}

  # into a folder of an image, which must be set in the same way when the library runs
  TORCH_EXTENSIONS_DIR=/opt/extensions {COMMAND}

  # with another compiler than g++
  CXX=clang++ {COMMAND}
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Build what is not built yet, and say what, where and how long it took; UserError for what cannot be."""
    parser = OptionParser(
        prog=COMMAND,
        description="Build all C++ of the library now, so that no first use waits for the compiler.",
        epilog=EXAMPLES,
    )
    parser.parse_args(argv)
    from .kernels.short_pass import UnsupportedProcessorError  # torch takes a second

    for what, library in libraries().items():
        begin, since = time.perf_counter(), time.time()
        try:
            file = library()
        except UnsupportedProcessorError as error:
            print(f"left out  {what}: {error}")
            continue
        except (BuildError, ImportError, OSError) as error:
            raise UserError(f"{what}: {error}") from error
        seconds = time.perf_counter() - begin
        is_new = file.stat().st_mtime >= since - 1
        print(f"built in {seconds:.1f} s" if is_new else "found     ", what, file, sep="  ")
    return 0


def libraries() -> dict[str, Callable[[], Path]]:
    """Return what builds each library of the package, by what it is for; it raises as `built`, and
    `UnsupportedProcessorError` for a processor that the library is not made for.
    """
    from .budget.best_first import tree_library
    from .kernels.short_pass import kernel_library
    from .methods.hybrid.candidate_pool import SOURCE as of_hybrid
    from .methods.recycling.auto_tree import SOURCE as of_recycling

    trees = {"trees of hybrid": of_hybrid, "automatic trees of recycling": of_recycling}
    return {
        "kernels for passes over a few rows": kernel_library,
        **{what: partial(tree_library, source, what) for what, source in trees.items()},
    }


def prebuild(folder: Path) -> None:
    """Write all libraries into a folder, for every kind of processor of this platform.

    Raises:
        BuildError, ImportError, OSError: as `built`.
    """
    from .kernels.short_pass import kernel_library, kinds

    folder.mkdir(parents=True, exist_ok=True)
    _, *trees = libraries().values()
    for kind in kinds():
        shutil.copy(kernel_library(kind), folder)
    for library in trees:
        shutil.copy(library(), folder)


if __name__ == "__main__":
    run_command(run)
