"""The arguments of a text, once: what `generate`, `stream`, `astream`, `generate_all` and `as_completed` take.

`TextOptions` has their names, defaults, bounds and words; signatures and help of the functions are made of it.
`TextArguments` says the same to type checkers. Processors are transformers' own, in its order.

Shapes: P tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from ..backends.proofs.support import eos_ids_of
from ..backends.target import TargetModel
from ..engine.rules import (
    CountPenalty,
    GreedyRule,
    Processor,
    SamplingRule,
    TokenRule,
    refuse_stateful,
    sampling_processors,
)
from ..engine.sequence import Request
from ..options import integer, number, option, temperature_of
from .expected import Grammar, GrammarSource, Prediction, guesses_of, prediction_ids
from .output import Logprobs
from .prompts import Prompt, ends_text, prompt_ids_of, stop_criterion
from .texts import Text

# Most new tokens of every text, or of each.
Limits: TypeAlias = int | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])
SEEDS = (-(2**63), 2**64 - 1)  # of torch's generators
# What numbers may be, in words and in code.
NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "top_p": ("numbers above 0, at most 1", lambda value: 0 < value <= 1),
    "min_p": ("numbers from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("numbers above 0", lambda value: value > 0),
    "presence_penalty": ("numbers from -2 to 2", lambda value: abs(value) <= 2),
    "frequency_penalty": ("numbers from -2 to 2", lambda value: abs(value) <= 2),
    "max_time": ("seconds above 0", lambda value: value > 0),
}
FUNCTIONS = "a list of functions (token ids [1, P], scores [1, V]) -> scores [1, V]"
OF_CHATS = ("tools", "chat_template_kwargs", "continue_final_message")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How a text is decoded; names and meanings are transformers' where it has them, else vLLM's.

    Raises:
        ValueError: for a value that is not allowed.
    """

    max_new_tokens: int = option(256, "limit; exact", least=1)
    temperature: float = option(0.0, "0: greedy decoding; above 0: sampling")
    top_k: int = option(0, "draw from the k likeliest tokens; 0: from all", least=0)
    top_p: float = option(1.0, "draw from the likeliest tokens up to this total probability")
    min_p: float = option(0.0, "draw from tokens with this share of the likeliest's probability")
    seed: int | None = option(None, "of the draws; None: torch's global generator")
    repetition_penalty: float = option(1.0, "of all tokens so far, the prompt's too; 1: none")
    presence_penalty: float = option(0.0, "OpenAI's: taken from the score of a token that came")
    frequency_penalty: float = option(0.0, "OpenAI's: taken for each time that a token came")
    min_new_tokens: int = option(0, "no end of text comes before; a stop string may", least=0)
    stop_strings: str | Sequence[str] = option(
        (), "the text ends with the token that completes one"
    )
    stop_token_ids: Sequence[int] = option((), "ends of text beside the model's own")
    ignore_eos: bool = option(False, "whether the model's own ends of text end nothing")
    max_time: float | None = option(None, "seconds; the step under way then is the last")
    cancel: threading.Event | None = option(None, "set, the step under way is the last")  # noqa: RUF009  # makes a field
    logprobs: int | None = option(None, "log-probabilities, and of n likeliest tokens", least=0)
    logit_bias: Mapping[int, float] | None = option(None, "OpenAI's: added to the tokens' scores")
    grammar: GrammarSource | None = option(None, "JSON schema or Lark grammar that the text obeys")  # noqa: RUF009  # makes a field
    prediction: str | Sequence[int] | None = option(None, "a text like it, such as before an edit")
    logits_processors: Sequence[Processor] = option((), "(ids [1, P], scores [1, V]) -> scores")
    tools: Sequence[Any] = option((), "of a chat: functions or JSON schemas")
    chat_template_kwargs: Mapping[str, Any] | None = option(None, "of a chat's template: variables")
    continue_final_message: bool | None = option(None, "of a chat: go on with the assistant's")

    def __post_init__(self) -> None:
        for item in fields(self):
            name, found = item.name, getattr(self, item.name)
            if found is None and item.default is None:
                continue
            if name == "seed":
                found = integer(name, found, *SEEDS)
            elif (least := item.metadata["least"]) is not None:
                found = integer(name, found, least)
            elif name in NUMBERS:
                allowed, is_allowed = NUMBERS[name]
                found = number(name, found, allowed)
                self._refuse_unless(is_allowed(found), name, allowed)
            object.__setattr__(self, name, found)  # the dataclass is frozen
        object.__setattr__(self, "temperature", temperature_of(self.temperature))
        most, cancel = self.max_new_tokens, self.cancel
        self._refuse_unless(self.min_new_tokens <= most, "min_new_tokens", f"at most {most}")
        for name in ("ignore_eos", "continue_final_message"):
            is_switch = isinstance(getattr(self, name), bool | None)
            self._refuse_unless(is_switch, name, "True or False")
        for name in ("tools", "stop_token_ids", "logits_processors"):
            value = getattr(self, name)
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            self._refuse_unless(
                is_list, name, FUNCTIONS if name == "logits_processors" else "a list"
            )
        are_functions = all(map(callable, self.logits_processors))
        self._refuse_unless(are_functions, "logits_processors", FUNCTIONS)
        is_event = cancel is None or callable(getattr(cancel, "is_set", None))
        self._refuse_unless(is_event, "cancel", "a threading.Event, or what has its is_set()")
        kinds: dict[str, tuple[Any, str]] = {
            **dict.fromkeys(("chat_template_kwargs", "logit_bias"), (Mapping, "a dict")),
            "grammar": (Mapping | str, "a JSON schema as a dict, or a Lark grammar as text"),
            "prediction": (Sequence, "text, or a list of token ids"),
        }
        for name, (kind, words) in kinds.items():
            self._refuse_unless(isinstance(getattr(self, name), kind | None), name, words)
        if self.grammar is not None:
            is_free = not self.min_new_tokens
            self._refuse_unless(
                is_free, "min_new_tokens", "0, with a grammar, which may end before"
            )
        if not self.temperature:
            refuse_stateful(self.logits_processors, "with a temperature above 0")

    def _refuse_unless(self, is_allowed: bool, name: str, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {allowed}")

    def interrupt(self) -> Callable[[], str | None] | None:
        """Return why a text that begins now ends after a step, as a function; None if nothing can end it."""
        cancel, latest = self.cancel, time.monotonic() + (self.max_time or float("inf"))
        if cancel is None and self.max_time is None:
            return None

        def why() -> str | None:
            if cancel is not None and cancel.is_set():
                return "cancelled"
            return "time" if time.monotonic() > latest else None

        return why


class Texts:
    """Makes texts of prompts, with the same options."""

    def __init__(self, target: TargetModel, tokenizer: Any, options: TextOptions) -> None:
        self.target, self.tokenizer, self.options = target, tokenizer, options
        self._stop = stop_criterion(options.stop_strings, tokenizer, "give the tokenizer")
        most = target.num_tokens - 1
        given = [integer("stop_token_ids", one, 0, most) for one in options.stop_token_ids]
        own = frozenset[int]() if options.ignore_eos else eos_ids_of(target.model, tokenizer)
        self._ends = own | set(given)
        self._bias = [_biased(options.logit_bias, target)] if options.logit_bias else []
        self._grammar = self._prediction = None
        if options.grammar is not None:
            self._grammar = Grammar(options.grammar, tokenizer, target.vocab_size, self._ends)
        if options.prediction is not None:
            self._prediction = prediction_ids(options.prediction, tokenizer, target.num_tokens)

    def read(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens."""
        values = {name: getattr(self.options, name) for name in OF_CHATS}
        of_chat = {name: value for name, value in values.items() if value or value is False}
        return prompt_ids_of(prompt, self.tokenizer, **of_chat)

    def text(self, prompt_ids: Sequence[int], limit: int | None = None, index: int = 0) -> Text:
        """Return a text that begins now; `index`, among many, is added to the seed."""
        options, num = self.options, len(prompt_ids)
        logprobs = None if options.logprobs is None else Logprobs(num, options.logprobs)
        grammar = self._grammar and self._grammar.of_text(num)
        sources: list[Grammar | Prediction] = [grammar] if grammar else []
        if self._prediction:
            sources.append(Prediction(self._prediction, num))
        request = Request(
            prompt_ids,
            limit or options.max_new_tokens,
            self._ends,
            self._rule(num, index, [one for one in (logprobs, grammar) if one is not None]),
            ends_text(self._stop, self.target.device),
            options.interrupt(),
            guesses_of(sources),
        )
        return Text(
            request, self.tokenizer, self._stop.stop_strings if self._stop else (), logprobs
        )

    def _rule(self, num_prompt: int, index: int, processors: list[Processor]) -> TokenRule | None:
        """Return how the tokens of a text are chosen after so many of its prompt, by these processors first, and
        then by those that the options ask for; None: argmax.
        """
        options, device = self.options, self.target.device
        if options.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
        if options.presence_penalty or options.frequency_penalty:
            penalties = options.presence_penalty, options.frequency_penalty
            processors.append(CountPenalty(num_prompt, *penalties))
        if options.min_new_tokens and self._ends:
            processors.append(
                MinNewTokensLengthLogitsProcessor(
                    num_prompt, options.min_new_tokens, sorted(self._ends), device=str(device)
                )
            )
        processors += [*self._bias, *options.logits_processors]
        if not options.temperature:
            return GreedyRule(processors) if processors else None
        generator = None
        if options.seed is not None:
            generator = torch.Generator(device).manual_seed(options.seed + index)
        chosen = options.temperature, options.top_k, options.top_p, options.min_p
        return SamplingRule([*processors, *sampling_processors(*chosen)], generator)


def _biased(bias: Mapping[int, float], target: TargetModel) -> Processor:
    """Return a processor that adds to the scores of these tokens; a `ValueError` for what is no token or number."""
    places = [integer("logit_bias", token, 0, target.vocab_size - 1) for token in bias]
    values = [number("logit_bias", value, "numbers") for value in bias.values()]
    added = torch.zeros(target.vocab_size, device=target.device)
    added[places] = torch.tensor(values, device=target.device)
    return lambda token_ids, scores: scores + added


class TextArguments(TypedDict, total=False):
    """The fields of `TextOptions` that one text and many have alike, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_new_tokens: int
    stop_strings: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    max_time: float | None
    cancel: threading.Event | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    grammar: GrammarSource | None
    prediction: str | Sequence[int] | None
    logits_processors: Sequence[Processor]
    tools: Sequence[Any]
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None


class OneText(TextArguments, total=False):
    """Arguments of one text."""

    max_new_tokens: int


class ManyTexts(TextArguments, total=False):
    """Arguments of many texts."""

    max_new_tokens: Limits
    n: int
    batch_size: int
    shares_memory: bool
    show_progress: bool


def shows(source: Callable[..., Any]) -> Callable[[Function], Function]:
    """Show the arguments of another function, or a dataclass, in place of a function's `**arguments`."""

    def shown(function: Function) -> Function:
        own = inspect.signature(function)
        mine = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        named = inspect.signature(source).parameters.values()
        more = [
            one for one in named if one.kind is one.KEYWORD_ONLY and one.name not in own.parameters
        ]
        vars(function)["__signature__"] = own.replace(parameters=[*mine, *more])
        words = [f"- {one.name}: {one.metadata['help']}" for one in fields(TextOptions)]
        function.__doc__ = "\n".join(
            [f"{inspect.getdoc(function)}\n\nArguments of a text:", *words]
        )
        return function

    return shown
