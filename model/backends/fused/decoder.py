"""What a fused pass computes with: a decoder's weights, norms and rotary tables, found by structure.

Modules are known by what they hold. A layer has an attention with query, key, value and output weights, or the
first three as one; a gated feed-forward part, or its first two weights as one; and norms in the places that their
names say. Norms are known by what they compute (`find_norms`), rotary tables by asking the modules that made those
of a watched pass. Every parameter of the model must be accounted for. `proof` says whether the whole is right.

Weights that a kernel reads together become one tensor, of which the modules' own parameters are views from then on:
the stock model goes on with the same numbers, and there is no second copy.

Shapes: D size of a head, R of its numbers rotated, N outputs and K inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ...kernels.norms import FusedNorm, find_norms, weighted, weighted_from_one
from ..programs.capture import LayerCall
from ..programs.layers import watched
from ..proofs.support import layers_of

# Positions of rotary tables, if the context allows as many: 64 MiB for heads of 128 numbers.
MOST_POSITIONS = 2**17
# Tokens of the watched pass.
NUM_WATCHED = 4
# Names of the norms before and after the attention, and before and after the feed-forward part, by family:
# GLM 4's, Gemma's, OLMo 2's, and all others'.
PLACES: tuple[tuple[str, str, str, str], ...] = (
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("input_layernorm", "", "post_attention_layernorm", ""),
)


class NotFusedError(Exception):
    """A model's passes cannot be fused; the message says why in one line."""


class Weight(NamedTuple):
    """A weight [N, K], and a bias [N] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """A root mean square norm."""

    gain: torch.Tensor | None  # [K]
    epsilon: float
    from_one: bool  # whether one plus the gain is multiplied

    @classmethod
    def of(cls, norm: FusedNorm) -> Norm:
        """Return what a recognised norm computes.

        Raises:
            NotFusedError: if it is a norm of another kind.
        """
        if norm.kind not in (weighted, weighted_from_one):
            raise NotFusedError("norms that subtract a mean")
        gain = norm.module._parameters[norm.weight] if norm.weight else None
        return cls(gain, vars(norm.module)[norm.epsilon], norm.kind is weighted_from_one)


class Rope(NamedTuple):
    """Cosines and sines by position, [positions, R / 2] each, float32."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer; a norm is None where there is none."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    qkv: Weight
    q_norm: Norm | None
    k_norm: Norm | None
    out: Weight
    gate_up: Weight
    down: Weight
    rope: Rope
    scale: float
    window: int  # 0: all earlier positions are seen
    softcap: float  # of attention scores; 0: none


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder model, as a fused pass reads it."""

    embedding: nn.Module
    embedding_scale: torch.Tensor | None  # []
    layers: list[Layer]
    norm: Norm
    head: torch.Tensor  # [vocabulary, hidden size]
    logit_softcap: float  # 0: none
    heads: int
    kv_heads: int
    head_dim: int
    is_gelu: bool  # its gates; else SiLU

    @property
    def hidden_size(self) -> int:
        """Numbers of the residual stream."""
        return self.head.shape[1]

    @property
    def inner_size(self) -> int:
        """Numbers between the feed-forward weights."""
        return self.layers[0].down.weight.shape[1]

    @property
    def num_positions(self) -> int:
        """The most positions of a sequence."""
        return min(len(layer.rope.cos) for layer in self.layers)


class _Watched(NamedTuple):
    """What a plain pass showed."""

    embedded: list[torch.Tensor]  # what the embedding returned
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]  # calls of rotary modules
    calls: dict[int, LayerCall]  # of the layers


@torch.inference_mode(False)
@torch.no_grad()
def decoder_of(target: Any) -> Decoder:
    """Return what a fused pass of a target's model computes with; its weights are merged.

    Raises:
        NotFusedError: if something in it is not known.
    """
    model, config = target.model, target.config
    shapes = target.layer_shapes
    if len({*shapes}) != 1 or shapes[0] is None or len(shapes[0].buffers) != 2:
        raise NotFusedError("layers that cache in different shapes")
    kv_heads, head_dim = shapes[0].buffers[0].num_heads, shapes[0].buffers[0].head_dim
    if shapes[0].buffers[0] != shapes[0].buffers[1] or any(target.borders):
        raise NotFusedError("keys unlike values, or positions that change with the text's length")
    name, layers = layers_of(model, config.num_hidden_layers)
    norms = find_norms(model, target.dtype, model.device.type)
    around = model.get_submodule(name.rpartition(".")[0])
    finals = [norms[module] for module in around.children() if module in norms]
    head = model.get_output_embeddings()
    if len(finals) != 1 or type(head) is not nn.Linear or head.bias is not None:
        raise NotFusedError("an output head, or a norm before it, of another kind")
    seen = _watched(target, layers)
    ropes: dict[int, Rope] = {}
    found = [
        _Found(layer, norms).layer(_rope(target, seen, index, ropes), _window(config, index))
        for index, layer in enumerate(layers)
    ]
    decoder = Decoder(
        embedding=model.get_input_embeddings(),
        embedding_scale=_scale(seen.embedded[0], seen.calls[0].rows),
        layers=found,
        norm=Norm.of(finals[0]),
        head=head.weight,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        heads=found[0].out.weight.shape[1] // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_gelu=_is_gelu(layers[0]),
    )
    _check_all_are_used(model, decoder)
    return decoder


class _Found:
    """The parts of a decoder layer."""

    def __init__(self, layer: nn.Module, norms: Mapping[nn.Module, FusedNorm]) -> None:
        self._norms = norms
        self._own = dict(layer.named_children())
        self._attention = self._child("o_proj")
        self._mlp = self._child("down_proj")

    def layer(self, rope: Rope, window: int) -> Layer:
        """Return the layer; raise NotFusedError for one of another kind."""
        own = {name for name, module in self._own.items() if module in self._norms}
        places = next((names for names in PLACES if {*filter(None, names)} == own), None)
        if places is None:
            raise NotFusedError(
                f"norms of a layer named {', '.join(sorted(own)) or 'in another way'}"
            )
        attention, mlp = self._attention, self._mlp
        head_dim = getattr(attention, "head_dim", None)
        scale = getattr(attention, "scaling", None)
        if not isinstance(head_dim, int) or not isinstance(scale, float):
            raise NotFusedError("an attention that does not say its scale")
        norms = [self._norm(self._own.get(place)) for place in places]
        return Layer(
            before_attention=norms[0],
            after_attention=norms[1],
            before_mlp=norms[2],
            after_mlp=norms[3],
            qkv=_merged(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            q_norm=self._weighted(getattr(attention, "q_norm", None)),
            k_norm=self._weighted(getattr(attention, "k_norm", None)),
            out=_merged(attention, (), "o_proj"),
            gate_up=_merged(mlp, ("gate_proj", "up_proj"), "gate_up_proj"),
            down=_merged(mlp, (), "down_proj"),
            rope=rope,
            scale=scale,
            window=window,
            softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        )

    def _child(self, name: str) -> nn.Module:
        found = [module for module in self._own.values() if hasattr(module, name)]
        if len(found) != 1:
            raise NotFusedError(f"a layer with {len(found) or 'no'} parts that have {name}")
        return found[0]

    def _weighted(self, module: nn.Module | None) -> Norm | None:
        norm = self._norm(module)
        if norm is not None and norm.gain is None:
            raise NotFusedError("norms of queries or keys without a weight")
        return norm

    def _norm(self, module: nn.Module | None) -> Norm | None:
        if module is None:
            return None
        if module not in self._norms:
            raise NotFusedError(f"a norm of another kind, {type(module).__name__}")
        return Norm.of(self._norms[module])


def _merged(module: nn.Module, parts: Sequence[str], whole: str) -> Weight:
    """Return the weight `whole` of a module, or the one that its parts' weights become."""
    names = parts if parts and not hasattr(module, whole) else (whole,)
    linears: list[Any] = [getattr(module, name, None) for name in names]
    if any(type(linear) is not nn.Linear for linear in linears):
        raise NotFusedError(f"{' and '.join(names)} that are no linear layers")
    biases = [linear.bias for linear in linears]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        raise NotFusedError("biases on some of the weights that are read together")
    bias = None if biases[0] is None else _joined(biases)
    return Weight(_joined([linear.weight for linear in linears]), bias)


def _joined(parts: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return one tensor of the parts' rows, one behind the other; the parts are views of it from now on."""
    if any(part.dtype != parts[0].dtype or not part.is_contiguous() for part in parts):
        raise NotFusedError("weights of several dtypes, or that do not lie row by row")
    sizes = [len(part) for part in parts]
    shape = (sum(sizes), *parts[0].shape[1:])
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    is_one = all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False))
    if is_one and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        return torch.as_strided(parts[0].data, shape, parts[0].stride())
    joined = torch.cat([part.data for part in parts])
    for part, rows in zip(parts, joined.split(sizes), strict=True):
        part.data = rows
    return joined


def _watched(target: Any, layers: Sequence[nn.Module]) -> _Watched:
    """Return what a plain pass of the model shows."""
    embedded: list[torch.Tensor] = []
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
    thread = get_ident()  # others may run the model meanwhile

    def note_rotary(module: nn.Module, *call: Any) -> None:
        if get_ident() == thread:
            made.append((module, *call))

    def note_embedding(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
        if get_ident() == thread:
            embedded.append(output)

    with ExitStack() as stack:
        embedding = target.model.get_input_embeddings()
        stack.callback(embedding.register_forward_hook(note_embedding).remove)
        for module in target.model.modules():
            if any("inv_freq" in name for name in module._buffers):  # makes rotary positions
                stack.callback(module.register_forward_hook(note_rotary, with_kwargs=True).remove)
        calls = watched(layers, target.plain_pass, NUM_WATCHED).given
    return _Watched(embedded, made, calls)


def _rope(target: Any, seen: _Watched, index: int, known: dict[int, Rope]) -> Rope:
    """Return the rotary table of a layer."""
    given = seen.calls[index].named.get("position_embeddings") if index in seen.calls else None
    if not isinstance(given, tuple) or len(given) != 2:
        raise NotFusedError("layers that are not given rotary positions")
    if id(given) in known:
        return known[id(given)]
    calls = [call for call in seen.made if call[3][0] is given[0]]
    if not calls:
        raise NotFusedError("rotary positions of which no module is known")
    module, arguments, named, _ = calls[0]
    most = getattr(target.config, "max_position_embeddings", None) or MOST_POSITIONS
    positions = torch.arange(min(most, MOST_POSITIONS), device=target.device)[None]

    def with_positions(value: Any) -> Any:
        is_positions = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return positions if is_positions else value

    cos, sin = module(
        *map(with_positions, arguments), **{key: with_positions(one) for key, one in named.items()}
    )
    half = cos.shape[-1] // 2
    for table in (cos, sin):
        if table.ndim != 3 or not torch.equal(table[..., :half], table[..., half:]):
            raise NotFusedError("rotary positions in another layout")
    known[id(given)] = Rope(*(table[0, :, :half].float().contiguous() for table in (cos, sin)))
    return known[id(given)]


def _window(config: Any, index: int) -> int:
    """Return the window of a layer, 0 for none."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) or 0
    if kinds and kinds[index] not in ("full_attention", "sliding_attention"):
        raise NotFusedError(f"layers of the kind {kinds[index]}")
    return 0 if kinds and kinds[index] == "full_attention" else window


def _scale(embedded: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
    """Return by what the first layer's rows are larger than the embeddings; None if they are these."""
    if torch.equal(embedded, rows):
        return None
    at = embedded.abs().argmax()
    ratio = (rows.flatten()[at].float() / embedded.flatten()[at].float()).to(rows.dtype)
    if not torch.equal(embedded * ratio, rows):
        raise NotFusedError("embeddings that are more than scaled")
    return ratio


def _is_gelu(layer: nn.Module) -> bool:
    """Whether a layer's gates are GELU by tanh; False for SiLU."""
    names = ("act_fn", "activation_fn")
    acts = [vars(part)["_modules"].get(name) for part in layer.children() for name in names]
    numbers = torch.linspace(-4, 4, 33, device="cpu")
    for act in filter(None, acts):
        found = act(numbers)
        if torch.allclose(found, functional.silu(numbers), atol=1e-5):
            return False
        if torch.allclose(found, functional.gelu(numbers, approximate="tanh"), atol=1e-5):
            return True
    raise NotFusedError("gates that are neither SiLU nor GELU by tanh")


def _check_all_are_used(model: nn.Module, decoder: Decoder) -> None:
    """Raise NotFusedError if the model has parameters that the decoder does not read."""
    known = {id(parameter) for parameter in decoder.embedding.parameters()} | {id(decoder.head)}
    kept = [decoder.norm]
    ranges: list[tuple[int, int]] = []
    for layer in decoder.layers:
        kept += [one for name in Layer.__slots__ if isinstance(one := getattr(layer, name), Norm)]
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
            for tensor in weight:
                if tensor is not None:
                    begin = tensor.data_ptr()
                    ranges.append((begin, begin + tensor.numel() * tensor.element_size()))
    known |= {id(norm.gain) for norm in kept}
    within = {begin for begin, _ in ranges}
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        if id(parameter) in known or begin in within:
            continue
        if not any(first <= begin < end for first, end in ranges):
            raise NotFusedError(f"a parameter of another kind, {name}")
