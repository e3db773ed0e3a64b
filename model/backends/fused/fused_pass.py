"""A pass over the nodes of draft trees in nine kernels a layer: the launches, and where their results lie.

Shapes: B sequences, N nodes of each, M = B N of all, T rows shown of each cache; H heads, G key heads, D size of a
head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...engine.tree import TreeTopology
from ..passes.hidden import FINAL, HiddenStates
from .decoder import Decoder, Layer, Norm, Weight
from .tiles import Tile, Tiles, num_parts, tiles_of

# (name, grid, what a kernel is given, its constants and settings)
Launch = Callable[[str, tuple[int, ...], Sequence[Any], Mapping[str, Any]], None]
# Levels of a tree below its root whose bits are promised, whatever rows their ancestors lie in.
DEEPEST = 15
# Positions of a tail: up to 16 more, since it begins at a multiple of 16.
TAIL = 32
# Positions that one program attends to, and at a time.
SPLIT, BLOCK = 128, 64
# The first capability with launches that begin before the kernel in front of them has ended.
DEPENDENT_FROM = (9, 0)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


class _Scratch:
    """Results between the kernels of passes over M nodes that show T rows; addresses that graphs keep."""

    def __init__(self, decoder: Decoder, num_nodes: int, num_rows: int) -> None:
        tiles = tiles_of(num_nodes)
        of_tile = sum(tiles.nodes)
        padded = -(-num_nodes // of_tile) * of_tile  # whole tiles are read
        device, dtype = decoder.head.device, decoder.head.dtype
        hidden, head_dim = decoder.hidden_size, decoder.head_dim
        of_heads = decoder.heads * head_dim
        widths = (
            *((weight, num_parts(*weight.shape)) for weight in _split_weights(decoder.layers[0])),
        )
        num_splits = -(-num_rows // SPLIT)

        def numbers(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.part_rows = padded
        self.parts = numbers(
            max(parts * padded * len(weight) for weight, parts in widths), dtype=torch.float32
        )
        self.x, self.h = numbers(padded, hidden), numbers(padded, hidden)
        self.q, self.attended = numbers(padded, of_heads), numbers(padded, of_heads)
        self.gated = numbers(padded, decoder.inner_size)
        self.logits = numbers(num_nodes, len(decoder.head))
        self.sums = numbers(num_splits, num_nodes, of_heads, dtype=torch.float32)
        self.largest = numbers(num_splits, num_nodes, decoder.heads, dtype=torch.float32)
        self.totals = torch.zeros_like(self.largest)
        self.positions, self.ends, self.rows = numbers(3, num_nodes, dtype=torch.int32)
        self.tail_rows = numbers(num_nodes, TAIL, dtype=torch.int32)


def _split_weights(layer: Layer) -> tuple[torch.Tensor, ...]:
    return layer.qkv.weight, layer.out.weight, layer.down.weight


class FusedPass:
    """Passes of a decoder in Triton kernels.

    Args:
        decoder: the model.
        is_interleaved: whether rotary positions turn neighbours; else the two halves of a head.
        launch: launches a kernel by its name, as the function of this module.

    Attributes:
        has_same_bits: whether a node of a draft was seen to have the bits of plain decoding.
        why_not: why it has not; empty if it has.
        num_refused: drafts that the stock model read: trees that are too deep, after texts that are too long.
    """

    def __init__(
        self, decoder: Decoder, is_interleaved: bool = False, launch: Launch | None = None
    ) -> None:
        self.decoder, self._is_interleaved = decoder, is_interleaved
        self.launch, self.is_dependent = launch or launched, may_depend(decoder.head.device)
        self.has_same_bits, self.why_not, self.num_refused = False, "not tried", 0
        self._scratches: dict[tuple[int, int], _Scratch] = {}

    @property
    def name(self) -> str:
        """What is promised, in sidecars and reports."""
        if not self.has_same_bits:
            return f"fused, other bits {self.why_not}"
        others = f"{self.num_refused} drafts by the stock model" if self.num_refused else ""
        return f"fused, {others or 'same bits'}"

    def takes(self, topology: TreeTopology, base: int) -> bool:
        """Whether a pass may read this tree after `base` rows.

        Ancestors more than `DEEPEST` levels above a node are read as committed rows are: where their position says.
        """
        is_flat = topology.is_chain or topology.max_depth <= DEEPEST
        is_read = base + topology.num_nodes <= self.decoder.num_positions and (
            is_flat
            or all(
                place == depth
                for node, deep in enumerate(topology.depths)
                for depth, place in enumerate(topology.path_to(node)[: max(0, deep - DEEPEST + 1)])
            )
        )
        self.num_refused += not is_read
        return is_read

    def logits(
        self,
        token_ids: torch.Tensor,  # [B, N]
        depths: torch.Tensor,  # [B, N]
        sees: torch.Tensor,  # which nodes each node sees, bool [B, N, N]
        starts: torch.Tensor,  # the first row that each sequence writes, [B]
        bases: torch.Tensor,  # its committed rows, [B]
        layers: Sequence[Any],  # of the cache: `keys` and `values` [B, G, T, D] each
        last_row: int,  # rows beyond it are written to it
        hidden: HiddenStates | None = None,  # to be left these
    ) -> torch.Tensor:
        """Run a pass; return logits [M, V], valid until the next pass over as many nodes."""
        model = self.decoder
        num_nodes = token_ids.numel()
        of_each = token_ids.shape[1]
        num_rows = layers[0].keys.shape[2]
        key = (num_nodes, num_rows)
        if key not in self._scratches:
            self._scratches[key] = _Scratch(model, *key)
        scratch, tiles = self._scratches[key], tiles_of(num_nodes)
        run = _Launches(self, scratch, tiles, num_nodes, of_each)
        embedded = model.embedding(token_ids.flatten())
        if model.embedding_scale is not None:
            embedded = embedded * model.embedding_scale
        scratch.x[:num_nodes].copy_(embedded)
        run.places(starts, bases, depths, sees, last_row)
        states: dict[int, torch.Tensor] = {}
        wanted = hidden.wanted if hidden else ()
        branch: Weight | None = None
        after: Norm | None = None
        for index, (layer, cache) in enumerate(zip(model.layers, layers, strict=True)):
            run.residual(branch, after, layer.before_attention)
            if index in wanted:
                states[index] = scratch.x[:num_nodes].clone()
            run.product(layer.qkv.weight, scratch.h, tiles.qkv)
            run.rotate(layer, cache, self._is_interleaved)
            run.attend(layer, cache)
            run.product(layer.out.weight, scratch.attended, tiles.out)
            run.residual(layer.out, layer.after_attention, layer.before_mlp)
            run.gate(layer.gate_up, tiles.gated)
            run.product(layer.down.weight, scratch.gated, tiles.down)
            branch, after = layer.down, layer.after_mlp
        run.residual(branch, after, model.norm)
        if FINAL in wanted:
            states[FINAL] = scratch.h[:num_nodes].clone()
        if hidden:
            hidden.put(states, num_nodes)
        run.product(model.head, scratch.h, tiles.head, scratch.logits)
        if model.logit_softcap:
            return torch.tanh(scratch.logits / model.logit_softcap) * model.logit_softcap
        return scratch.logits


class _Launches:
    """The kernels of one pass over M nodes, N of each sequence."""

    def __init__(
        self, of: FusedPass, scratch: _Scratch, tiles: Tiles, num_nodes: int, of_each: int
    ) -> None:
        self._of, self._model, self._scratch, self._tiles = of, of.decoder, scratch, tiles
        self._num_nodes, self._of_each = num_nodes, of_each
        model = self._model
        self._shape = {
            "H": model.heads,
            "KV": model.kv_heads,
            "D": model.head_dim,
            "BD": power_of_two(model.head_dim),
        }
        # A warp keeps 32 rows of 64 numbers of keys and values in registers.
        self._tail_warps = max(1, self._shape["BD"] // 64)

    def places(
        self,
        starts: torch.Tensor,
        bases: torch.Tensor,
        depths: torch.Tensor,
        sees: torch.Tensor,
        last_row: int,
    ) -> None:
        """Find positions and rows of the nodes, once a pass."""
        to, nodes = self._scratch, self._of_each
        self._launch(
            "places_kernel",
            (self._num_nodes,),
            *(starts, bases, depths, sees.view(torch.uint8)),
            *(to.positions, to.ends, to.rows, to.tail_rows),
            *(nodes, last_row),
            warps=1,
            DEEPEST=DEEPEST,
            T=TAIL,
            BN=max(16, power_of_two(nodes)),
        )

    def residual(self, branch: Weight | None, after: Norm | None, before: Norm | None) -> None:
        """Add a branch, by the weight that made it, to the residual stream; norm the sum."""
        to, size = self._scratch, self._model.hidden_size
        bias = branch.bias if branch else None
        from_one = {norm.from_one for norm in (after, before) if norm}
        self._launch(
            "residual_kernel",
            (self._num_nodes,),
            *(to.x, to.parts, _or(bias, to.x), _gain(after, to.x), _gain(before, to.x), to.h),
            *(to.part_rows * size, size),
            *(norm.epsilon if norm else 0.0 for norm in (after, before)),
            # The same for all numbers of nodes: it orders the sum of a norm.
            warps=8 if size >= 2048 else 2,
            S=num_parts(*branch.weight.shape) if branch else 0,
            HAS_BIAS=bias is not None,
            HAS_AFTER=after is not None,
            HAS_BEFORE=before is not None,
            AFTER_GAIN=after is not None and after.gain is not None,
            BEFORE_GAIN=before is not None and before.gain is not None,
            FROM_ONE=True in from_one,
            BK=power_of_two(size),
        )

    def product(
        self, weight: torch.Tensor, rows: torch.Tensor, tile: Tile, out: torch.Tensor | None = None
    ) -> None:
        """Multiply rows by a weight, into parts of sums, or whole into `out`."""
        num_outputs, num_columns = weight.shape
        parts = num_parts(*weight.shape) if out is None else 1
        columns = -(-num_columns // parts // 128) * 128
        is_even = num_outputs % tile.outputs == 0 and columns % tile.columns == 0
        of_tile = sum(self._tiles.nodes)
        self._launch(
            "product_kernel",
            (-(-num_outputs // tile.outputs), parts, -(-self._num_nodes // of_tile)),
            *(weight, rows, self._scratch.parts if out is None else out),
            *(num_outputs, num_columns, columns, self._num_nodes),
            self._scratch.part_rows * num_outputs,
            **self._of_tile(tile),
            EVEN=is_even and columns * parts == num_columns,
        )

    def gate(self, weight: Weight, tile: Tile) -> None:
        """Multiply by the gate's weight and the one behind it; join both."""
        num_outputs, num_columns = weight.weight.shape[0] // 2, weight.weight.shape[1]
        of_tile = sum(self._tiles.nodes)
        to = self._scratch
        self._launch(
            "gated_kernel",
            (-(-num_outputs // tile.outputs), -(-self._num_nodes // of_tile)),
            *(weight.weight, to.h, _or(weight.bias, to.h), to.gated),
            *(num_outputs, num_columns, self._num_nodes),
            **self._of_tile(tile),
            EVEN=num_outputs % tile.outputs == 0 and num_columns % tile.columns == 0,
            HAS_BIAS=weight.bias is not None,
            GELU=self._model.is_gelu,
        )

    def rotate(self, layer: Layer, cache: Any, is_interleaved: bool) -> None:
        """Norm and rotate queries and keys, and write keys and values into the cache."""
        model, to = self._model, self._scratch
        gain = layer.q_norm.gain if layer.q_norm else None
        is_wide = gain is not None and len(gain) > model.head_dim
        heads = power_of_two(model.heads) if is_wide else min(8, power_of_two(model.kv_heads))
        blocks = -(-model.heads // heads) + 2 * -(-model.kv_heads // heads)
        self._launch(
            "rotate_kernel",
            (self._num_nodes, blocks),
            *(to.parts, _or(layer.qkv.bias, to.x), _gain(layer.q_norm, to.x)),
            *(_gain(layer.k_norm, to.x), layer.rope.cos, layer.rope.sin),
            *(to.positions, to.rows, to.q, cache.keys, cache.values, self._of_each),
            *(to.part_rows * len(layer.qkv.weight), *_strides(cache)),
            *(norm.epsilon if norm else 0.0 for norm in (layer.q_norm, layer.k_norm)),
            **self._shape,
            R=2 * layer.rope.cos.shape[1],
            HB=heads,
            S=num_parts(*layer.qkv.weight.shape),
            HAS_BIAS=layer.qkv.bias is not None,
            NORM=2 if is_wide else int(gain is not None),
            FROM_ONE=bool(layer.q_norm and layer.q_norm.from_one),
            INTERLEAVED=is_interleaved,
        )

    def attend(self, layer: Layer, cache: Any) -> None:
        """Attend: to committed rows in splits, then to the last positions of each node."""
        model, to = self._model, self._scratch
        num_splits, rows = len(to.sums), self._of_each * (model.heads // model.kv_heads)
        # Larger heads leave less room for rows.
        tile = min(64 if self._shape["BD"] <= 128 else 32, max(16, power_of_two(rows)))
        given = (
            to.q,
            cache.keys,
            cache.values,
            to.sums,
            to.largest,
            to.totals,
            to.positions,
            to.ends,
        )
        sizes = (self._num_nodes, self._of_each, *_strides(cache))
        options = {
            **self._shape,
            "SPLIT": SPLIT,
            "HAS_WINDOW": layer.window > 0,
            "HAS_SOFTCAP": layer.softcap > 0,
        }
        limits = (layer.scale, layer.window, layer.softcap)
        texts = self._num_nodes // self._of_each
        self._launch(
            "committed_kernel",
            (num_splits, model.kv_heads, texts * -(-rows // tile)),
            *(*given, *sizes, *limits),
            stages=2,
            BT=BLOCK,
            NT=tile,
            **options,
        )
        self._launch(
            "tail_kernel",
            (self._num_nodes, model.heads),
            *(*given, to.tail_rows, to.attended, *sizes, *limits),
            warps=self._tail_warps,
            stages=2,
            T=TAIL,
            AT_ONCE=4,
            **options,
        )

    def _of_tile(self, tile: Tile) -> dict[str, int]:
        first, second = self._tiles.nodes
        return {
            "BN": tile.outputs,
            "BK": tile.columns,
            "NT1": first,
            "NT2": second,
            "warps": tile.warps,
            "stages": tile.stages,
        }

    def _launch(
        self,
        name: str,
        grid: tuple[int, ...],
        *given: Any,
        warps: int = 4,
        stages: int = 3,
        **sizes: Any,
    ) -> None:
        options = {"num_warps": warps, "num_stages": stages, "DEPENDENT": self._of.is_dependent}
        # Else the compiler may fuse a product and a sum in the kernel for some number of nodes, and not in another.
        options["enable_fp_fusion"] = False
        if self._of.is_dependent:
            options["launch_pdl"] = True
        self._of.launch(name, grid, given, {**sizes, **options})


def launched(
    name: str, grid: tuple[int, ...], given: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Launch a kernel of `kernels`, which is imported here: Triton comes with torch on a GPU alone."""
    from . import kernels

    kernel: Callable[..., object] = getattr(kernels, name)[grid]
    kernel(*given, **options)


def may_depend(device: torch.device) -> bool:
    """Whether a GPU launches a kernel before the one in front of it has ended, and this Triton lets it wait."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < DEPENDENT_FROM:
        return False
    from . import kernels

    return kernels.CAN_DEPEND


def _gain(norm: Norm | None, instead: torch.Tensor) -> torch.Tensor:
    return _or(norm.gain if norm else None, instead)


def _or(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or another one for a kernel that does not read it."""
    return instead if tensor is None else tensor


def _strides(cache: Any) -> tuple[int, int, int]:
    """Return the strides of a layer's rows: of a sequence, a row and a head; a single sequence has none."""
    strides = cache.keys.stride()
    return (strides[0] if cache.keys.shape[0] > 1 else 0, strides[2], strides[1])
