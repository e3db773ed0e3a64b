"""The answers to many prompts, as they finish: one batch, into which prompts come as texts leave it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import torch

from ..engine.batch import Batch, run
from ..engine.rules import STATEFUL
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..machine.timing import progress
from ..options import integer
from .output import GenerateOutput
from .prompts import Prompt

# Most new tokens of every text, or of each.
Limits: TypeAlias = int | Sequence[int] | torch.Tensor | np.ndarray[Any, Any]
# Token ids of a prompt, or the error that stands for them, and its limit.
Asked: TypeAlias = tuple[Sequence[int] | Exception, int]


def answers_of(
    batch: Batch,
    asked: Iterator[Asked],
    request_of: Callable[[int, Sequence[int], int], Request],
    output_of: Callable[[Sequence[int], Sequence[StepRecord]], GenerateOutput],
    return_exceptions: bool,
    **bar: Any,
) -> Generator[tuple[int, Any], None, None]:
    """Read prompts as far as a batch has room, and yield each index with its answer as the texts end.

    Args:
        batch: decodes texts.
        asked: prompts that were read (`read_prompts`).
        request_of: makes a request of an index, a prompt's tokens and a limit.
        output_of: makes an answer of a prompt's tokens and the steps.
        return_exceptions: whether an error stands in the place of an answer; else it is raised. What the iterable
            raises is raised when the texts under way have ended.
        bar: options of the progress bar.
    """
    under_way: dict[int, Sequence[int]] = {}
    failures: list[Exception] = []  # the iterable's

    def requests() -> Iterator[tuple[int, Request | Exception]]:
        numbered = enumerate(asked)
        while True:
            try:
                with batch.permit.user_code():
                    index, (prompt_ids, limit) = next(numbered)
            except StopIteration:
                return
            except Exception as error:  # the texts under way are not to blame
                failures.append(error)
                return
            if isinstance(prompt_ids, Exception):
                yield index, prompt_ids
                continue
            under_way[index] = prompt_ids
            yield index, request_of(index, prompt_ids, limit)

    with closing(batch), progress(unit="answer", **bar) as shown:
        for index, _, error, steps in run(batch, requests()):
            prompt_ids = under_way.pop(index, ())
            if error is not None and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"at prompt {index}")
            if error is not None and not return_exceptions:
                raise error
            shown.update()
            yield index, output_of(prompt_ids, steps) if error is None else error
    if failures:
        raise failures[0]


def named_error(index: int, error: Exception) -> Exception:
    """Return the error of a prompt that cannot be used, as a line that names it."""
    if not isinstance(error, ValueError):
        return error
    named = ValueError(f"prompt {index}: {str(error).removeprefix('prompt: ')}")
    named.__cause__ = error
    return named


def check_prompts(prompts: Any) -> None:
    """Raise ValueError for what cannot be iterated over, or is one prompt."""
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
    """Raise ValueError for a processor that keeps the state of a text; `token_rule` checks the rest."""
    for one in processors if isinstance(processors, Sequence) else ():
        if isinstance(one, STATEFUL):
            raise ValueError(
                f"logits_processors: got a {type(one).__name__}, which keeps the state of one text; allowed: "
                "with generate, one prompt at a time"
            )


def read_prompts(
    prompts: Iterable[Prompt],
    max_new_tokens: Limits,
    read: Callable[[int, Prompt, int], Asked],
    return_exceptions: bool,
) -> Iterator[Asked]:
    """Return an iterator over prompts that `read` reads by index, prompt and limit, which have a length at once.

    Raises:
        ValueError: as `with_limits`.
        Exception: the error of the first prompt that cannot be used, of those that have a length, unless errors
            are returned.
    """
    numbered = enumerate(with_limits(prompts, max_new_tokens))
    asked = (read(index, prompt, limit) for index, (prompt, limit) in numbered)
    if not isinstance(prompts, Sized):
        return asked
    known = list(asked)
    for prompt_ids, _ in known:
        if isinstance(prompt_ids, Exception) and not return_exceptions:
            raise prompt_ids
    return iter(known)


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
        raise _wrong_number(len(limits), len(prompts))
    return _paired(prompts, limits)


def _paired(prompts: Iterable[Prompt], limits: list[int]) -> Iterator[tuple[Prompt, int]]:
    num_prompts = 0
    for num_prompts, prompt in enumerate(prompts, 1):
        if num_prompts > len(limits):
            raise _wrong_number(len(limits), "more")
        yield prompt, limits[num_prompts - 1]
    if num_prompts < len(limits):
        raise _wrong_number(len(limits), num_prompts)


def _wrong_number(num_limits: int, num_prompts: object) -> ValueError:
    return ValueError(
        f"max_new_tokens: got {num_limits} limits for {num_prompts} prompts; allowed: one for all, or one "
        "for each"
    )
