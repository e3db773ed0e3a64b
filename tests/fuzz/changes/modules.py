"""Modules that are replaced, wrapped, dropped or re-typed, and attributes and configs that are set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from tests.fuzz.changes.kind import change
from tests.fuzz.changes.weights import linear_of, noise_like
from tests.fuzz.scene import Inapplicable, Scene


def is_inner_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a linear layer within the layers."""
    return type(module) is nn.Linear and "layers" in name


def is_mlp(name: str, _: nn.Module) -> bool:
    """Whether a module is a layer's network."""
    return name.endswith("mlp")


def is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is a layer's attention."""
    return name.endswith(("self_attn", "attention")) and hasattr(module, "scaling")


def is_norm(_: str, module: nn.Module) -> bool:
    """Whether a module is a norm."""
    return "Norm" in type(module).__name__


def with_other_weights(module: nn.Module) -> Any:
    """Return a copy with other weights."""
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data = noise_like(parameter) if parameter.ndim > 1 else parameter.data * 1.5
    return other


@change("a network of the same class")
def other_mlp(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_mlp)
    setattr(parent, name, with_other_weights(own))


@change("an attention of the same class")
def other_attention(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_attention)
    setattr(parent, name, with_other_weights(own))


@change("a linear layer of the same class")
def other_linear(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_inner_linear)
    setattr(parent, name, with_other_weights(own))


@change("a layer of the same class")
def other_layer(scene: Scene, random: Random) -> None:
    layers = scene.layers
    place = random.randrange(len(layers))
    layers[place] = with_other_weights(layers[place])


@change("a module put in by _modules")
def other_by_modules(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_inner_linear)
    parent._modules[name] = with_other_weights(own)


class Doubling(nn.Linear):
    """Another class of linear layers."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 2 + 1


class Around(nn.Module):
    """A wrapper that acts on what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner(*args, **kwargs)
        if isinstance(found, tuple):
            return (found[0] * 1.7, *found[1:])
        return found * 1.7

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@change("a linear layer of another class")
def subclass_linear(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_inner_linear)
    other = Doubling(own.in_features, own.out_features, own.bias is not None)
    other.load_state_dict(own.state_dict())
    setattr(parent, name, other.to(own.weight.dtype))


@change("a wrapped linear layer")
def wrapped_linear(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_inner_linear)
    setattr(parent, name, Around(own))


@change("a wrapped network")
def wrapped_mlp(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_mlp)
    setattr(parent, name, Around(own))


@change("a wrapped norm")
def wrapped_norm(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_norm)
    setattr(parent, name, Around(own))


@change("a wrapped layer")
def wrapped_layer(scene: Scene, random: Random) -> None:
    layers = scene.layers
    place = random.randrange(len(layers))
    layers[place] = Around(layers[place])


@change("a network without effect")
def no_mlp(scene: Scene, random: Random) -> None:
    parent, name, _ = scene.pick(random, is_mlp)
    setattr(parent, name, nn.Identity())


@change("a norm of torch's", may_refuse=False)
def layer_norm(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, is_norm)
    setattr(parent, name, nn.LayerNorm(own.weight.shape[0]).to(own.weight.dtype))


class Swapped(nn.Module):
    """Another activation."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.tanh() * 2


@change("another activation")
def activation(scene: Scene, random: Random) -> None:
    mlp = scene.pick(random, is_mlp)[2]
    name = next((one for one in ("act_fn", "act", "activation_fn") if hasattr(mlp, one)), None)
    if name is None:
        raise Inapplicable
    vars(mlp).pop(name, None)
    setattr(mlp, name, Swapped())


@change("an activation that is a function")
def activation_function(scene: Scene, random: Random) -> None:
    mlp = scene.pick(random, lambda name, one: is_mlp(name, one) and "act_fn" in one._modules)[2]
    del mlp._modules["act_fn"]
    mlp.act_fn = torch.tanh


@change("the last layer dropped", may_refuse=True)
def dropped(scene: Scene, random: Random) -> None:
    del scene.layers[-1]


@change("the last layer dropped, in the config too", may_refuse=True)
def dropped_in_config(scene: Scene, random: Random) -> None:
    config = scene.model.config.get_text_config()
    del scene.layers[-1]
    config.num_hidden_layers -= 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:-1]


@change("layers exchanged", may_refuse=True)
def exchanged_layers(scene: Scene, random: Random) -> None:
    layers = scene.layers
    one, other = layers[0], layers[len(layers) - 1]
    if one is other:
        raise Inapplicable
    layers[0], layers[len(layers) - 1] = other, one


@change("networks exchanged")
def exchanged_mlps(scene: Scene, random: Random) -> None:
    one, other = scene.layers[0], scene.layers[-1]
    if not hasattr(one, "mlp") or one is other:
        raise Inapplicable
    one.mlp, other.mlp = other.mlp, one.mlp


@change("a layer used twice", may_refuse=True)
def used_twice(scene: Scene, random: Random) -> None:
    layers = scene.layers
    layers[len(layers) - 1] = layers[0]


@change("a linear layer re-typed")
def retyped_linear(scene: Scene, random: Random) -> None:
    scene.pick(random, is_inner_linear)[2].__class__ = Doubling


@change("a network re-typed")
def retyped_mlp(scene: Scene, random: Random) -> None:
    mlp = scene.pick(random, is_mlp)[2]

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return type(self).__mro__[1].forward(self, rows) * 1.5  # type: ignore[no-any-return, attr-defined]

    mlp.__class__ = type("Louder", (type(mlp),), {"forward": forward})


@change("a bias added")
def biased(scene: Scene, random: Random) -> None:
    layer = scene.pick(random, lambda name, one: is_inner_linear(name, one) and one.bias is None)[2]
    layer.bias = nn.Parameter(torch.randn(layer.out_features).to(layer.weight.dtype) * 2)


@change("a bias of the head added")
def biased_head(scene: Scene, random: Random) -> None:
    head = scene.model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise Inapplicable
    head.bias = nn.Parameter(torch.randn(head.out_features).to(head.weight.dtype) * 3)


@change("a bias removed")
def unbiased(scene: Scene, random: Random) -> Callable[[], None]:
    """On a model without biases one is added before, and the texts of between are none."""
    found = [
        one for one in scene.model.modules() if type(one) is nn.Linear and one.bias is not None
    ]
    layer = random.choice(found) if found else linear_of(scene, random)
    own = layer.bias
    if own is None:
        layer.bias = nn.Parameter(torch.randn(layer.out_features).to(layer.weight.dtype) * 2)
    else:
        layer.bias = None

    def undo() -> None:
        layer.bias = own

    return undo


@change("the eps of a norm")
def eps(scene: Scene, random: Random) -> None:
    norm = scene.pick(random, is_norm)[2]
    name = next((one for one in ("variance_epsilon", "eps") if hasattr(norm, one)), None)
    if name is None:
        raise Inapplicable
    setattr(norm, name, 3.0)


@change("the scaling of an attention")
def scaling(scene: Scene, random: Random) -> None:
    attention = scene.pick(random, is_attention)[2]
    attention.scaling *= 3


@change("the attention_scaling of a rotary embedding")
def rotary_scaling(scene: Scene, random: Random) -> None:
    rotary = scene.pick(random, lambda _, one: hasattr(one, "attention_scaling"))[2]
    rotary.attention_scaling *= 1.6


@change("any float attribute of a module", may_refuse=True, is_seen=False)
def any_float(scene: Scene, random: Random) -> None:
    found = [
        (module, name)
        for module in scene.model.modules()
        for name, value in vars(module).items()
        if type(value) is float and "dropout" not in name
    ]
    module, name = random.choice(found)
    value = getattr(module, name)
    setattr(module, name, random.choice([value * 2, value * 0.5, value + 1, -value]))


@change("any float of the config", may_refuse=True, is_seen=False)
def any_float_of_config(scene: Scene, random: Random) -> None:
    config = scene.model.config.get_text_config()
    names = [name for name, value in vars(config).items() if type(value) is float]
    name = random.choice(names)
    setattr(config, name, getattr(config, name) * random.choice([0.5, 2.0]))


@change("rotary parameters of the config", is_seen=False)
def rope_of_config(scene: Scene, random: Random) -> None:
    """They act when a model is built."""
    config = scene.model.config.get_text_config()
    if not getattr(config, "rope_parameters", None):
        raise Inapplicable
    config.rope_parameters = copy.deepcopy(config.rope_parameters)
    config.rope_parameters["rope_theta"] = 77.0


@change("a rotary embedding of another config", may_refuse=True)
def other_rotary(scene: Scene, random: Random) -> None:
    parent, name, own = scene.pick(random, lambda name, _: name.endswith("rotary_emb"))
    config = copy.deepcopy(own.config)
    if not getattr(config, "rope_parameters", None) or "rope_theta" not in config.rope_parameters:
        raise Inapplicable
    config.rope_parameters["rope_theta"] = 3.0
    setattr(parent, name, type(own)(config=config))


@change("eager attention", is_seen=False)
def eager(scene: Scene, random: Random) -> Callable[[], None]:
    own = scene.model.config._attn_implementation
    scene.model.set_attn_implementation("eager")
    return lambda: scene.model.set_attn_implementation(own)


@change("an attention that is not causal", may_refuse=True, is_seen=False)
def not_causal(scene: Scene, random: Random) -> None:
    attention = scene.pick(random, lambda _, one: hasattr(one, "is_causal"))[2]
    attention.is_causal = False


@change("a window of an attention", may_refuse=True, is_seen=False)
def window(scene: Scene, random: Random) -> None:
    scene.pick(random, is_attention)[2].sliding_window = 4


@change("a context that is shorter", may_refuse=True, is_seen=False)
def context(scene: Scene, random: Random) -> None:
    scene.model.config.get_text_config().max_position_embeddings = 9


@change("an end of text")
def end_of_text(scene: Scene, random: Random) -> None:
    scene.model.generation_config.eos_token_id = scene.plain(scene.last[:14])[3:5]


@change("a submodule in training, without dropout", is_seen=False, may_refuse=True)
def in_training(scene: Scene, random: Random) -> None:
    layer = random.choice([*scene.layers])
    for module in layer.modules():
        is_random = isinstance(module, nn.Dropout) and module.p > 0
        if is_random or any("drop" in name and value for name, value in vars(module).items()):
            raise Inapplicable
    layer.train()


@change("requires_grad", is_seen=False)
def gradients(scene: Scene, random: Random) -> None:
    scene.model.requires_grad_(random.random() < 0.5)


@change("gradient checkpointing", is_seen=False)
def checkpointing(scene: Scene, random: Random) -> Callable[[], object]:
    scene.model.gradient_checkpointing_enable()
    return scene.model.gradient_checkpointing_disable  # type: ignore[no-any-return]
