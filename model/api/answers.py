"""The answers to many prompts, as they finish: one batch, into which prompts come as texts leave it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import torch

from ..engine.request import Request
from ..engine.rules import STATEFUL
from ..engine.step import StepRecord
from ..machine.timing import progress
from ..options import integer
from .batch_in_turn import BatchInTurn
from .output import GenerateOutput
from .prompts import Prompt

# Most new tokens of every text, or of each.
Limits: TypeAlias = int | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]


class Answers:
    """Reads prompts as far as a batch has room, and decodes them.

    Args:
        batch: decodes texts.
        prompts: each with its limit (`with_limits`).
        request_of: makes a request of an index, a prompt and a limit; raises what is wrong with the prompt.
        output_of: makes an answer of a prompt's tokens and the steps.
        return_exceptions: whether an error stands in the place of an answer; else it is raised.
    """

    def __init__(
        self,
        batch: BatchInTurn,
        prompts: Iterator[tuple[Prompt, int]],
        request_of: Callable[[int, Prompt, int], Request],
        output_of: Callable[[Sequence[int], list[StepRecord]], GenerateOutput],
        return_exceptions: bool,
    ) -> None:
        self._batch, self._prompts = batch, prompts
        self._request_of, self._output_of = request_of, output_of
        self._return_exceptions = return_exceptions
        self._num_read = 0
        self._is_read = False  # to the end
        self._failure: Exception | None = None  # of the iterable
        self._under_way: dict[int, tuple[Sequence[int], list[StepRecord]]] = {}

    def run(self, **bar: Any) -> Generator[tuple[int, Any], None, None]:
        """Yield each index with its answer as the texts end.

        Args:
            bar: options of the progress bar.

        Raises:
            Exception: what is wrong with a prompt, or what its text raised, unless exceptions are returned; what
                the iterable raised, when the texts under way have ended.
        """
        with closing(self._batch), progress(unit="answer", **bar) as shown:
            for indexed in self._all():
                shown.update()
                yield indexed
        if self._failure is not None:
            raise self._failure

    def _all(self) -> Iterator[tuple[int, Any]]:
        while True:
            yield from self._admit()
            if not len(self._batch):
                return
            yield from self._step()

    def _admit(self) -> Iterator[tuple[int, Any]]:
        """Read prompts until the batch is full; yield the errors of those that cannot be used."""
        while self._batch.has_room and not self._is_read:
            try:
                prompt, limit = next(self._prompts)
            except StopIteration:
                self._is_read = True
                return
            except Exception as error:  # the texts under way are not to blame
                self._failure, self._is_read = error, True
                return
            index, self._num_read = self._num_read, self._num_read + 1
            try:
                request = self._request_of(index, prompt, limit)
            except Exception as error:  # a tokenizer may raise anything
                yield index, self._failed(_of_prompt(index, error))
                continue
            self._batch.add(index, request)
            self._under_way[index] = request.prompt_ids, []

    def _step(self) -> Iterator[tuple[int, Any]]:
        """Decode a step of every text; yield what has ended, answers first."""
        failed = []
        for index, record, error in self._batch.step():
            if error is not None:
                failed.append((index, error))
            if record is None:
                continue
            prompt_ids, steps = self._under_way[index]
            steps.append(record)
            if record.stop_reason is not None:
                del self._under_way[index]
                yield index, self._output_of(prompt_ids, steps)
        for index, error in failed:
            del self._under_way[index]
            yield index, self._failed(_noted(index, error))

    def _failed(self, error: Exception) -> Exception:
        """Return an error that is to stand in the place of an answer, else raise it."""
        if not self._return_exceptions:
            raise error
        return error


def _of_prompt(index: int, error: Exception) -> Exception:
    """Return the error of a prompt that cannot be used, as a line that names it."""
    if not isinstance(error, ValueError):
        return _noted(index, error)
    named = ValueError(f"prompt {index}: {str(error).removeprefix('prompt: ')}")
    named.__cause__ = error
    return named


def _noted(index: int, error: Exception) -> Exception:
    """Return the error, whose traceback then names the prompt."""
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"at prompt {index}")
    return error


def check_prompts(prompts: Any) -> None:
    """Check that prompts can be iterated over.

    Raises:
        ValueError: if they cannot, or are one prompt.
    """
    is_one = isinstance(prompts, str | bytes | Mapping)
    try:
        iter(prompts)
    except TypeError:
        is_one = True
    if is_one:
        raise ValueError(
            f"prompts: got a {type(prompts).__name__}; allowed: several prompts, such as a list of texts"
        )


def check_processors(processors: Any) -> None:
    """Check that processors can serve several texts; `token_rule` checks the rest.

    Raises:
        ValueError: if one of transformers' keeps the state of a text.
    """
    for one in processors if isinstance(processors, Sequence) else ():
        if isinstance(one, STATEFUL):
            raise ValueError(
                f"logits_processors: got a {type(one).__name__}, which keeps the state of one text; allowed: "
                "with generate, one prompt at a time"
            )


def with_limits(prompts: Iterable[Prompt], max_new_tokens: Limits) -> Iterator[tuple[Prompt, int]]:
    """Return an iterator over prompts and their limits; limits are checked at once.

    Raises:
        ValueError: if a limit is not allowed. If there are more or fewer limits than prompts: at once where the
            number of prompts is known, else when they are read so far.
    """
    limits: Any = max_new_tokens
    if isinstance(limits, torch.Tensor | np.ndarray):
        limits = limits.tolist()
    if not isinstance(limits, Sequence) or isinstance(limits, str):
        limit = integer("max_new_tokens", limits, least=1)
        return ((prompt, limit) for prompt in prompts)
    limits = [integer(f"max_new_tokens[{place}]", one, least=1) for place, one in enumerate(limits)]
    if isinstance(prompts, Sized) and len(prompts) != len(limits):
        raise _wrong_number(len(limits), str(len(prompts)))
    return _paired(prompts, limits)


def _paired(prompts: Iterable[Prompt], limits: list[int]) -> Iterator[tuple[Prompt, int]]:
    num_prompts = 0
    for prompt in prompts:
        if num_prompts == len(limits):
            raise _wrong_number(len(limits), "more")
        yield prompt, limits[num_prompts]
        num_prompts += 1
    if num_prompts < len(limits):
        raise _wrong_number(len(limits), str(num_prompts))


def _wrong_number(num_limits: int, num_prompts: str) -> ValueError:
    return ValueError(
        f"max_new_tokens: got {num_limits} limits for {num_prompts} prompts; allowed: one for all, or one "
        "for each"
    )
