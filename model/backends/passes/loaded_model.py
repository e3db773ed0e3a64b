"""A loaded model: what is checked, found and chosen once, before its first pass.

Support is read from the config, caches by watching a pass, kernels by the layers' shapes. What the model can verify
is proved by `model.backends.proofs.self_test`. Sums of kernels may round in another way: in float32 near-ties are
decided by the model's own functions (`ReferenceRows`).

Shapes: V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ...engine.read_out import tie_margin
from ...kernels.attention import AttentionKernels, attention_kernels
from ...kernels.linear import (
    LinearKernels,
    is_whole,
    linear_kernels,
    num_weights,
    quantised_weights,
    stored,
)
from ...kernels.measured_attention import LayerHeads
from ...kernels.norms import FusedNorms, fused_norms
from ...machine.hardware import HugePages, machine_key
from ...machine.locks import SharedLock
from ...machine.own_forwards import OwnForwards, is_in_pass
from ..programs.layers import layer_programs
from ..programs.run import LayerPrograms
from ..proofs.snapshot import ModelSnapshot
from ..proofs.support import (
    Borders,
    UnsupportedModelError,
    cache_argument,
    context_limit,
    forward_parameters,
    layers_of,
    refuse_autocast,
    refuse_unverifiable,
    use_masked_attention,
    why_chain_only,
)
from .cache import BufferShape, TreeCache
from .hidden import HiddenStates
from .layout import CacheLayout
from .masks import TreeMasks

IN_TRAINING = "model: is in training mode, in which layers may be random; call model.eval() first"

_LOCKS: WeakKeyDictionary[nn.Module, SharedLock] = WeakKeyDictionary()

# Attributes that do not depend on the model's code.
_LASTING = frozenset(("model", "_may_use_kernels", "lock", "proof", "_known"))
# States of a model of which is kept what was found.
MOST_KNOWN = 4

Value = TypeVar("Value")


def lock_of(model: nn.Module) -> SharedLock:
    """Return the lock of a model, one for all its targets."""
    return _LOCKS.setdefault(model, SharedLock())


class FoundOnce(Generic[Value]):
    """A property of a target model that is found at its first use, under the model's lock.

    `cached_property` has a lock of its own, one for all models up to Python 3.11: a thread that looks within a
    pass, and one that waits for that pass to end, would wait for each other.
    """

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    def __get__(self, target: Any, owner: type) -> Value:
        known = target.__dict__
        with target.lock:
            if self._name not in known:  # else another thread has found it
                known[self._name] = self._find(target)  # which comes before this from now on
            value: Value = known[self._name]
            return value


class Swap(NamedTuple):
    """Functions that passes of one kind use in place of the model's own."""

    attention: str  # its name; "": the model's own
    forwards: OwnForwards


class LoadedModel:
    """A loaded causal LM, checked, with the functions that its passes use.

    Args:
        model: a loaded `AutoModelForCausalLM` on its device(s), in eval mode.
        use_kernels: whether passes may use the kernels of `model/kernels`; else
            the model computes as transformers does.

    Attributes:
        chain_reason: why, in one line; empty if trees work.
        cache_argument: the name under which the model's forward takes its cache.
        num_tokens: rows of the input embedding.
        borders: lengths at which its numbers change.
        layer_shapes, mixers, num_state_bytes, vocab_size: as `CacheLayout`.
        is_same_in_parts: whether a sequence has the same rows and states in whatever parts it is read, but
            for rounding, so that a known beginning may be kept; the self-test finds out.
        uses_slots: whether sequences of a batch lie in slots (`passes.slot_passes`): on a GPU, and where they
            cannot be packed.
        snapshot: what the model computed with when this was found of it.

    Raises:
        UnsupportedModelError: if the model can verify neither trees nor chains exactly.
        ValueError: if autocast would compute in another dtype than the weights'.
    """

    # Of the target model.
    new_cache: Callable[[int], TreeCache]
    run: Callable[..., torch.Tensor]
    # Whether passes are replayed as CUDA graphs of the model's own kernels: launches cost nothing then.
    is_replayed = False
    # Whether passes have other arithmetic than usual, that of `reference`.
    is_in_reference = False

    def __init__(self, model: PreTrainedModel, use_kernels: bool = True) -> None:
        self.model = model
        self._may_use_kernels = use_kernels
        # Serialises our passes of this model, and what looks at its modules or exchanges their functions. Others
        # may run the model meanwhile: what a pass exchanges acts in its thread alone (`OwnForwards`).
        self.lock = lock_of(model)
        # Proves the target anew when the model's code has changed; None: it was not proved.
        self.proof: Callable[[Any], object] | None = None
        # What was found of the model in other states of it, such as with another adapter.
        self._known: list[dict[str, Any]] = []
        with self.lock:
            self.find()

    def find(self) -> None:
        """Find all that depends on the model's code; the caller holds the lock."""
        model = self.model
        self.use_kernels = self._may_use_kernels
        self._swaps: dict[tuple[int, bool, bool, bool], Swap] = {}
        self._are_reference: dict[int, bool] = {}  # by the rows of a chunk
        refuse_unverifiable(model)
        use_masked_attention(model)
        self.config = model.config.get_text_config(decoder=True)
        weight = stored(model.get_input_embeddings())
        if weight.is_meta:
            raise UnsupportedModelError(
                "model: its weights are on the device meta, which holds no numbers; load it on a device "
                "such as cpu"
            )
        self.dtype, self.device, self.num_tokens = model.dtype, weight.device, len(weight)
        refuse_autocast(self.device, self.dtype)
        self.parameters = forward_parameters(model)
        self.cache_argument = cache_argument(model) or ""  # checked by `refuse_unverifiable`
        self.masks = TreeMasks(self.config)
        self.borders = Borders.of(model, self.config)
        self._layout = layout = CacheLayout(model)
        self.wants_positions = layout.wants_positions
        with torch.no_grad():
            layout.probe(self.run)
        self.layer_shapes, self.mixers = layout.shapes, layout.mixers
        self.num_state_bytes, self.vocab_size = layout.num_state_bytes, layout.vocab_size
        self.is_same_in_parts = True
        self._hidden: dict[tuple[int, ...], HiddenStates] = {}
        # Measurements of this model by other packages, by name.
        self.measured: dict[str, Any] = {}
        self.uses_slots = self.device.type == "cuda" and self.is_on_one_device
        # Without attention there are no positions.
        self.chain_reason = why_chain_only(model) if self._attention_shape else ""
        self.snapshot = ModelSnapshot(model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, whose model has a lock and layers of its own."""
        own = ("lock", "snapshot", "_known", "pages")
        return {name: value for name, value in vars(self).items() if name not in own} | {
            "_swaps": {},
            "_are_reference": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.lock, self._known = lock_of(self.model), []
        self.snapshot = ModelSnapshot(self.model)

    @property
    def machine_key(self) -> str:
        """A hash of everything that the time of a pass depends on."""
        facts = (
            self.config.to_json_string(use_diff=False),
            self.model.config._attn_implementation,
            type(self).__name__,
        )
        return machine_key(facts, self.device, self.dtype)

    @property
    def is_on_one_device(self) -> bool:
        """Whether all rows of a cache are on the model's device."""
        parts = (part for shape in self.layer_shapes if shape for part in shape.buffers)
        return all(part.device == self.device for part in parts)

    @cached_property
    def head_share(self) -> float:
        """Share of the output head in the model's weights, 0 to 1."""
        head = self.model.get_output_embeddings()
        total = num_weights(self.model)
        return num_weights(head) / total if head is not None else 0.0

    def check_model(self) -> None:
        """Check that the model is what was found of it, and proved; if it has changed, find and prove it anew.

        Every text begins with it. It takes some ten microseconds while nothing has changed.

        Raises:
            ValueError: if it is in training mode, or was moved, cast or resized, or would compute in
                another dtype.
            UnsupportedModelError: if it can no longer verify drafts exactly; also at the next call, until it can.
        """
        if is_in_pass() and self.lock.is_mine:
            raise RuntimeError(
                "decoder: got a text within a pass of its model, as from a hook; allowed: between passes"
            )
        refuse_autocast(self.device, self.dtype)
        if self.model.training:
            raise ValueError(IN_TRAINING)
        with self.lock:
            if not self.snapshot.is_current():
                self._follow()

    def _follow(self) -> None:
        """Make this the target of the model as it is now."""
        weight = stored(self.model.get_input_embeddings())
        now = (self.model.dtype, weight.device, len(weight))
        then = (self.dtype, self.device, self.num_tokens)
        if now != then:
            got, allowed = ("{} on {} with {} tokens".format(*state) for state in (now, then))
            raise ValueError(
                f"model: got {got}; allowed: {allowed}, as it was; make a new decoder for a model that was "
                "moved, cast or resized"
            )
        use_masked_attention(self.model)
        snapshot, found = ModelSnapshot(self.model), vars(self)
        if snapshot.code == self.snapshot.code:
            self._use(snapshot)
            return
        lasting = {name: found[name] for name in _LASTING}
        known = next((one for one in self._known if one["snapshot"].code == snapshot.code), None)
        # Apart from this target until all is found and proved: other threads may use it.
        other = object.__new__(type(self))
        if known is not None:
            other.__dict__ = known | lasting
            other._use(snapshot)
        else:
            other.__dict__ = lasting
            other.find()
            if other.vocab_size != self.vocab_size:
                raise ValueError(
                    f"model: got {other.vocab_size} logits; allowed: {self.vocab_size}, as it had; make a new "
                    "decoder for a model whose output head was changed"
                )
            if self.proof is not None:
                self.proof(other)
        states = [found, *(one for one in self._known if one is not known)][:MOST_KNOWN]
        # Else modules that the model has no more would be kept.
        other._known = [one for one in states if one["snapshot"].modules == snapshot.modules]
        for one in other._known:
            one["_known"] = []
        self.__dict__ = other.__dict__

    def _use(self, snapshot: ModelSnapshot) -> None:
        """Go on with what was found, of a model with the same code."""
        snapshot.code = self.snapshot.code
        self.snapshot = snapshot

    def hidden_states(self, layers: tuple[int, ...]) -> HiddenStates:
        """Return the capture of these hidden states of passes (`Needs.hidden_layers`).

        Raises:
            UnsupportedModelError: if the model does not show them; found out by a plain pass.
        """
        if layers not in self._hidden:
            self._hidden[layers] = HiddenStates(
                self.model,
                self.config.num_hidden_layers,
                layers,
                self.device,
                self.lock,
                partial(self._layout.plain_pass, self.run, last_logits_only=True),
            )
        return self._hidden[layers]

    def check_probes(self) -> None:
        """Check that passes can read probes (`DraftTree.probe`).

        Raises:
            UnsupportedModelError: if they cannot; found out by a plain pass.
        """
        with self.lock, torch.no_grad():
            probe = self.model.get_input_embeddings()(
                torch.zeros(1, dtype=torch.long, device=self.device)
            )
            self._layout.plain_pass(self.run, probes=probe)

    @property
    def capturing(self) -> HiddenStates | None:
        """The hidden states that a pass of this thread is to leave; None if none are captured."""
        return next((states for states in self._hidden.values() if states.is_capturing), None)

    def plain_pass(self, num_tokens: int) -> Any:
        return self._layout.plain_pass(self.run, num_tokens)[0]

    @FoundOnce
    def linear_kernels(self) -> LinearKernels:
        """The kernels of linear layers; built at the first call."""
        if not self.use_kernels:
            return LinearKernels([])
        return linear_kernels(self.model, self.dtype)

    @FoundOnce
    def norms(self) -> FusedNorms:
        """The norms of passes; found at the first call."""
        if not self.use_kernels:
            return FusedNorms({}, self.dtype)
        return fused_norms(self.model, self.dtype)

    @FoundOnce
    def programs(self) -> LayerPrograms:
        """The layers that passes run as programs; captured at the first call."""
        found = self._programs()
        self.pages.start(self.lock)  # after this pass, which it would slow down
        return found

    @FoundOnce
    def pages(self) -> HugePages:
        """The memory of weights that kernels read."""
        return HugePages(self.linear_kernels.weights)

    def _programs(self) -> LayerPrograms:
        is_for_them = self.linear_kernels and self.attention
        if not is_for_them or self.snapshot.own.is_on_modules:
            return LayerPrograms({}, self.dtype)
        try:
            _, layers = layers_of(self.model, self.config.num_hidden_layers)
        except UnsupportedModelError:
            return LayerPrograms({}, self.dtype)
        return layer_programs(self.model, [*layers], self.plain_pass, self.new_cache)

    @FoundOnce
    def linear_kernels_outside(self) -> LinearKernels:
        """The kernels of the linear layers that are in no program."""
        return self.linear_kernels.without(self.programs.inner)

    @FoundOnce
    def attention(self) -> AttentionKernels:
        """The attention of passes; built at the first call."""
        # Models that choose among keys do so themselves only for transformers' attention.
        chooses_keys = any(shape and shape.index_keys for shape in self.layer_shapes)
        if not self.use_kernels or not self._attention_shape or chooses_keys:
            return AttentionKernels(self.config, groups_heads=False, has_kernel=False)
        keys, values = self._attention_shape
        num_heads = getattr(self.config, "num_attention_heads", 0)
        heads = LayerHeads(num_heads, keys.num_heads, keys.head_dim, values.head_dim)
        return attention_kernels(self.model, heads, self.is_replayed)

    @cached_property
    def _attention_shape(self) -> tuple[BufferShape, BufferShape] | None:
        """Shapes of the keys and values of the first layer with attention; None if there is none."""
        for shape in self.layer_shapes:
            if shape and shape.keys and shape.values:
                return shape.keys, shape.values
        return None

    def switch_kernels(self, use_kernels: bool) -> None:
        """Use kernels from now on, or none."""
        self.use_kernels = use_kernels
        self._swaps.clear()
        self._are_reference.clear()
        for part in ("linear_kernels", "attention", "norms", "programs", "linear_kernels_outside"):
            self.__dict__.pop(part, None)

    @property
    def has_kernels(self) -> bool:
        """Whether passes compute anything by other functions than the model's."""
        return bool(self.linear_kernels or self.attention or self.norms)

    @property
    def lacks_kernels(self) -> bool:
        """Whether a CPU has no kernel of ours for passes over a few rows, though they may be used."""
        is_asked = self.use_kernels and self.device.type == "cpu"
        return is_asked and not (self.linear_kernels or self.attention)

    @property
    def kernel_names(self) -> dict[str, str]:
        """Names of the kernels in use, by what they compute."""
        return {
            "linear": self.linear_kernels.name,
            "attention": self.attention.name,
            "norms": self.norms.name,
            "layers": self.programs.name,
        }

    @FoundOnce
    def is_whole(self) -> bool:
        """Whether layers round their inputs to eight bits, and multiply whole numbers."""
        return any(map(is_whole, quantised_weights(self.model)))

    @property
    def tie_margin(self) -> float:
        """As `read_out.tie_margin`; rounding to eight bits makes more of a difference than any margin."""
        return 0.0 if self.is_whole else tie_margin(self.dtype)

    def is_reference(self, num_rows: int) -> bool:
        """Whether a prompt chunk of this length, or a single row, has reference arithmetic anyway."""
        if num_rows not in self._are_reference:
            self._are_reference[num_rows] = (
                self.attention.is_reference
                and self.norms.is_plain
                and self.programs.is_reference(num_rows)
                and self.linear_kernels.is_reference(num_rows)
            )
        return self._are_reference[num_rows]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block prompts and single rows have reference arithmetic: plain decoding's, bit for bit.

        Passes of other threads wait for its end.
        """
        with self.lock:
            self.is_in_reference = self.has_kernels
            try:
                yield
            finally:
                self.is_in_reference = False

    def _swap(self, num_rows: int, is_packed: bool, in_programs: bool, in_reference: bool) -> Swap:
        """Return the functions of passes over so many rows, of several sequences if they are packed."""
        linear = self.linear_kernels_outside if in_programs else self.linear_kernels
        parts = [linear.for_rows(num_rows, in_reference), self.norms.of_pass(in_reference)]
        if in_programs:
            parts.append(self.programs.layers)
        attention = self.attention.function(num_rows, is_packed, in_reference)
        return Swap(attention, OwnForwards.joined(parts))

    def context_limit(self) -> int | None:
        """Return the most tokens, prompt and new, of a text; None if the model sets no limit."""
        return context_limit(self.config)

    def steady_limit(self, num_tokens: int = 1) -> int | None:
        """Return the length to which a text of `num_tokens` may grow by the same rotary frequencies."""
        limit, (border, is_dynamic, *_) = self.context_limit(), self.borders
        if border is None or (num_tokens > border and not is_dynamic):
            return limit
        return min(limit or border, border)
