"""Chooses device and dtype, loads tokenizer, weights and a method's memory; a mistake is an error in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import has_file
from transformers.utils import logging as transformers_logging

from ..api.decoder import SpeculativeDecoder
from ..api.loading.weights import (
    check_gguf,
    choose_weights,
    is_gguf,
    read,
    read_tokenizer,
    read_weights,
)
from ..backends.graphs.graphed_target import graphed
from ..backends.proofs.self_test import prove
from ..backends.proofs.support import UnsupportedModelError, context_limit
from ..backends.target import TargetModel
from ..budget import memory as saved
from ..engine.drafter import Drafter
from ..kernels.registered_attention import turn_off_cudnn
from ..machine.packages import installed_version
from ..methods import CustomMethod, Method
from .command_line import UserError, first_line, user_errors
from .files import check_file
from .model_options import MODEL_PATHS, ModelOptions, auto_device, default_dtype

# Most threads per processor: far more exhaust the memory before anything runs.
MOST_THREADS = 8
# Weights as the hub has them, in one file or several.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LOADING_ERRORS = (OSError, ValueError, ImportError, RuntimeError, SafetensorError, UnpicklingError)
# They read a tokenizer.model, where a model has no tokenizer.json.
TOKENIZER_PACKAGES = ("sentencepiece", "protobuf")


class CheckedModel(NamedTuple):
    """Facts about a model before its weights load."""

    device: torch.device
    dtype: torch.dtype
    hf_config: Any
    tokenizer: Any
    weights: str | None = None  # how they are kept (`choose_weights`)

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens that the config names."""
        return getattr(self.hf_config.get_text_config(decoder=True), "vocab_size", None)


def check_model(
    options: ModelOptions, num_processes: int | None = None, is_elsewhere: bool = False
) -> CheckedModel:
    """Check model, device and dtype before the weights load; set torch's threads and attention.

    Args:
        options: the command's model options.
        num_processes: processes, each with a model, that share the processors if no threads are
            given; None leaves torch's choice.
        is_elsewhere: whether the threads are on other machines, so that this one sets no limit.

    Raises:
        UserError: if something given cannot be used.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # of the weights that load: noise in a log
    device = choose_device(options)
    dtype = default_dtype(device)
    if options.dtype == "float16" and device.type == "cpu":
        raise UserError("dtype: got float16 on cpu; allowed there: float32, float64, bfloat16")
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    turn_off_cudnn(device)
    threads = options.threads
    most = MOST_THREADS * (os.cpu_count() or 1)
    if threads and threads > most and not is_elsewhere:
        raise UserError(f"threads: got {threads}; allowed: 1 to {most} on this machine")
    if num_processes and not threads:
        threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    if threads:
        torch.set_num_threads(threads)
    hf_config, tokenizer = load_config_and_tokenizer(
        options.model_path, options.trust_remote_code, options.allow_pickle
    )
    weights, without_kernels = options.weights, options.kernels == "off"
    if weights == "auto" and without_kernels and is_gguf(options.model_path):
        weights = "dequantised"
    kept = None
    if weights != "auto" or not without_kernels:
        with user_errors():
            kept = choose_weights(options.model_path, weights, device, dtype, hf_config)
    return CheckedModel(device, dtype, hf_config, tokenizer, kept)


def check_prompt(checked: CheckedModel, length: int) -> None:
    """Raise UserError for a prompt of so many tokens that no answer fits, before the weights load."""
    limit = context_limit(checked.hf_config.get_text_config(decoder=True))
    if limit is not None and length >= limit:
        raise UserError(
            f"prompt: got {length} tokens; allowed: fewer than the model's context of {limit}; "
            "shorten the prompt"
        )


def choose_device(options: ModelOptions) -> torch.device:
    """Return the device; raises UserError if it cannot be used here, or contradicts the number of GPUs."""
    name = auto_device() if options.device == "auto" else options.device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # fails for a device without data (meta)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            f"device: got {options.device!r}; allowed: auto, cpu, or a device of this machine ({first_line(error)})"
        ) from error
    num_gpus = options.num_gpus_per_model
    if num_gpus > 1 and device.type == "cpu":
        refuse_gpus("num_gpus_per_model", num_gpus)
    if num_gpus > 1 and find_spec("accelerate") is None:
        raise UserError(
            f"num_gpus_per_model: got {num_gpus}, which needs accelerate; pip install accelerate"
        )
    return device


def refuse_gpus(option: str, num_gpus: int) -> NoReturn:
    """Refuse several GPUs if the device is the CPU."""
    raise UserError(
        f"{option}: got {num_gpus} on cpu; allowed: 1; for more processes give --num-workers"
    )


def load_config_and_tokenizer(
    model_path: str, trust_remote_code: bool = False, allow_pickle: bool = False
) -> tuple[Any, Any]:
    """Load config and tokenizer; UserError for what is no causal LM, or needs trust that was not given."""
    _check_place(model_path, allow_pickle)
    # Always explicit: without it, transformers asks at the terminal.
    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = read(AutoConfig, model_path, **trust)
        tokenizer = read_tokenizer(model_path, **trust)
    # transformers raises many types of errors for a missing, broken or unknown model.
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UserError(
                f"model_path {model_path}: brings Python code of its own, which was not run; read it, "
                "and give --trust-remote-code if you trust it"
            ) from error
        raise UserError(
            f"model_path {model_path}: cannot be loaded: {first_line(error)}{_packages_hint(error)}"
        ) from error
    if not (allow_pickle or is_gguf(model_path) or Path(model_path).is_dir()):
        _refuse_pickles_of_hub(model_path)
    if not _is_causal(config):
        raise UserError(
            f"model_path {model_path}: is of type {config.model_type}; allowed: causal language models"
        )
    return config, tokenizer


def _packages_hint(error: BaseException) -> str:
    """Return the advice to install a package that the tokenizer needs; "" if none is missing."""
    missing = [name for name in TOKENIZER_PACKAGES if installed_version(name) is None]
    is_of_tokenizer = any(word in str(error) for word in ("tokenizer.model", *TOKENIZER_PACKAGES))
    return f"; pip install {' '.join(missing)}" if missing and is_of_tokenizer else ""


def _check_place(model_path: str, allow_pickle: bool) -> None:
    """Refuse a model that does not exist, or whose weights may not be read."""
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(
                f"model_path: the folder {model_path} has no config.json; give {MODEL_PATHS}"
            )
        pickles = [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt*"))]
        if pickles and not allow_pickle and not any(folder.glob("*.safetensors")):
            _refuse_pickle(str(folder), pickles[0].name)
    elif is_gguf(model_path):
        try:
            check_gguf(model_path)
        except (OSError, ValueError) as error:
            raise UserError(f"model_path: {error}") from error
    elif model_path.startswith((".", "/", "~")) or model_path.count("/") != 1:
        raise UserError(f"model_path: got {model_path!r}; allowed: {MODEL_PATHS}")


def _refuse_pickles_of_hub(name: str) -> None:
    """Refuse a repository of pickles alone: transformers would ask a bot to convert them, and load what it made."""
    try:
        if any(has_file(name, file) for file in SAFETENSORS):
            return
        pickles = [file for file in PICKLES if has_file(name, file)]
    except OSError:  # what is wrong with the repository is said where its weights load
        return
    if pickles:
        _refuse_pickle(name, pickles[0])


def _refuse_pickle(model_path: str, pickle: str) -> NoReturn:
    raise UserError(
        f"model_path {model_path}: has its weights in {pickle}, a pickle; convert it to safetensors, or give "
        "--allow-pickle (eval.sh: ALLOW_PICKLE=1), which reads its tensors and runs none of its code"
    )


def _is_causal(config: Any) -> bool:
    """Whether a config is one of a decoder-only language model.

    Transformers also has causal classes for BERT-like models and BART-like decoders: these write noise.
    """
    trained_as = getattr(config, "architectures", None) or ()
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return (
        (has_own_code or type(config) in AutoModelForCausalLM._model_mapping)
        and not getattr(config, "is_encoder_decoder", False)
        and not any(name.endswith(("ForMaskedLM", "ForPreTraining")) for name in trained_as)
    )


def target_of(model: Any, options: ModelOptions) -> TargetModel:
    """Return the target of a loaded model, whose passes run as the options say; not yet tested."""
    use_kernels = options.kernels != "off"
    if options.graphs == "off" or model.device.type != "cuda":
        return TargetModel(model, use_kernels)
    return graphed(model, use_kernels, say=_say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_target(options: ModelOptions, checked: CheckedModel) -> TargetModel:
    """Load the weights and prove the model."""
    placement = {"device_map": "auto"} if options.num_gpus_per_model > 1 else {}
    # Or transformers asks the hub's bot to convert pickles, in a thread beside the answers that are timed.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")
    try:
        model = read_weights(
            options.model_path,
            checked.weights,
            config=checked.hf_config,
            dtype=checked.dtype,
            # None: safetensors if they exist, else a pickle, read without running its code.
            use_safetensors=None if options.allow_pickle else True,
            trust_remote_code=options.trust_remote_code,
            **placement,
        )
        target = target_of(model.eval() if placement else model.eval().to(checked.device), options)
        prove(target, say=_say)
    except UnsupportedModelError as error:
        raise UserError(str(error)) from error
    except LOADING_ERRORS as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UnpicklingError):
            cause = cause.__cause__ or cause.__context__  # transformers 4.57 wraps errors in others
        if cause is not None:
            raise UserError(
                f"model_path {options.model_path}: its pickle refers to code other than tensors, which was not "
                "run; get the weights as safetensors"
            ) from error
        hint = "" if options.allow_pickle else " (--allow-pickle also takes pickles)"
        raise UserError(
            f"model_path {options.model_path}: weights cannot be loaded: {first_line(error)}"
            f"{hint if 'safetensors' in str(error) else ''}"
        ) from error
    return target


def load_decoder(
    options: ModelOptions,
    checked: CheckedModel,
    method: Method | None,
    method_options: Mapping[str, Any],
) -> SpeculativeDecoder:
    """Load the weights, and return what decodes with a method; None: what pays on the device."""
    target = load_target(options, checked)
    with user_errors():
        name = CustomMethod(method.name) if method else None
        return SpeculativeDecoder(target, checked.tokenizer, name, **method_options)


def make_drafter(
    method: Method,
    config: Any,
    vocab_size: int,
    device: torch.device,
    memory: Mapping[str, torch.Tensor],
) -> Drafter:
    """Make the drafter and load the saved matrix, if one was given."""
    with user_errors():
        drafter = method.drafter_class(config, vocab_size, device)
        if memory:
            drafter.load_memory(memory)
    if memory and drafter.needs.cold_start:
        raise UserError(
            "load_matrix: got a matrix with --start cold, which forgets it before the first question; leave one out"
        )
    return drafter


def read_memory(file: str | None, tokenizer: Any = None) -> dict[str, torch.Tensor]:
    """Read a saved matrix for the tokens of a tokenizer; {} if no file was given."""
    if not file:
        return {}
    # Rows, and as much again for what else a method keeps.
    check_file(Path(file), "load_matrix", 2 * saved.MAX_BYTES)
    try:
        return saved.read_memory(file, tokenizer)
    except ValueError as error:
        raise UserError(f"load_matrix: {error}") from error
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"load_matrix {file}: is not a readable safetensors file: {first_line(error)}"
        ) from error


def write_memory(drafter: Drafter, file: Path, tokenizer: Any = None) -> None:
    """Save what the drafter keeps across prompts; a reader sees the whole file or none."""
    try:
        saved.save_memory(drafter, file, tokenizer)
    except (OSError, SafetensorError) as error:
        raise UserError(f"save_matrix {file}: cannot be written: {first_line(error)}") from error
