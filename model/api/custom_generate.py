"""`model.generate(**inputs, custom_generate=recycling(), ...)`: speculative decoding inside
transformers' own generation.

Transformers prepares processors, stopping criteria and lengths, and the callable decodes with them.
Whatever works for one greedy or sampled sequence is supported; the rest is refused. Three arguments
never reach a callable, because transformers drops them:

- `streamer`: give `step_streamer=` instead, which gets each step's tokens together;
- `tokenizer`: give it to `recycling(tokenizer=...)` if there are `stop_strings`;
- `assistant_model`: has no effect.

    from model.api.custom_generate import recycling

    decode = recycling()
    model.generate(**inputs, custom_generate=decode, max_new_tokens=100)

Shapes: P tokens of the prompt, padding included, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from ..engine.rules import GreedyRule, SamplingRule, TokenRule, as_in_transformers, refuse_stateful
from ..engine.step import StepRecord
from ..engine.support import CACHE_ARGUMENTS, holds_tokens
from .decoder import SpeculativeDecoder, stop_criterion
from .prompts import num_padding

MODES = ("greedy_search", "sample")
# Arguments from transformers that are defaults or have no meaning here.
KNOWN_ARGUMENTS = {
    "attention_mask",
    "position_ids",
    *CACHE_ARGUMENTS,
    "cache_position",
    "use_cache",
    "logits_to_keep",
}


class Speculative:
    """A callable for `generate(custom_generate=...)`; it keeps memory and cache from call to call.

    Args:
        method: a method's name, or "package.module:DrafterClass".
        tokenizer: for `stop_strings`.
        options: the method's options.

    Attributes:
        steps: records of the last call's steps.
        decoder: the decoder, from the first call on.
    """

    def __init__(self, method: str = "recycling", tokenizer: Any = None, **options: Any) -> None:
        self.method = method
        self.tokenizer = tokenizer
        self.options = options
        self.steps: list[StepRecord] = []
        self.decoder: SpeculativeDecoder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy without memory: a copy, such as one made with its model, belongs to another model."""
        return partial(Speculative, **self.options), (self.method, self.tokenizer)

    @property
    def accept_lengths(self) -> list[int]:
        """Tokens emitted by each step of the last call, bonus token included; their sum is n."""
        return [len(step.tokens) for step in self.steps]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        step_streamer: Any = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode; called by `generate`.

        Args:
            model: the model whose `generate` calls.
            input_ids: int64 [1, P].
            logits_processor: prepared by transformers, as are the next two.
            stopping_criteria: lengths and ends of text among them.
            generation_config: all other settings.
            stop_strings: the text ends after the token that completes one of these.
            step_streamer: gets the prompt, then every step's tokens (a `TextStreamer`, for one).
            model_kwargs: all other arguments of `generate`.

        Returns:
            int64 [1, P + n]; with `return_dict_in_generate` an output that holds it and, if asked
            for, n scores and logits, each float32 [1, V]. Its cache is None: the rows stay here.

        Raises:
            ValueError: for anything that is not supported.
        """
        _refuse(model, input_ids, logits_processor, generation_config, model_kwargs)
        decoder = self._decoder_of(model)
        tokens: list[int] = input_ids[0].tolist()
        padding = tokens[: _num_padding(model_kwargs, len(tokens))]
        record = _Record(generation_config)
        steps = decoder.steps(
            tokens[len(padding) :],
            max_new_tokens=_max_length(stopping_criteria) - len(tokens),
            eos_ids=_eos_ids(stopping_criteria),
            rule=_rule(logits_processor, generation_config, input_ids[:, : len(padding)], record),
            stop=_stop(
                self._criteria(stopping_criteria, stop_strings), padding, input_ids.device, record
            ),
        )
        if step_streamer is not None:
            step_streamer.put(input_ids.cpu())
        self.steps = []
        for step in steps:
            self.steps.append(step)
            tokens += step.tokens
            if step_streamer is not None:
                step_streamer.put(torch.tensor(step.tokens, device="cpu"))
        if step_streamer is not None:
            step_streamer.end()
        sequences = torch.tensor([tokens], device=input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=record.scores, logits=record.logits
        )

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        if self.decoder is not None:
            self.decoder.reset()

    def _decoder_of(self, model: PreTrainedModel) -> SpeculativeDecoder:
        if self.decoder is None:
            self.decoder = SpeculativeDecoder(model, self.tokenizer, self.method, **self.options)
        if self.decoder.target.model is not model:
            raise ValueError(
                "custom_generate: got another model than at its first call, whose tokens it has "
                "learned; make one for each model"
            )
        return self.decoder

    def _criteria(
        self, criteria: StoppingCriteriaList, stop_strings: str | Sequence[str] | None
    ) -> StoppingCriteriaList:
        """Return the criteria other than lengths and ends of text."""
        others = StoppingCriteriaList(
            one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        criterion = stop_criterion(
            stop_strings,
            self.tokenizer,
            "transformers keeps it from callables; allowed: custom_generate=recycling(tokenizer=tokenizer)",
        )
        if criterion is not None:
            others.append(criterion)
        return others


def speculative(method: str, tokenizer: Any = None, **options: Any) -> Speculative:
    """Return a callable for `generate(custom_generate=...)` that decodes with a method.

    Args:
        method: a method's name, or "package.module:DrafterClass".
        tokenizer: for `stop_strings`.
        options: the method's options, such as `num_pred_tokens=5` for pld.

    Raises:
        ValueError: at the first call, for an unknown method or option, or a value that is not
            allowed.
    """
    return Speculative(method, tokenizer, **options)


def recycling(tokenizer: Any = None, **options: Any) -> Speculative:
    """Return a callable for `generate(custom_generate=...)` that decodes with Token Recycling.

    Args:
        tokenizer: for `stop_strings`.
        options: the method's options, such as `output_id_topk=16`.
    """
    return Speculative("recycling", tokenizer, **options)


def generate_from_folder(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    method: str = "recycling",
    method_options: dict[str, Any] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_model: Any = None,
    **arguments: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate with a method, as `model.generate` does: the function of a `custom_generate` folder.

    The model keeps the matrix from call to call, as long as method and options stay the same.

    Args:
        model: the model whose `generate` is called.
        inputs: as for `generate`.
        method: a method's name, or "package.module:DrafterClass".
        method_options: the method's options.
        streamer: gets the prompt, then every step's tokens.
        tokenizer: for `stop_strings`.
        assistant_model: not allowed.
        arguments: all other arguments of `generate`.

    Raises:
        ValueError: for anything that is not supported.
    """
    if assistant_model is not None:
        raise ValueError("assistant_model: got a model; allowed: none, the method drafts")
    options = method_options or {}
    decode = model.__dict__.get("_speculative")
    if decode is None or (decode.method, decode.options) != (method, options):
        decode = Speculative(method, **options)
        model.__dict__["_speculative"] = decode
    decode.tokenizer = tokenizer
    # The class's method: with such a folder, the model's own `generate` is this function.
    return GenerationMixin.generate(
        model, inputs, custom_generate=decode, step_streamer=streamer, **arguments
    )


class _Record:
    """The logits and scores of every new token, if they were asked for."""

    def __init__(self, config: GenerationConfig) -> None:
        is_asked = bool(config.return_dict_in_generate)
        self._keeps_scores = is_asked and bool(config.output_scores)
        self._keeps_logits = is_asked and bool(config.output_logits)
        # By length of the text: at a near-tie the second answer replaces the first.
        self._scores: dict[int, torch.Tensor] = {}
        self._logits: dict[int, torch.Tensor] = {}

    @property
    def is_needed(self) -> bool:
        return self._keeps_scores or self._keeps_logits

    @property
    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """Scores after processors [1, V] in the order of the new tokens; None if not asked for."""
        return tuple(self._scores.values()) if self._keeps_scores else None

    @property
    def logits(self) -> tuple[torch.Tensor, ...] | None:
        """Logits [1, V] in the order of the new tokens; None if not asked for."""
        return tuple(self._logits.values()) if self._keeps_logits else None

    def keep(self, length: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Note logits and scores of the token after `length` tokens."""
        if self._keeps_scores:
            self._scores[length] = scores
        if self._keeps_logits:
            self._logits[length] = logits


def _refuse(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    arguments: dict[str, Any],
) -> None:
    """Raise ValueError for whatever one greedy or sampled sequence does not support."""
    prepare = type(model).prepare_inputs_for_generation
    if model.prepare_inputs_for_generation != MethodType(prepare, model):  # peft's, for one
        raise ValueError(
            "model: got inputs that another prepares, such as a learned prompt; allowed: the model's own, with "
            "adapters in the layers, as LoRA"
        )
    mode = config.get_generation_mode()
    if mode not in MODES:
        raise ValueError(
            f"generate: got {mode.value}; allowed: greedy decoding or sampling, no beams"
        )
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids: got shape {list(input_ids.shape)} (num_return_sequences included); "
            "allowed: one sequence at a time, [1, P]"
        )
    if not config.use_cache:
        raise ValueError("use_cache: got False; allowed: True, decoding keeps a KV cache")
    storage = config.cache_implementation or ""
    if storage == "quantized" or storage.startswith("offloaded"):
        raise ValueError(
            f"cache_implementation: got {storage}; allowed: none, the cache is our own"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError(
            "output_attentions, output_hidden_states: not kept for drafted tokens; allowed: "
            "output_scores, output_logits"
        )
    caches = [arguments.get(name) for name in CACHE_ARGUMENTS]
    if any(
        getattr(cache, "_is_user_defined", False) or holds_tokens(cache)
        for cache in caches
        if cache is not None
    ):
        raise ValueError(
            "past_key_values: got a cache; allowed: none, rows of a known prompt are kept by the "
            "callable itself"
        )
    unknown = {name for name, value in arguments.items() if value is not None} - KNOWN_ARGUMENTS
    if unknown:
        raise ValueError(f"generate: got {', '.join(sorted(unknown))}; allowed: text inputs alone")
    if not config.do_sample:
        refuse_stateful(processors)


def _num_padding(arguments: dict[str, Any], length: int) -> int:
    """Return the number of padding tokens before the text, from the mask; refuse other masks and positions."""
    mask = arguments.get("attention_mask")
    padding = 0 if mask is None else num_padding(mask[0].tolist(), length)
    positions = arguments.get("position_ids")
    if positions is not None and positions[0, padding:].tolist() != list(range(length - padding)):
        raise ValueError("position_ids: got positions of your own; allowed: 0, 1, 2, ...")
    return padding


def _max_length(criteria: StoppingCriteriaList) -> int:
    limits = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    if not limits:
        raise ValueError("max_new_tokens: got none; allowed: 1 or more")
    return int(min(limits))


def _eos_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    ends = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    return frozenset(token for ids in ends for token in ids.flatten().tolist())


def _rule(
    processors: LogitsProcessorList,
    config: GenerationConfig,
    padding: torch.Tensor,
    record: _Record,
) -> TokenRule | None:
    """Return the rule that chooses tokens; None for argmax.

    Processors see the padding [1, ...] too, as in transformers.
    """
    if not config.do_sample and not processors and not record.is_needed:
        return None

    def process(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # On the device of transformers' inputs, which need not be the model's.
        input_ids = torch.cat((padding, input_ids.to(padding.device)), dim=1)
        logits = logits.to(padding.device)
        scores: torch.Tensor = processors(input_ids, logits)
        record.keep(input_ids.shape[1], logits, scores)
        return scores

    return SamplingRule([process]) if config.do_sample else GreedyRule([process])


def _stop(
    criteria: StoppingCriteriaList, padding: list[int], device: torch.device, record: _Record
) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that asks the criteria about a text; None if there are none."""
    if not criteria:
        return None

    def stop(text: Sequence[int]) -> bool:
        with as_in_transformers():
            input_ids = torch.tensor([[*padding, *text]], device=device)
            return bool(criteria(input_ids, record.scores).all())

    return stop
