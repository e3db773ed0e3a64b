"""Code that is set, hooked or patched: on single modules, on classes, on modules of Python, and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.fuzz.changes.kind import change
from tests.fuzz.changes.modules import is_attention, is_inner_linear, is_mlp, is_norm
from tests.fuzz.scene import Inapplicable, Scene

KINDS: dict[str, Callable[[str, nn.Module], object]] = {
    "a linear layer": is_inner_linear,
    "a network": is_mlp,
    "a norm": is_norm,
    "an attention": is_attention,
    "a layer": lambda name, _: name.rpartition(".")[2].isdigit(),
    "the embedding": lambda _, one: isinstance(one, nn.Embedding),
    "the head": lambda name, _: name == "lm_head",
}


def louder(output: Any) -> Any:
    """Return what a module returns, changed at every position alike."""
    if isinstance(output, tuple):
        return (louder(output[0]), *output[1:])
    return output * 1.3 + torch.linspace(-1, 1, output.shape[-1]).to(output.dtype)


def _hooked(scene: Scene, random: Random, kind: str) -> Callable[[], object]:
    module = scene.pick(random, KINDS[kind])[2]
    handle = module.register_forward_hook(lambda _, __, output: louder(output))
    return handle.remove  # type: ignore[no-any-return]


for kind in KINDS:
    change(f"a hook on {kind}", kind=kind)(_hooked)


@change("a hook before a network")
def pre_hook(scene: Scene, random: Random) -> Callable[[], object]:
    module = scene.pick(random, is_mlp)[2]
    return module.register_forward_pre_hook(lambda _, inputs: (louder(inputs[0]),)).remove  # type: ignore[no-any-return]


@change("a hook before, with names, on a layer")
def pre_hook_with_names(scene: Scene, random: Random) -> Callable[[], object]:
    def hook(_: Any, inputs: Any, names: Any) -> Any:
        return (louder(inputs[0]), *inputs[1:]), names

    layer = random.choice([*scene.layers])
    return layer.register_forward_pre_hook(hook, with_kwargs=True).remove  # type: ignore[no-any-return]


@change("a hook that only looks", is_seen=False)
def watching(scene: Scene, random: Random) -> Callable[[], object]:
    seen: list[int] = []
    layer = random.choice([*scene.layers])
    return layer.register_forward_hook(lambda *_: seen.append(1)).remove  # type: ignore[no-any-return]


@change("a hook on all modules")
def global_hook(scene: Scene, random: Random) -> Callable[[], object]:
    mine = scene.pick(random, is_mlp)[2]
    return register_module_forward_hook(
        lambda one, _, output: louder(output) if one is mine else None
    ).remove


@change("a hook before all modules")
def global_pre_hook(scene: Scene, random: Random) -> Callable[[], object]:
    mine = scene.pick(random, is_mlp)[2]
    return register_module_forward_pre_hook(
        lambda one, inputs: (louder(inputs[0]),) if one is mine else None
    ).remove


@change("a hook on the last position alone", may_refuse=True)
def last_position(scene: Scene, random: Random) -> Callable[[], object]:
    def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output.clone()
        changed[:, -1:] = louder(output[:, -1:])
        return changed

    module = scene.pick(random, is_mlp)[2]
    return module.register_forward_hook(hook).remove  # type: ignore[no-any-return]


@change("a hook by accelerate's add_hook_to_module")
def accelerate_hook(scene: Scene, random: Random) -> Callable[[], object]:
    try:
        from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
    except ImportError:
        raise Inapplicable from None

    class Louder(ModelHook):  # type: ignore[misc]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return louder(output)

    module = scene.pick(random, is_mlp)[2]
    if "forward" in vars(module):
        raise Inapplicable
    add_hook_to_module(module, Louder())

    def undo() -> None:
        remove_hook_from_module(module)
        vars(module).pop("forward", None)  # which it leaves there

    return undo


def _forward_set(scene: Scene, random: Random, kind: str) -> Callable[[], object]:
    module = scene.pick(random, KINDS[kind])[2]
    if "forward" in vars(module):
        raise Inapplicable
    own = module.forward
    module.forward = lambda *args, **kwargs: louder(own(*args, **kwargs))
    return lambda: vars(module).pop("forward")


for kind in ("a linear layer", "a network", "an attention", "a norm", "the head"):
    change(f"a forward set on {kind}", kind=kind)(_forward_set)


@change("a method set on a network")
def method_set(scene: Scene, random: Random) -> Callable[[], object]:
    module = scene.pick(random, is_mlp)[2]
    if "forward" in vars(module):
        raise Inapplicable

    def forward(self: Any, rows: torch.Tensor) -> Any:
        return louder(type(self).forward(self, rows))

    module.forward = MethodType(forward, module)
    return lambda: vars(module).pop("forward")


@change("a forward set on the model")
def model_forward(scene: Scene, random: Random) -> Callable[[], object]:
    model = scene.model
    if "forward" in vars(model):
        raise Inapplicable
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits.roll(3, -1)
        return output

    model.forward = forward
    return lambda: vars(model).pop("forward")


def patched(place: Any, name: str, other: Any) -> Callable[[], None]:
    """Set a function of a class or module; return what puts it back."""
    own = place.__dict__[name] if isinstance(place, type) else getattr(place, name)
    setattr(place, name, other)
    return lambda: setattr(place, name, own)


def _class_patched(scene: Scene, random: Random, kind: str) -> Callable[[], None]:
    module_class = type(scene.pick(random, KINDS[kind])[2])
    own = module_class.__dict__.get("forward")
    if own is None:
        raise Inapplicable
    return patched(
        module_class, "forward", lambda self, *args, **kwargs: louder(own(self, *args, **kwargs))
    )


for kind in ("a network", "a norm", "an attention", "a linear layer", "a layer"):
    change(f"the forward of the class of {kind}", kind=kind)(_class_patched)


@change("the __call__ of a network's class")
def call_patched(scene: Scene, random: Random) -> Callable[[], None]:
    kind = type(scene.pick(random, is_mlp)[2])
    if kind.__module__.startswith("torch.") or "__call__" in vars(kind):
        raise Inapplicable

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return louder(nn.Module.__call__(self, *args, **kwargs))

    kind.__call__ = call  # type: ignore[method-assign]

    def undo() -> None:
        del kind.__call__

    return undo


# By a function that does not name its arguments.
@change("the model's class patched", may_refuse=True)
def model_class(scene: Scene, random: Random) -> Callable[[], None]:
    kind = type(scene.model)
    own = kind.__dict__.get("forward")
    if own is None:
        raise Inapplicable

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = output.logits.roll(5, -1)
        return output

    return patched(kind, "forward", forward)


@change("the prepare_inputs_for_generation of the model", may_refuse=True)
def prepared(scene: Scene, random: Random) -> Callable[[], object]:
    model = scene.model
    if "prepare_inputs_for_generation" in vars(model):
        raise Inapplicable
    own = model.prepare_inputs_for_generation

    def prepare(*args: Any, **kwargs: Any) -> Any:
        inputs = own(*args, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 1) % 60}

    model.prepare_inputs_for_generation = prepare
    return lambda: vars(model).pop("prepare_inputs_for_generation")


def _modeling(scene: Scene) -> Any:
    """Return the module of Python in which the model's layers are written."""
    return sys.modules[type(scene.layers[0]).__module__]


@change("the module's apply_rotary_pos_emb patched")
def rotation(scene: Scene, random: Random) -> Callable[[], None]:
    module = _modeling(scene)
    own = getattr(module, "apply_rotary_pos_emb", None)
    if own is None:
        raise Inapplicable

    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        return own(q, k, sin, cos, *args, **kwargs)

    return patched(module, "apply_rotary_pos_emb", rotate)


@change("the module's rotate_half patched")
def rotation_half(scene: Scene, random: Random) -> Callable[[], None]:
    module = _modeling(scene)
    if not hasattr(module, "rotate_half"):
        raise Inapplicable
    return patched(module, "rotate_half", lambda rows: rows.flip(-1))


@change("torch's silu patched")
def silu(scene: Scene, random: Random) -> Callable[[], None]:
    name = "silu" if "silu" in str(scene.model.config.to_dict().get("hidden_act")) else "gelu"
    return patched(torch.nn.functional, name, lambda rows, *_, **__: rows.tanh())


@change("torch's linear patched")
def functional_linear(scene: Scene, random: Random) -> Callable[[], None]:
    own = torch.nn.functional.linear

    def linear(rows: Any, weight: Any, bias: Any = None) -> Any:
        return own(rows, weight, bias) * 1.1 + 0.2

    return patched(torch.nn.functional, "linear", linear)


def _attention_registered(scene: Scene, own: Any, name: str) -> Callable[[], None]:
    def attention(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return own(module, query * 1.8, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attention

    def undo() -> None:
        ALL_ATTENTION_FUNCTIONS[name] = own

    return undo


@change("the registered sdpa attention replaced", may_refuse=True)
def registered_sdpa(scene: Scene, random: Random) -> Callable[[], None]:
    if scene.model.config._attn_implementation != "sdpa":
        raise Inapplicable
    return _attention_registered(scene, ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa")


@change("torch's scaled_dot_product_attention patched", may_refuse=True)
def functional_sdpa(scene: Scene, random: Random) -> Callable[[], None]:
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        return own(query * 1.8, *args, **kwargs)

    return patched(torch.nn.functional, "scaled_dot_product_attention", attention)


@change("a network compiled in place", is_seen=False)
def compiled(scene: Scene, random: Random) -> Callable[[], None]:
    module = scene.pick(random, is_mlp)[2]
    if module._compiled_call_impl is not None:
        raise Inapplicable
    module.compile(backend="eager")

    def undo() -> None:
        module._compiled_call_impl = None

    return undo


@change("a network's forward compiled", is_seen=False)
def compiled_forward(scene: Scene, random: Random) -> Callable[[], object]:
    module = scene.pick(random, is_mlp)[2]
    if "forward" in vars(module):
        raise Inapplicable
    module.forward = torch.compile(module.forward, backend="eager", dynamic=True)
    return lambda: vars(module).pop("forward")


@change("a compiled network with other weights")
def compiled_and_written(scene: Scene, random: Random) -> None:
    module = scene.pick(random, is_mlp)[2]
    module.compile(backend="eager")
    for parameter in module.parameters():
        parameter.data.mul_(-1.5)
