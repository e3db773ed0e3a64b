"""The answers to many prompts, as they finish: one batch, into which prompts come as texts leave it."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
import torch

from ..engine.batch import Batch, run
from ..engine.rules import refuse_stateful
from ..engine.sequence import Request
from ..machine.timing import progress
from ..options import integer
from .permits import SequenceQueue
from .prompts import Prompt
from .text_options import Limits, TextOptions, Texts, shows
from .texts import Text

# Token ids of a prompt, or the error that stands for them, and its limit.
Asked: TypeAlias = tuple[Sequence[int] | Exception, int]
MOST = 2**31  # tokens: no limit of its own


@shows(TextOptions)
def answers_of(
    queue: SequenceQueue,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    *,
    max_new_tokens: Limits = 256,
    n: int = 1,
    batch_size: int = 8,
    shares_memory: bool = True,
    return_exceptions: bool = False,
    show_progress: bool = False,
    **arguments: Any,
) -> Generator[tuple[int, Any], None, None]:
    """Return the answers as of `SpeculativeDecoder.as_completed`; `arguments` are those of `TextOptions`."""
    check_prompts(prompts)
    options = TextOptions(max_new_tokens=MOST, **arguments)
    refuse_stateful(options.logits_processors, "with generate, one prompt at a time")
    if integer("n", n, least=1) > 1 and not options.temperature:
        raise ValueError(f"n: got {n} with greedy decoding; allowed: a temperature above 0, or 1")
    queue.check_model()  # else its error would be that of a prompt
    texts = Texts(queue.target, tokenizer, options)

    def read(index: int, prompt: Prompt, limit: int) -> Asked:
        try:
            replace(options, max_new_tokens=limit)  # which bounds others
            prompt_ids = texts.read(prompt)
            Request(prompt_ids, limit).checked(queue.target)
            return prompt_ids, limit
        except ValueError as error:
            named = ValueError(f"prompt {index}: {str(error).removeprefix('prompt: ')}")
            named.__cause__ = error
            return named, limit
        except Exception as error:  # a tokenizer may raise anything
            return error, limit

    numbered = enumerate(with_limits(prompts, max_new_tokens))
    asked: Iterator[Asked] = (read(index, prompt, limit) for index, (prompt, limit) in numbered)
    if isinstance(prompts, Sized):
        known = list(asked)
        for prompt_ids, _ in known:
            if isinstance(prompt_ids, Exception) and not return_exceptions:
                raise prompt_ids
        asked = iter(known)
    asked = (one for one in asked for _ in range(n))
    if (cancel := options.cancel) is not None:
        asked = takewhile(lambda _: not cancel.is_set(), asked)
    batch = queue.batch(batch_size, shares_memory)
    total = n * len(prompts) if isinstance(prompts, Sized) else None
    bar = {"total": total, "disable": not show_progress}
    return _as_completed(batch, asked, texts, return_exceptions, **bar)


def _as_completed(
    batch: Batch, asked: Iterator[Asked], texts: Texts, return_exceptions: bool, **bar: Any
) -> Generator[tuple[int, Any], None, None]:
    """Read prompts as far as a batch has room, and yield each index with its answer as the texts end.

    What the iterable raises is raised when the texts under way have ended.
    """
    under_way: dict[int, Text] = {}
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
            under_way[index] = texts.text(prompt_ids, limit, index)
            yield index, under_way[index].request

    with closing(batch), progress(unit="answer", **bar) as shown:
        for index, _, error, steps in run(batch, requests()):
            text = under_way.pop(index, None)
            if error is not None and hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"at prompt {index}")
            if error is not None and not return_exceptions:
                raise error
            shown.update()
            yield (
                index,
                text.output(steps, texts.target.device) if text and error is None else error,
            )
    if failures:
        raise failures[0]


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


def with_limits(prompts: Iterable[Prompt], max_new_tokens: Limits) -> Iterator[tuple[Prompt, int]]:
    """Return an iterator over prompts and their limits; limits are checked at once.

    Raises:
        ValueError: if a limit is not allowed, or there are not as many as prompts.
    """
    limits: Any = max_new_tokens
    if isinstance(limits, torch.Tensor | np.ndarray):
        limits = limits.tolist()
    if not isinstance(limits, Sequence) or isinstance(limits, str):
        limit = integer("max_new_tokens", limits, least=1)
        return ((prompt, limit) for prompt in prompts)
    limits = [integer(f"max_new_tokens[{place}]", one, least=1) for place, one in enumerate(limits)]
    num_prompts = len(prompts) if isinstance(prompts, Sized) else "an unknown number of"
    if num_prompts != len(limits):
        raise ValueError(
            f"max_new_tokens: got {len(limits)} limits for {num_prompts} prompts; allowed: one for all, or one for "
            "each of a list"
        )
    return zip(prompts, limits, strict=True)
