"""A model that several readers share, and the plain text beside which each of their texts is held.

Readers are decoders, their sessions, and the model's own `generate` after `accelerate`. The plain text is that of
the class's `generate` on the same model at the same time.

Shapes: P tokens of a prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import nn

from model import SpeculativeDecoder
from model.api.accelerate import accelerate, restore
from model.backends.proofs.support import layers_of
from tests.fuzz.snapshot import Snapshot
from tests.model.decoded import known, random_ids

Undo = Callable[[], object]
NUM_TOKENS = 8
# Gap of the two largest logits, in standard deviations, below which rounding may decide.
NEAR_TIE = 1e-4
PLAIN_METHODS = (
    *("vanilla", "recycling", "pld", "lookahead", "samd", "suffix", "racer", "logitspec"),
    *("toolspec", "adapld", "sssd", "stand"),
    *("goose", "cacheback", "esp", "hybrid"),
)


class Inapplicable(Exception):
    """The scene has not what a change needs."""


class Finding(AssertionError):
    """A text that is not the model's own, or an error that is no refusal in one line."""


@dataclass
class Reader:
    """Something that answers prompts with the scene's model."""

    name: str
    answer: Callable[[list[int], int], list[int]]
    decoder: SpeculativeDecoder | None = None


@dataclass
class Counts:
    """What was compared."""

    texts: int = 0
    refusals: int = 0
    near_ties: int = 0
    plain_errors: int = 0


@dataclass
class Scene:
    """A model and its readers; leaving the block puts everything back that changes have left.

    Attributes:
        family: name of the model's family.
        model: the model itself, which wrappers such as peft's change in place.
        wrapper: peft's wrapper; None if there is none.
        readers: who answers.
        undos: of changes that are still in effect, oldest first.
    """

    family: str
    model: Any = None
    wrapper: Any = None
    readers: list[Reader] = field(default_factory=list)
    undos: list[tuple[str, Undo]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    last: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Build the model."""
        self.model = known(self.family).build()
        self.last = random_ids(14, seed=1)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        while self.undos:
            with suppress(Exception):
                self.undo()

    # Readers

    def add_decoder(self, method: str, **options: Any) -> None:
        """Add a decoder of a method."""
        self._add(f"decoder {method}", SpeculativeDecoder(self.model, None, method, **options))

    def add_session(self, random: Random) -> None:
        """Add a session of one of the decoders."""
        decoders = [one.decoder for one in self.readers if one.decoder is not None]
        if not decoders:
            raise Inapplicable
        decoder = random.choice(decoders)
        self._add(f"session {decoder.method}", decoder.session())

    def _add(self, name: str, decoder: SpeculativeDecoder) -> None:
        def answer(prompt: list[int], limit: int) -> list[int]:
            return decoder.generate(prompt, max_new_tokens=limit).token_ids

        self.readers.append(Reader(name, answer, decoder))

    def add_accelerated(self, method: str) -> None:
        """Accelerate the model; its `generate` is a reader until it is restored."""
        accelerate(self.model, method=method)

        def answer(prompt: list[int], limit: int) -> list[int]:
            return generated(self.model.generate, prompt, limit)

        self.readers = [one for one in self.readers if not one.name.startswith("accelerate")]
        self.readers.append(Reader(f"accelerate {method}", answer))

    def restore_generate(self) -> None:
        """Undo `accelerate`."""
        restore(self.model)
        self.readers = [one for one in self.readers if not one.name.startswith("accelerate")]

    # Changes

    def change(self, name: str, apply: Callable[[Scene, Random], Undo | None], seed: int) -> None:
        """Apply a change; without an undo of its own, everything is put back as it was before it."""
        before = Snapshot(self.model)
        torch.manual_seed(seed)
        try:
            undo = apply(self, Random(seed))
        except Exception:
            before.restore()
            raise
        self.undos.append((name, undo or before.restore))

    def undo(self) -> str:
        """Undo the last change that is still in effect; return its name."""
        name, undo = self.undos.pop()
        undo()
        return name

    # What changes look for

    @property
    def layers(self) -> Any:
        """The model's layers."""
        return layers_of(self.model, self.model.config.get_text_config().num_hidden_layers)[1]

    def pick(
        self, random: Random, is_it: Callable[[str, nn.Module], object]
    ) -> tuple[nn.Module, str, Any]:
        """Return the parent, name and module of one of the modules like this."""
        found = [
            name for name, module in self.model.named_modules() if name and is_it(name, module)
        ]
        if not found:
            raise Inapplicable
        parent, _, name = random.choice(found).rpartition(".")
        place = self.model.get_submodule(parent)
        return place, name, getattr(place, name)

    # Texts

    def plain(self, prompt: list[int], limit: int = NUM_TOKENS) -> list[int]:
        """Return the new tokens of the class's own `generate`."""
        return generated(type(self.model).generate.__get__(self.model), prompt, limit)

    def check(self, prompt: list[int], may_refuse: bool, limit: int = NUM_TOKENS) -> list[int]:
        """Hold the text of every reader beside the plain one, which is returned.

        It is [] if the model itself raises, which changes may lead to.

        Raises:
            Finding: if one differs, and no near-tie explains it; for an error that is no refusal.
        """
        try:
            expected = self.plain(prompt, limit)
        except Exception:  # changes may break a model
            self.counts.plain_errors += 1
            return []
        for reader in self.readers:
            self._check(reader, prompt, limit, expected, may_refuse)
        self.last = [*prompt, *expected]
        return expected

    def _check(
        self, reader: Reader, prompt: list[int], limit: int, expected: list[int], may_refuse: bool
    ) -> None:
        try:
            found = reader.answer(prompt, limit)
        except ValueError as error:  # UnsupportedModelError is one
            if not may_refuse or "\n" in str(error):
                raise Finding(f"{reader.name}: {type(error).__name__}: {error}") from error
            self.counts.refusals += 1
            return
        except Exception as error:
            line = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            raise Finding(f"{reader.name}: raised {line}") from error
        self.counts.texts += 1
        if reader.decoder is not None:  # whose texts end at the model's context
            context = reader.decoder.target.context_limit()
            expected = expected[: max(0, (context or 10**9) - len(prompt))]
        if found == expected:
            return
        if is_near_tie(self.model, prompt, found, expected):
            self.counts.near_ties += 1
            return
        raise Finding(f"{reader.name}: got {found}; generate's: {expected}")


def generated(generate: Callable[..., Any], prompt: Sequence[int], limit: int) -> list[int]:
    """Return the new tokens of a `generate` of transformers' form."""
    ids = torch.tensor([[*prompt]])
    output = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def is_near_tie(
    model: nn.Module, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]
) -> bool:
    """Whether the first tokens that differ have nearly equal logits in a pass without a cache."""
    shared = 0
    for one, other in zip(found, expected, strict=False):
        if one != other:
            break
        shared += 1
    else:
        return False  # one text only ends earlier
    ids = torch.tensor([[*prompt, *expected[:shared]]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, -1].float()  # [V]
    gap = float(logits[expected[shared]] - logits[found[shared]])
    allowed = NEAR_TIE if next(model.parameters()).dtype.itemsize >= 4 else 0.05
    return abs(gap) <= allowed * float(logits.std())
