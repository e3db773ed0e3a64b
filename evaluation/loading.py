"""Device, dtype, tokenizer and weights of a run, with mistakes said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from evaluation.command_line import UserError, first_line
from evaluation.run_config import RunConfig
from model.hf import TargetModel, UnsupportedModelError
from model.self_test import self_test


def choose_device(run: RunConfig) -> torch.device:
    """Return the device of the run."""
    name = run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a device without numbers (meta) is none
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(
            f"device: got {run.device!r}; allowed: auto, cpu, or a device that is here ({cause})"
        ) from error
    if device.type == "cpu" and run.num_gpus_per_model > 1:
        raise UserError(f"num_gpus_per_model: got {run.num_gpus_per_model} on cpu; allowed: 1")
    return device


def choose_dtype(run: RunConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the run."""
    if run.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.float16
    if run.dtype == "float16" and device.type == "cpu":
        raise UserError("dtype: got float16 on cpu; allowed there: float32, float64, bfloat16")
    return getattr(torch, run.dtype)


def load_config_and_tokenizer(model_path: str) -> tuple[Any, Any]:
    """Load what is small about a model.

    Raises:
        UserError: if it is not there, or is not a causal LM.
    """
    is_folder = Path(model_path).is_dir()
    looks_local = model_path.startswith((".", "/", "~")) or model_path.count("/") != 1
    if not is_folder and (looks_local or not model_path):
        raise UserError(
            f"model_path: got {model_path!r}; allowed: a folder with a model, or a hub name ORG/NAME"
        )
    if is_folder and not (Path(model_path) / "config.json").is_file():
        raise UserError(
            f"model_path: the folder {model_path} has no config.json; give a folder with a model"
        )
    try:
        config = AutoConfig.from_pretrained(model_path)
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    # transformers raises many types for a missing, broken or unknown model.
    except Exception as error:
        raise UserError(
            f"model_path {model_path}: cannot be loaded: {first_line(error)}"
        ) from error
    if not _is_causal(config):
        raise UserError(
            f"model_path {model_path}: is of type {config.model_type}; allowed: causal language models"
        )
    return config, tokenizer


def _is_causal(config: Any) -> bool:
    """Whether a config is of a decoder-only language model.

    Transformers has causal classes for BERT and its kin and for the decoders of BART and its kin;
    with weights trained for anything else they write noise.
    """
    trained_as = getattr(config, "architectures", None) or ()
    return (
        type(config) in AutoModelForCausalLM._model_mapping
        and not getattr(config, "is_encoder_decoder", False)
        and not any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in trained_as)
    )


def load_target(
    run: RunConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> TargetModel:
    """Load the weights, and test that the model verifies drafts exactly."""
    placement = {"device_map": "auto"} if run.num_gpus_per_model > 1 else {}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            run.model_path, config=hf_config, dtype=dtype, **placement
        )
        target = TargetModel(model.eval() if placement else model.eval().to(device))
        self_test(target)
    except UnsupportedModelError as error:
        raise UserError(str(error)) from error
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"model_path {run.model_path}: weights cannot be loaded: {first_line(error)}"
        ) from error
    return target


def eos_ids_of(target: TargetModel, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a text: the generation config's, and the tokenizer's."""
    found = getattr(target.model.generation_config, "eos_token_id", None)
    listed = found if isinstance(found, list) else [found]
    return frozenset(token for token in (*listed, tokenizer.eos_token_id) if token is not None)
