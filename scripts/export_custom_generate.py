"""Write a `custom_generate` folder: speculative decoding wherever transformers loads the model.

The folder holds `DIR/custom_generate/generate.py` and `requirements.txt`, in the form that the Hub
expects beside a model, or in a repository of its own. `generate.py` imports the package
token-recycling, which has to be installed where the folder is used.

`model.generate(**inputs, custom_generate="DIR", trust_remote_code=True)` then decodes with Token
Recycling, or with the method of `method=`; and a model folder with it inside, loaded with
`trust_remote_code=True`, generates that way by itself.

Example:
    python -m scripts.export_custom_generate --out my-model
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from model.commands.command_line import OptionParser, UserError, run_command
from model.commands.files import write_whole

GENERATE = '''\
"""Speculative decoding in place of `generate`; what it learns lives with the model.

Arguments are those of `generate`, and `method` and `method_options`: see
`token_recycling.api.accelerate.generate_from_folder`.
"""

try:
    from token_recycling.api.accelerate import generate_from_folder as generate
except ImportError:
    try:  # a checkout of the package, which is there as `model`
        from model.api.accelerate import generate_from_folder as generate
    except ImportError as error:
        raise ImportError(
            "custom_generate: the package token-recycling is not installed; "
            "run `pip install .` in its source folder"
        ) from error

__all__ = ["generate"]
'''
# Transformers reads one condition a line, and nothing more elaborate.
REQUIREMENTS = "torch>=2.11\ntransformers>=4.57\n"


def export(out: Path, overwrite: bool = False) -> list[Path]:
    """Write the folder into `out` and return its files; UserError if one is there already, or cannot be written."""
    folder = out / "custom_generate"
    files = {folder / "generate.py": GENERATE, folder / "requirements.txt": REQUIREMENTS}
    there = [str(file) for file in files if file.exists()]
    if there and not overwrite:
        raise UserError(f"out: {', '.join(there)} exists already; give --overwrite to replace it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot make {folder}: {error.strerror}") from error
    for file, content in files.items():
        write_whole(file, content)
    return list(files)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(prog="python -m scripts.export_custom_generate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of a model, or a new one")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    options = parser.parse_args(argv)
    for file in export(options.out, options.overwrite):
        print(file)
    return 0


if __name__ == "__main__":
    run_command(main)
