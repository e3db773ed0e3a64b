"""Arguments of transformers' `generate` and of other libraries, given to a decoder: what to use instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..machine.packages import HERE
from ..options import unknown_name
from .generate_arguments import BY_NAME

OURS = (
    *("prompt", "max_new_tokens", "temperature", "top_k", "top_p"),
    *("seed", "stop_strings", "logits_processors"),
)
OF_MANY = (
    *("prompts", *OURS[1:]),
    *("batch_size", "shares_memory", "return_exceptions", "show_progress"),
)
PROMPT = "the prompt is the first argument, and may be a tokenizer's output as it is: without **"
# Where an argument of ours does the same.
INSTEAD = {
    "do_sample": "temperature: above 0 samples, such as temperature=1.0; 0, the default, is greedy",
    "max_length": "max_new_tokens, which does not count the prompt",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "eos_token_id": "stop_strings; the model's own ends of text are in model.generation_config.eos_token_id",
    "stop": "stop_strings",
    "stopping_criteria": "stop_strings",
    "streamer": "stream(prompt, ...), whose pieces come step by step",
    "stream": "stream(prompt, ...), whose pieces come step by step",
    "logits_processor": "logits_processors, a list",
    "generation_config": "its settings as arguments, such as max_new_tokens",
    "repetition_penalty": "logits_processors=[transformers.RepetitionPenaltyLogitsProcessor(...)]",
    "no_repeat_ngram_size": "logits_processors=[transformers.NoRepeatNGramLogitsProcessor(...)]",
    "bad_words_ids": "logits_processors=[transformers.NoBadWordsLogitsProcessor(...)]",
    "suppress_tokens": "logits_processors=[transformers.SuppressTokensLogitsProcessor(...)]",
    "tokenizer": "the decoder's own, given when it is made",
    "return_dict_in_generate": "the answer always has token_ids, text, steps and times",
    **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "inputs"), PROMPT),
    "messages": "the prompt is the first argument, and may be chat messages",
    "batch_size": "generate_all(prompts, batch_size=...), for several prompts",
}


def refuse_foreign(names: Iterable[str], where: str, ours: Sequence[str] = OURS) -> None:
    """Refuse arguments that a function of decoders does not have.

    Args:
        names: their names.
        where: the function that got them.
        ours: the arguments that it has.

    Raises:
        ValueError: for the first one, with the argument of ours that does it, or where it is taken.
    """
    for name in names:
        instead = INSTEAD.get(name, "")
        if name in BY_NAME and instead != PROMPT:
            elsewhere = f"model.generate after `from {HERE} import accelerate; accelerate(model)`"
            instead = f"{instead}; or {elsewhere}" if instead else elsewhere
        if instead:
            raise ValueError(f"{name}: not an argument of decoder.{where}; allowed: {instead}")
        raise ValueError(unknown_name(f"argument of decoder.{where}", name, ours))
