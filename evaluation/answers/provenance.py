"""Where figures come from: weights and commit, for the sidecar of every answer file."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

from model.commands.command_line import UserError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def model_fingerprint(model_path: str, hf_config: Any) -> str:
    """Return 12 digits that tell weights apart: the hub's commit, or a hash of a folder's files or a GGUF file.

    Of large files only size, first and last megabyte are read: enough to tell checkpoints apart
    without reading gigabytes.
    """
    if hub_commit := getattr(hf_config, "_commit_hash", None):
        return hub_commit[:12]
    digest = hashlib.sha256()
    path = Path(model_path)
    in_folder = (file for file in sorted(path.glob("*")) if file.suffix in WEIGHT_SUFFIXES)
    for file in [path] if path.is_file() else in_folder:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(2**20))
            content.seek(max(0, size - 2**20))
            digest.update(content.read())
    return digest.hexdigest()[:12]


def check_weights(
    model_path: str, hf_config: Any, fingerprint: str, what: str, advice: str
) -> None:
    """Refuse a model whose weights are not those of an earlier run.

    The error says "... `what` of FINGERPRINT; `advice`", such as "the answers are" and "give that model".

    Raises:
        UserError: if the fingerprints differ.
    """
    found = model_fingerprint(model_path, hf_config)
    if found != fingerprint:
        raise UserError(
            f"model_path {model_path}: got weights {found}; {what} of {fingerprint}; {advice}"
        )


def git_commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if tracked files differ; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
