"""Run a case, and hold every answer beside transformers' own `generate`, sampled ones with the same seed.

Shapes: P tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

import copy
import string
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

from model import SpeculativeDecoder
from model.api.accelerate import accelerate, restore, speculative
from model.backends.proofs.self_test import prove
from model.backends.proofs.support import UnsupportedModelError
from model.backends.target import TargetModel
from tests.fuzz.cases import Call, Case
from tests.fuzz.changes import CHANGES, change_one
from tests.fuzz.scene import NEAR_TIE, Finding, Inapplicable, Scene
from tests.model.decoded import known, random_ids, required_options

ALPHABET = (
    string.ascii_letters + string.digits + ".,;:!"
)  # a letter for each token of the tiny models
WHOLE = ("accelerate", "rows")  # texts longer than the context are left to transformers
# A model whose logits differ from its own by this share of their deviation may be refused.
UNSTEADY = 10 * NEAR_TIE
NO_ROOM = ("context", "leaves no room", "longest")  # words of refusals of prompts that are too long


@lru_cache
def tokenizer_of(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single letters."""
    letters = ALPHABET + "".join(chr(0x4E00 + place) for place in range(vocab_size))
    words = {letter: place for place, letter in enumerate(letters[:vocab_size])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=24)
def target_of(family: str, use_kernels: bool) -> TargetModel:
    """Return a target that passed its test; others must leave its model as it is."""
    target = TargetModel(known(family).build(), use_kernels)
    prove(target)
    return target


class Runner:
    """Runs one case.

    Attributes:
        case: what runs.
        counts: texts compared, of each door.
        near_ties: texts that differ where two logits are nearly equal.
        log: calls so far.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.counts: dict[str, int] = {}
        self.near_ties = 0
        self.log: list[str] = []
        self._last: list[int] = []
        self._generate: Any = None  # of the accelerated model
        self._callable: Any = None

    def run(self) -> None:
        """Run the case.

        Raises:
            Inapplicable: if the method has nothing to draft with for this family.
            Finding: if a text is not the model's own.
        """
        case = self.case
        try:
            if case.has_changes:
                with Scene(case.family) as scene:
                    self._calls(TargetModel(scene.model, case.use_kernels), scene)
            else:
                self._calls(target_of(case.family, case.use_kernels), None)
        except Finding as finding:
            raise Finding(f"{case.command}: {case}: {' | '.join(self.log)}: {finding}") from finding

    def _calls(self, target: TargetModel, scene: Scene | None) -> None:
        case = self.case
        self.model, self.target = target.model, target
        self.vocab_size = target.vocab_size
        self.tokenizer = tokenizer_of(self.vocab_size)
        options = {**case.options, **self._files()}
        try:
            prove(target)
            self.decoder = SpeculativeDecoder(target, self.tokenizer, case.method, **options)
        except ValueError as error:  # UnsupportedModelError, or values that do not go together
            raise Inapplicable from error
        self.options = options
        try:
            for _ in range(case.num_calls):
                if scene is not None and case.random.random() < 0.6:
                    self._change(scene)
                call = case.call(self._last, self.vocab_size, ALPHABET)
                self.log.append(_shown(call))
                self.may_refuse = scene is not None and any(
                    CHANGES[name].may_refuse for name, _ in scene.undos
                )
                self._held(call)
        finally:
            restore(self.model)

    def _files(self) -> dict[str, Any]:
        try:
            return required_options(self.case.method, self.model.config)
        except pytest.skip.Exception as error:
            raise Inapplicable from error

    def _change(self, scene: Scene) -> None:
        random = self.case.random
        scene.last = [token % 60 for token in (self._last or [1, 2, 3, 4, 5, 6])]
        change_one(scene, random, self.log)

    # Answers of each door

    def _held(self, call: Call) -> None:
        """Ask for the texts of a call, and hold them beside the expected ones."""
        own = self.model.generation_config.eos_token_id
        self.model.generation_config.eos_token_id = call.ends or None
        remembered = [
            (one, one.inv_freq.clone(), one.max_seq_len_cached) for one in _dynamic(self.model)
        ]
        try:
            try:
                expected = [self._expected(call, place) for place in range(len(call.prompts))]
            except Exception as error:
                if self.may_refuse or self.case.has_changes:
                    return  # a change may break a model
                raise Finding(f"plain decoding raised {type(error).__name__}: {error}") from error
            try:
                answers = getattr(self, f"_by_{call.door}")(call)
            except ValueError as error:
                if self.may_refuse and "\n" not in str(error):
                    return
                if isinstance(error, UnsupportedModelError) and _differs_from_itself(self.model):
                    return
                if any(one is None for one in expected) and any(
                    word in str(error) for word in NO_ROOM
                ):
                    return
                raise Finding(f"{type(error).__name__}: {error}") from error
            except Exception as error:
                raise Finding(f"raised {type(error).__name__}: {error}") from error
            if call.door == "rows" and answers != expected:
                expected = self._beside_padding(call, answers, expected, remembered)
            self._compared(call, answers, expected)
        finally:
            self.model.generation_config.eos_token_id = own

    def _compared(
        self, call: Call, answers: Sequence[list[int]], expected: Sequence[list[int] | None]
    ) -> None:
        for place, (found, wanted) in enumerate(zip(answers, expected, strict=True)):
            self.counts[call.door] = self.counts.get(call.door, 0) + 1
            if wanted is None:
                raise Finding(f"text {place}: got {found}; expected a refusal: no room")
            if call.door == "left":
                wanted = wanted[: len(found)]
            if found == wanted:
                continue
            if not call.sampling and self._is_near_tie(call, place, found, wanted):
                self.near_ties += 1
                continue
            raise Finding(f"text {place}: got {found}; expected {wanted}")
        self._last = [*call.prompts[-1], *answers[-1]]

    def _beside_padding(
        self, call: Call, answers: Any, expected: Any, remembered: Sequence[tuple[Any, Any, Any]]
    ) -> list[Any]:
        """Return the expected texts, those that are right beside padding alone included.

        Some models have other numbers there; such calls are transformers' own, with the same memory of longer
        texts before.
        """
        for one, frequencies, length in remembered:
            one.inv_freq, one.max_seq_len_cached = frequencies, length
        own = self._padded(type(self.model).generate.__get__(self.model), call)
        return [b if a == b else c for a, b, c in zip(answers, own, expected, strict=True)]

    def _words(self, call: Call, place: int) -> dict[str, Any]:
        """Return the arguments of a decoder's own `generate` for one of the texts."""
        sampling = dict(call.sampling)
        if sampling:
            sampling["seed"] += place
        return {
            "max_new_tokens": call.limits[place],
            "logits_processors": _processors(call),
            "stop_strings": call.stop_strings,
            **sampling,
        }

    def _by_generate(self, call: Call) -> list[list[int]]:
        return [self.decoder.generate(call.prompts[0], **self._words(call, 0)).token_ids]

    def _by_stream(self, call: Call) -> list[list[int]]:
        pieces = [*self.decoder.stream(call.prompts[0], **self._words(call, 0))]
        found = [token for piece in pieces for token in piece.token_ids]
        text = "".join(piece.text for piece in pieces)
        whole = self.tokenizer.decode(found)
        if not found or found[-1] not in call.ends:
            for stop in call.stop_strings:  # which the text is without
                whole = whole.removesuffix(stop)
        if text != whole:
            raise Finding(f"the pieces' text is {text!r}, not that of {found}")
        return [found]

    def _by_left(self, call: Call) -> list[list[int]]:
        found: list[int] = []
        stream = self.decoder.stream(call.prompts[0], **self._words(call, 0))
        for count, piece in enumerate(stream):
            found += piece.token_ids
            if count == 2:
                break
        stream.close()  # type: ignore[attr-defined]
        return [found]

    def _by_all(self, call: Call) -> list[list[int]]:
        words = self._words(call, 0) | {"max_new_tokens": call.limits}
        batch = {"batch_size": call.batch_size, "shares_memory": call.shares_memory}
        return [one.token_ids for one in self.decoder.generate_all(call.prompts, **words, **batch)]

    def _by_threads(self, call: Call) -> list[list[int]]:
        def answer(place: int) -> list[int]:
            decoder = self.decoder if place == 0 else self.decoder.session()
            words = self._words(call, place)
            return decoder.generate(call.prompts[place], **words).token_ids

        with ThreadPoolExecutor(len(call.prompts)) as threads:
            return [*threads.map(answer, range(len(call.prompts)))]

    def _by_accelerate(self, call: Call) -> list[list[int]]:
        return [self._own(self._accelerated(), call, 0)]

    def _by_callable(self, call: Call) -> list[list[int]]:
        if self._callable is None:
            self._callable = speculative(self.case.method, self.tokenizer, **self.options)
        return [self._own(self.model.generate, call, 0, custom_generate=self._callable)]

    def _by_rows(self, call: Call) -> list[list[int]]:
        """Several prompts, padded on the left, by an accelerated `generate`."""
        output = self._padded(self._accelerated(), call)
        return output

    def _accelerated(self) -> Callable[..., Any]:
        """Return the accelerated `generate`, which the model has only while it is called."""
        if self._generate is None:
            accelerate(self.model, self.tokenizer, method=self.case.method, **self.options)
            self._generate = self.model.__dict__.pop("generate")
        return self._generate

    def _padded(self, generate: Callable[..., Any], call: Call) -> list[list[int]]:
        """Return the new tokens of several prompts, padded on the left."""
        width = max(map(len, call.prompts))
        rows = [[0] * (width - len(prompt)) + prompt for prompt in call.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in call.prompts]
        words = {"attention_mask": torch.tensor(mask), "pad_token_id": 0, **self._settings(call, 0)}
        output = generate(torch.tensor(rows), **words)
        return [self._until_end(row[width:].tolist(), call) for row in output]

    def _until_end(self, row: list[int], call: Call) -> list[int]:
        """Return a row of a batch without what follows the end of its text."""
        for place in range(len(row)):
            text = self.tokenizer.decode(row[: place + 1])
            if row[place] in call.ends or any(one in text for one in call.stop_strings):
                return row[: place + 1]
        return row

    # Expected texts

    def _expected(self, call: Call, place: int) -> list[int] | None:
        """Return the expected tokens of a text; None if the prompt leaves no room."""
        prompt, limit = call.prompts[place], call.limits[place]
        own = type(self.model).generate.__get__(_forgetful(self.model))
        context = self.target.context_limit()
        if context is not None and call.door not in WHOLE and len(prompt) >= context:
            return None
        found = self._own(own, call, place)
        if context is not None and call.door in WHOLE:
            return found  # longer texts are transformers'
        return found[: context - len(prompt)] if context is not None else found[:limit]

    def _settings(self, call: Call, place: int) -> dict[str, Any]:
        """Return the arguments of transformers' `generate`, but for the prompt."""
        words: dict[str, Any] = {"max_new_tokens": call.limits[place], "do_sample": False}
        if call.sampling:
            words |= {name: call.sampling[name] for name in ("temperature", "top_k", "top_p")}
            words["do_sample"] = True
        if call.processors:
            words["logits_processor"] = LogitsProcessorList(_processors(call))
        if call.stop_strings:
            words |= {"stop_strings": call.stop_strings, "tokenizer": self.tokenizer}
        return words

    def _own(self, generate: Callable[..., Any], call: Call, place: int, **more: Any) -> list[int]:
        """Return the new tokens of a `generate` of transformers' form."""
        prompt = call.prompts[place]
        ids = torch.tensor([prompt])
        if call.sampling:
            torch.manual_seed(call.sampling["seed"] + place)
        words = self._settings(call, place)
        output = generate(ids, attention_mask=torch.ones_like(ids), **words, **more)
        return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    def _is_near_tie(
        self, call: Call, place: int, found: Sequence[int], wanted: Sequence[int]
    ) -> bool:
        """Whether the first tokens that differ have nearly equal scores in a pass without a cache."""
        shared = next(
            (spot for spot, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None
        )
        if shared is None:
            return False
        ids = torch.tensor([[*call.prompts[place], *wanted[:shared]]])
        with torch.no_grad():
            logits = self.model(ids).logits[:, -1].float()  # [1, V]
            scores = logits.clone()
            for processor in _processors(call):
                scores = processor(ids, scores)
        gap = float(scores[0, wanted[shared]] - scores[0, found[shared]])
        return abs(gap) <= NEAR_TIE * float(logits.std())


def _forgetful(model: Any) -> Any:
    """Return a model whose dynamic rotary frequencies are not those of a longer text before."""
    if not _dynamic(model):
        return model
    model = copy.deepcopy(model)
    for one in _dynamic(model):
        one.inv_freq, one.max_seq_len_cached = one.original_inv_freq, one.original_max_seq_len
    return model


def _dynamic(model: Any) -> list[Any]:
    """Return the modules that remember the longest text so far."""
    return [one for one in model.modules() if getattr(one, "rope_type", None) == "dynamic"]


@torch.no_grad()
def _differs_from_itself(model: Any) -> bool:
    """Whether the stock model has other logits in one pass than token by token: a change has made rounding grow."""
    prompt = torch.tensor([random_ids(8, seed=0)])
    words = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    shown = {"output_logits": True, "return_dict_in_generate": True}
    answer = type(model).generate(model, prompt, **words, **shown)
    whole = model(answer.sequences).logits[0, prompt.shape[1] - 1 : -1]
    return bool((whole - torch.cat(answer.logits)).abs().max() > UNSTEADY * whole.std())


def _processors(call: Call) -> list[Any]:
    return [getattr(transformers, name)(*values) for name, values in call.processors]


def _shown(call: Call) -> str:
    lengths = ",".join(str(len(prompt)) for prompt in call.prompts)
    parts = [f"{call.door} of {lengths} tokens, limits {call.limits}"]
    for name in ("sampling", "processors", "ends", "stop_strings"):
        if value := getattr(call, name):
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for measured costs."""
    return tempfile.TemporaryDirectory(prefix="fuzz-")
