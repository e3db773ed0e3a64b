"""What a model computes with, at one time: compared before every text, so that no pass goes on with what is gone.

Modules, hooks, functions, settings, tensors, the config, the classes and the code of their files. A comparison
by address takes some ten microseconds (`HeldObjects`). Only when it fails are values compared: an equal number
that was set again, or a tensor in place of another of its kind, is no other code.

A model may have code that is not of transformers' classes: hooks, and functions from elsewhere (`OwnCode`). Such
code may treat the last position of a pass in a way of its own, or the steps of generation. A plain pass over
several tokens says nothing of it then, so such models are proved token by token
(`model.backends.proofs.plain_decoding`), and again when this code has changed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from gc import get_referents
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...kernels.held_objects import HeldObjects
from .support import ATTENTION, PREPARE, rope_border, uncompiled

# Attributes of modules in which their computation does not show: those of PyTorch for training and saving, and what
# transformers' `generate` and ours keep on a model.
IGNORED = frozenset(
    (
        *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
        *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
        *("_forward_pre_hooks_with_kwargs", "_non_persistent_buffers_set"),
        *("_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("generation_config", "generate", "_cache", "_compiled_call", "_last_compile_config"),
        # Of files and classes.
        *("__builtins__", "__warningregistry__", "logger", "_abc_impl", "__annotations__"),
    )
)
# Places of all modules' hooks among what is recorded.
GLOBAL_HOOKS = (1, 2)
# Files of transformers that hold functions of models, and classes whose attributes are not compared.
OF_MODELS = "transformers.models."
BASES = (object, nn.Module, PreTrainedModel)
# What rotary embeddings keep whose frequencies depend on the length.
OF_ROTARY = ("inv_freq", "original_inv_freq", "max_seq_len_cached", "long_inv_freq")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


# Its hooks only watch.
HIDDEN = __name__.replace("proofs.snapshot", "passes.hidden")
FORWARD = "forward"
# Not "transformers_modules.", where code of checkpoints is loaded.
OF_TRANSFORMERS = "transformers."


@dataclass(frozen=True, slots=True)
class OwnCode:
    """A model's own code at one time."""

    # PyTorch's numbers, which it gives once; those of all modules among them.
    hooks: tuple[int, ...]
    functions: tuple[Any, ...]  # that were set on single modules
    is_of_class: bool  # whether the model's class, or a base of it, brings some from elsewhere

    @classmethod
    def of(cls, model: nn.Module) -> OwnCode:
        """Return the code of a model now; the caller holds the lock of its passes, whose hooks do not count."""
        hooks = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
        functions = []
        for module in model.modules():
            own = module.__dict__
            if module._forward_hooks or module._forward_pre_hooks:
                hooks += _hooks_of(module)
            if FORWARD in own and not _moves_weights(module):
                functions.append(own[FORWARD])
        model = uncompiled(model)
        functions += [model.__dict__[PREPARE]] if PREPARE in model.__dict__ else []
        is_of_class = any(_is_from_elsewhere(type(model), name) for name in (FORWARD, PREPARE))
        return cls(tuple(hooks), tuple(functions), is_of_class)

    @property
    def is_on_modules(self) -> bool:
        """Whether anything was set on single modules, or hooked into all of them."""
        return bool(self.hooks or self.functions)

    def __bool__(self) -> bool:
        """Whether there is any code from outside transformers, as far as can be seen."""
        return self.is_on_modules or self.is_of_class


def _hooks_of(module: nn.Module) -> Iterator[int]:
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for number, hook in [*hooks.items()]:  # other threads may add some meanwhile
            if not is_watching(hook):
                yield number


def is_watching(hook: Any) -> bool:
    """Whether a hook is one by which transformers or `passes.hidden` only watch."""
    name = str(getattr(hook, "__module__", None))
    return name.startswith(OF_TRANSFORMERS) or name == HIDDEN


def _moves_weights(module: nn.Module) -> bool:
    """Whether a module's forward is accelerate's around that of its class."""
    hook = module.__dict__.get("_hf_hook")
    parts = getattr(hook, "hooks", (hook,))
    within = getattr(module.__dict__.get("_old_forward"), "__func__", None)
    return within is type(module).forward and all(
        type(part).__module__.startswith("accelerate.") for part in parts
    )


def _is_from_elsewhere(kind: type, name: str) -> bool:
    """Whether the function of this name that instances of a class use is from outside transformers."""
    for base in kind.__mro__:
        if name in vars(base):
            function: Callable[..., Any] = vars(base)[name]
            modules = (base.__module__, str(getattr(function, "__module__", None)))
            return not all(one.startswith(OF_TRANSFORMERS) for one in modules)
    return False


class ModelSnapshot:
    """What a model computes with now; the caller holds the lock of its passes, whose changes do not count.

    Attributes:
        code: all but the numbers in its tensors, by place; equal for equal computations.
        own: code of it from outside transformers.
        modules: its modules.
        addresses: where the numbers of its tensors are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.own = OwnCode.of(model)
        self.modules = [weakref.ref(one) for one in model.modules()]
        classes = dict.fromkeys(base for one in model.modules() for base in type(one).__mro__)
        names = dict.fromkeys(one.__module__ for one in classes)
        files = [vars(sys.modules[name]) for name in names if name.startswith(OF_MODELS)]
        hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        # A class shows its attributes through a view of a dict.
        own = [get_referents(vars(one))[0] for one in classes if one not in BASES]
        self.code: dict[Hashable, Any] = {}
        roots = [model, *hooks, vars(functional), *files, *own]
        ignored = IGNORED | _written_by_passes(model)
        self._objects = HeldObjects(roots, (nn.Module, PretrainedConfig), ignored, self._note)
        self._attention = _attention()
        self.code["attention"] = self._attention

    @property
    def addresses(self) -> list[int]:
        return self._objects.addresses

    def is_current(self) -> bool:
        """Whether the model computes with the same objects as then."""
        return self._objects.are_same() and _attention() == self._attention

    def _note(self, path: tuple[Hashable, ...], value: object) -> None:
        """Note a value of the model's code."""
        if path[0] in GLOBAL_HOOKS or (len(path) > 1 and path[-2] in HOOKS):
            if not is_watching(value):  # PyTorch numbers them anew each time
                self.code[path[:-1]] = (*self.code.get(path[:-1], ()), _described(value))
        else:
            self.code[path] = _described(value)


def _written_by_passes(model: Any) -> set[str]:
    """Return the names under which rotary embeddings keep what they found of the length of the last pass."""
    config = model.config.get_text_config(decoder=True)
    if rope_border(config)[0] is None:
        return set()
    prefixes = ("", *(f"{kind}_" for kind in getattr(config, "layer_types", None) or ()))
    return {prefix + name for prefix in prefixes for name in OF_ROTARY}


def _attention() -> list[object]:
    """Return the functions that are registered for transformers' names of attention."""
    return [ALL_ATTENTION_FUNCTIONS.get(name) for name in ATTENTION]


def _described(value: Any) -> object:
    """Return what is compared of a value; it does not keep modules and tensors alive."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        place = value.device, value.layout
        strides = value.stride() if value.layout == torch.strided else ()
        return type(value), value.dtype, value.shape, strides, place
    if isinstance(value, nn.Module):
        return type(value), weakref.ref(value)
    if isinstance(value, MethodType):
        return weakref.ref(value.__self__), value.__func__
    if callable(value):
        return value
    if isinstance(value, tuple | frozenset | set):
        return type(value), tuple(map(_described, value))
    return type(value)
