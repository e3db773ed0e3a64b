"""The arguments of transformers' `generate`, and what each does here: the one table of them.

`check` decides by it whether a call can be decoded with drafts, `table` writes it for docs/library.md, decoders
refuse by it what they do not take, and a test walks it, so that an argument that a version of transformers adds
is noticed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..backends.proofs.support import CACHE_ARGUMENTS, holds_tokens
from ..engine.rules import STATEFUL
from ..machine.packages import HERE
from ..options import unknown_name
from .prepared_call import PreparedCall, are_by_row, is_by_row

logger = logging.getLogger(__name__)


class UnsupportedCallError(ValueError):
    """A call of `generate` that cannot be decoded with drafts because of an argument; one line says why."""

    def __init__(self, argument: str, text: str) -> None:
        super().__init__(text)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Argument:
    """Arguments of `generate` that are alike."""

    names: str  # with spaces between
    here: str  # what they do, in words for the table
    # Whether a value cannot be honoured, at all or with several prompts, and what can, for the error's text.
    refused: Callable[[Any, PreparedCall], bool] | None = None
    allowed: str = ""
    refused_in_batch: Callable[[Any, PreparedCall], bool] | None = None
    allowed_in_batch: str = ""


def _is_set(value: Any, call: PreparedCall) -> bool:
    return value is not None and value is not False


def _is_above_one(value: Any, call: PreparedCall) -> bool:
    return (value or 1) > 1


def _is_contrastive(value: Any, call: PreparedCall) -> bool:
    return (value or 0) > 0 and (call.config.top_k or 0) > 1 and call.config.do_sample is not True


def _is_foreign_cache(value: Any, call: PreparedCall) -> bool:
    """Whether a cache is the caller's; transformers makes one of its own for each call."""
    if value is None:
        return False
    is_given = not call.given.isdisjoint(CACHE_ARGUMENTS)
    return is_given or getattr(value, "_is_user_defined", False) or holds_tokens(value)


def _is_in_output(value: Any, call: PreparedCall) -> bool:
    return bool(value) and bool(call.config.return_dict_in_generate)


def _has_holes(value: Any, call: PreparedCall) -> bool:
    """Whether other tokens than padding on the left are hidden, or one of several prompts whole."""
    try:
        padding = call.padding
    except ValueError:
        return True
    return call.num_prompts > 1 and max(padding) == call.input_ids.shape[1]


def _are_own_positions(value: Any, call: PreparedCall) -> bool:
    """Whether positions are the caller's; transformers 5 makes them for each call, 4 counts on from none."""
    if value is None or "position_ids" in call.given:
        return "position_ids" in call.given
    seen = [row[num:] for row, num in zip(value.tolist(), call.padding, strict=True)]
    return any(row != list(range(len(row))) for row in seen)


def _has_stateful(value: Any, call: PreparedCall) -> bool:
    """Whether greedy decoding has one of transformers' own processors that count their calls, by this setting."""
    processors = () if value is None or call.config.do_sample else call.processors
    return any(isinstance(one, STATEFUL) for one in processors)


def _has_of_all_rows(value: Any, call: PreparedCall) -> bool:
    return not all(map(is_by_row, value))


def _is_of_all_prompts(value: Any, call: PreparedCall) -> bool:
    """Whether a setting has made a processor that keeps all prompts."""
    return value not in (None, 0, 1.0) and _has_of_all_rows(call.processors, call)


NO_BEAMS = "greedy decoding or sampling, no beams"
COUNTING = (
    "with `do_sample=True`; greedy calls are transformers', as it counts how often it is asked"
)
SAMPLING = "with do_sample=True, or none: it counts how often it is asked"

# In the order in which they are looked at: beams and other modes are why there are several rows.
ARGUMENTS: tuple[Argument, ...] = (
    Argument(
        "num_beams num_beam_groups", "above 1: beams are transformers'", _is_above_one, NO_BEAMS
    ),
    Argument("constraints force_words_ids", "beams are transformers'", _is_set, NO_BEAMS),
    Argument("penalty_alpha", "contrastive search is transformers'", _is_contrastive, "none"),
    Argument("dola_layers", "DoLa is transformers'", _is_set, "none"),
    Argument(
        "assistant_model prompt_lookup_num_tokens assistant_early_exit use_mtp is_assistant",
        "assisted generation is transformers'",
        _is_set,
        "none, the method drafts",
    ),
    Argument("num_return_sequences", "above 1: transformers'", _is_above_one, "1"),
    Argument(
        "inputs input_ids",
        "one prompt, several of one length, padded on the left, or none (the text then begins with "
        "`bos_token_id`). `accelerate` leaves several to transformers where a model's texts cannot share passes",
        lambda value, call: value is not None and (value.ndim != 2 or value.shape[0] < 1),
        "prompts of one length, [B, P]",
    ),
    Argument(
        "attention_mask",
        "padding on the left is cut off; masks with holes or padding on the right are transformers'",
        _has_holes,
        "padding on the left (without a mask, transformers hides every token that equals the padding "
        "token: give torch.ones_like(input_ids))",
    ),
    Argument(
        "position_ids",
        "positions of your own are transformers'",
        _are_own_positions,
        "none, they are 0, 1, 2, ...",
    ),
    Argument(
        " ".join(CACHE_ARGUMENTS),
        "a cache of your own is transformers'; the rows of the last text are kept here",
        _is_foreign_cache,
        "no cache, the rows of the last text are kept here",
    ),
    Argument(
        "use_cache",
        "`False` is transformers', but as the model's own setting: a cache changes no token",
        lambda value, call: value is False and not call.origin("use_cache"),
        "True, decoding keeps a KV cache",
    ),
    Argument(
        "cache_implementation",
        "offloaded, quantized and paged caches are transformers'; others change no token",
        # They are stored in a way in which ours is not.
        lambda value, call: (
            value in ("quantized", "paged") or (value or "").startswith("offloaded")
        ),
        "none, the cache is our own",
    ),
    Argument(
        "output_attentions output_hidden_states return_legacy_cache",
        "with `return_dict_in_generate` transformers': they are not kept for drafts",
        _is_in_output,
        "output_scores, output_logits",
    ),
    Argument("guidance_scale watermarking_config", COUNTING, _has_stateful, SAMPLING),
    Argument(
        "encoder_repetition_penalty encoder_no_repeat_ngram_size",
        "work; with several prompts transformers'",
        refused_in_batch=_is_of_all_prompts,
        allowed_in_batch="none",
    ),
    Argument(
        "logits_processor",
        "works. Greedy decoding in float32 asks twice about the same text where two tokens are nearly "
        "equal: one of your own that counts its calls needs `do_sample=True`. With several prompts, others than "
        "transformers' own that treat each row by itself are transformers'",
        _has_stateful,
        SAMPLING,
        _has_of_all_rows,
        "transformers' own that treat each row by itself",
    ),
    Argument(
        "token_healing", "transformers'", _is_set, "False, transformers heals before it calls us"
    ),
    Argument(
        "synced_gpus", "`True`, for weights shared by processes, is transformers'", _is_set, "False"
    ),
    Argument(
        "max_length max_new_tokens min_length min_new_tokens max_time",
        "work. Past the model's declared context, `accelerate` leaves the call to transformers; a "
        "callable ends the text there",
    ),
    Argument(
        "stopping_criteria",
        "works; asked about every new token once, in order. With several prompts, others than lengths, ends of "
        "text, strings and time are transformers', and so are strings and time without an end of text",
        refused_in_batch=lambda value, call: not are_by_row(value),
        allowed_in_batch="lengths and ends of text, beside which also strings and time",
    ),
    Argument(
        "stop_strings tokenizer",
        "work; the tokenizer may be given before, to `accelerate` or to the callable",
    ),
    Argument(
        "streamer",
        "works, token by token, with one prompt; callables also take `step_streamer=`, which gets each step's "
        "tokens at once",
        refused_in_batch=_is_set,
        allowed_in_batch="none",
    ),
    Argument("generation_config use_model_defaults", "work"),
    Argument(
        "do_sample",
        "works: after `torch.manual_seed` exactly `generate`'s tokens, one draw a token, in order; with several "
        "prompts transformers'",
        refused_in_batch=_is_set,
        allowed_in_batch="greedy decoding",
    ),
    Argument(
        "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff renormalize_logits "
        "remove_invalid_values",
        "work",
    ),
    Argument(
        "repetition_penalty no_repeat_ngram_size bad_words_ids sequence_bias suppress_tokens "
        "begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty",
        "work",
    ),
    Argument("prefix_allowed_tokens_fn", "works; with several prompts transformers'"),
    Argument("return_dict_in_generate", "works; the output's cache is `None`"),
    Argument(
        "output_scores output_logits",
        "work; with several prompts transformers'",
        refused_in_batch=_is_in_output,
        allowed_in_batch="none",
    ),
    Argument(
        "pad_token_id",
        "works; with several prompts, one is needed, or an end of text",
        refused_in_batch=lambda value, call: call.padding_token is None,
        allowed_in_batch="a token, or an end of text",
    ),
    Argument("bos_token_id eos_token_id", "work; several ends of text too"),
    Argument("negative_prompt_ids negative_prompt_attention_mask", "work with `guidance_scale`"),
    Argument(
        "custom_generate trust_remote_code",
        "with `accelerate`, a `custom_generate` of the call runs instead",
    ),
    Argument(
        "cache_config max_cache_len cache_position logits_to_keep prefill_chunk_size compile_config "
        "disable_compile continuous_batching_config low_memory",
        "change no token: cache and passes are our own",
    ),
    Argument("early_stopping length_penalty diversity_penalty", "act with beams alone"),
    Argument(
        "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size "
        "assistant_confidence_threshold assistant_lookbehind target_lookbehind assistant_ensemble_weight "
        "assistant_tokenizer speculation_type",
        "act in assisted generation alone",
    ),
    Argument("decoder_start_token_id", "acts in models with an encoder alone, which are refused"),
    Argument("transformers_version", "no setting"),
)
BY_NAME = {name: one for one in ARGUMENTS for name in one.names.split()}
# Transformers acts on them before it calls a callable.
BEFOREHAND = ("token_healing", "cache_implementation")


def check(call: PreparedCall) -> None:
    """Raise UnsupportedCallError for the first argument with which drafts cannot give what `generate` gives."""
    for name, one in BY_NAME.items():
        value = call.value(name)
        if one.refused is not None and one.refused(value, call):
            raise refusal(name, value, one.allowed, call.origin(name))
        in_batch = one.refused_in_batch if call.num_prompts > 1 else None
        if in_batch is not None and in_batch(value, call):
            where = f"{call.origin(name)} with {call.num_prompts} prompts"
            raise refusal(name, value, f"{one.allowed_in_batch}, or one prompt", where)
    mode = call.config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):  # by a setting that the list does not know yet
        raise refusal("generate", mode.value, NO_BEAMS)
    unknown = {name for name, value in call.arguments.items() if value is not None} - BY_NAME.keys()
    for name in sorted(unknown):
        raise refusal(name, call.arguments[name], "only text inputs")


def refusal(name: str, value: Any, allowed: str, origin: str = "") -> UnsupportedCallError:
    """Return the error for an argument whose value cannot be honoured."""
    shown = value if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        shown = f"shape {list(value.shape)}"
    elif isinstance(value, list):  # of processors or criteria
        shown = ", ".join(type(one).__name__ for one in value)
    elif value is None:
        shown = "none"
    return UnsupportedCallError(name, f"{name}: got {shown}{origin}; allowed: {allowed}")


def table() -> str:
    """Return the list as a table in Markdown."""
    rows = (
        f"| {', '.join(f'`{name}`' for name in one.names.split())} | {one.here} |"
        for one in ARGUMENTS
    )
    return "\n".join(("| argument of `generate` | here |", "|---|---|", *rows))


PROMPT = "the prompt is the first argument, and may be a tokenizer's output as it is: without **"
PROCESSORS = "logits_processors=[transformers.{}LogitsProcessor(...)]"
MANY = "generate_all(prompts, {}=...), for several texts"
# What does it in a decoder's own `generate`, also for arguments of other libraries.
INSTEAD = {
    "do_sample": "temperature: above 0 samples, such as temperature=1.0; 0, the default, is greedy",
    "max_length": "max_new_tokens, which does not count the prompt",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "eos_token_id": "stop_token_ids, with ignore_eos=True for these alone",
    "min_tokens": "min_new_tokens",
    "stop": "stop_strings",
    "stopping_criteria": "stop_strings, stop_token_ids, max_time or cancel",
    "add_generation_prompt": "continue_final_message",
    "enable_thinking": 'chat_template_kwargs={"enable_thinking": ...}',
    **dict.fromkeys(("streamer", "stream"), "stream(prompt, ...), whose pieces come step by step"),
    "logits_processor": "logits_processors, a list",
    "generation_config": "its settings as arguments, such as max_new_tokens",
    "no_repeat_ngram_size": PROCESSORS.format("NoRepeatNGram"),
    "bad_words_ids": PROCESSORS.format("NoBadWords"),
    "suppress_tokens": PROCESSORS.format("SuppressTokens"),
    "tokenizer": "the decoder's own, given when it is made",
    "return_dict_in_generate": "the answer always has token_ids, text, steps and times",
    **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "inputs"), PROMPT),
    "messages": "the prompt is the first argument, and may be chat messages",
    **{name: MANY.format(name) for name in ("batch_size", "n")},
    "num_return_sequences": MANY.format("n"),
}


def refuse_foreign(names: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise TypeError for the first argument that a function of decoders got and does not have.

    It names the argument of ours that does it, or where it is taken.
    """
    where, ours = function.__name__, inspect.signature(function).parameters
    for name in names:
        if name in ours:
            continue
        instead = INSTEAD.get(name, "")
        if name in BY_NAME and instead != PROMPT:
            elsewhere = f"model.generate after `from {HERE} import accelerate; accelerate(model)`"
            instead = f"{instead}; or {elsewhere}" if instead else elsewhere
        if instead:
            raise TypeError(f"{name}: not an argument of decoder.{where}; allowed: {instead}")
        raise TypeError(unknown_name(f"argument of decoder.{where}", name, list(ours)))


# Settings of a checkpoint that change transformers' texts but not a decoder's own, each with its neutral value.
# Sampling settings are arguments there, so they are left out.
SHAPING: dict[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **{"min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "repetition_penalty": 1},
    **{"bad_words_ids": [], "begin_suppress_tokens": [], "suppress_tokens": []},
    **{"sequence_bias": {}, "stop_strings": []},
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id")),
    **dict.fromkeys(("forced_eos_token_id", "max_time", "watermarking_config")),
}


def warn_of_settings(model: PreTrainedModel) -> None:
    """Warn of settings of a model's generation config that do nothing in a decoder's own `generate`."""
    config = getattr(model, "generation_config", None)
    given = {} if config is None else config.to_diff_dict()
    found = [
        f"{name}={given[name]}"
        for name, neutral in SHAPING.items()
        if given.get(name) not in (None, neutral)
    ]
    if found:
        logger.warning(
            "generation_config: %s apply only to the model's own generate, not here; give "
            "them as arguments, or use custom_generate, which honours them",
            ", ".join(found),
        )
