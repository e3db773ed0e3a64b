"""Norms of a pass on a GPU: one kernel each, where transformers launches six to ten.

Transformers writes RMSNorm out: to float32, square, mean, plus epsilon, root, product, to half, times
weight. That is 16 of some 40 kernels of a layer, and a pass over a draft waits for launches, not for
numbers. Torch's own functions are one kernel each on CUDA: `rms_norm` since torch 2.9, which
`has_fused_rms_norm` asks torch itself, and `layer_norm` before that. Launches of an eager step over
81 nodes, counted on a simulated device (7B: 32 layers, half precision):

| norms | a layer | a step |
|---|---|---|
| transformers' | 40 | 1,322 |
| torch's | 26 | 867 |

Norms are recognised by what they compute, not by their names (`NormKind`, `find_norms`).

In half precision Llama's norm rounds twice, before the product with the weight and after it; torch's
function computes in float32 and rounds once. So the two differ by one rounding. In float32 they
differ by the order of the sum: there near-ties are decided with the original modules (`reference`).
Plain decoding in half precision has torch's norms, too, and the self-test compares with those: one
rounding in each norm moves logits by up to ten times what passes with the same norms differ by.

Shapes: rows of D numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm, rms_norm

from ..machine.own_forwards import OwnForwards
from .linear import is_exact

# (rows [..., D], weight [D] or None, epsilon) -> rows [..., D]
NormKind = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]

# Largest number that counts as an epsilon: a larger one would change the norm itself.
LARGEST_EPSILON = 1e-2
# Largest difference from a module's own result, in steps of the dtype at the row's largest number: sums
# in another order, and one rounding more in half precision.
MOST_STEPS_EXACT, MOST_STEPS_HALF = 16, 2
# Numbers of a row for norms without a weight.
UNWEIGHTED_SIZE = 64


def weighted(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Root mean square norm, times the weight: Llama's and most others'; T5's layer norm."""
    return rms_norm(rows, rows.shape[-1:], weight, epsilon)


def weighted_from_one(
    rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Root mean square norm, times one plus the weight, rounded once: Gemma's.

    Three kernels in half precision and two in float32. With `1 + weight` as a weight it would be one
    less, but that sum, rounded to half precision, is another weight.
    """
    assert weight is not None
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    normed = rms_norm(wide, rows.shape[-1:], None, epsilon)
    return torch.addcmul(normed, normed, weight, out=torch.empty_like(rows))


def centered(rows: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Layer norm without a bias: Cohere's."""
    return layer_norm(rows, rows.shape[-1:], weight, None, epsilon)


KINDS: tuple[NormKind, ...] = (weighted, weighted_from_one, centered)


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """The forward pass of a norm by torch's function.

    Attributes:
        module: the norm.
        kind: what it computes.
        weight, epsilon: names of its attributes; without a weight, "".
    """

    module: nn.Module
    kind: NormKind
    weight: str
    epsilon: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return the normed rows; calls with other arguments go to the module."""
        module = self.module
        weight = module._parameters[self.weight] if self.weight else None
        rows: Any = arguments[0] if len(arguments) == 1 and not options else None
        # Torch's function is one kernel only for rows of the weight's dtype.
        is_other = rows is None or (weight is not None and weight.dtype != rows.dtype)
        if is_other or torch.is_grad_enabled():
            return type(module).forward(module, *arguments, **options)
        return self.kind(rows, weight, vars(module)[self.epsilon])


class FusedNorms:
    """The norms of a model's passes that torch's functions compute."""

    def __init__(self, norms: Mapping[nn.Module, FusedNorm], dtype: torch.dtype) -> None:
        self.name = "fused" if norms else "as-they-are"
        # Whether plain decoding has them too: then near-ties need no other functions.
        self.is_plain = not norms or not is_exact(dtype)
        self._norms = OwnForwards(norms)

    def __len__(self) -> int:
        return len(self._norms)

    def of_pass(self, in_reference: bool = False) -> OwnForwards:
        """Return the functions of a pass; in reference arithmetic those of plain decoding."""
        return self._norms if self.is_plain or not in_reference else OwnForwards({})


def fused_norms(model: nn.Module, dtype: torch.dtype) -> FusedNorms:
    """Return the norms of a model's passes: patched on a GPU."""
    is_left_alone = hasattr(model, "_orig_mod") or not has_fused_rms_norm()
    return FusedNorms({} if is_left_alone else find_norms(model, dtype, "cuda"), dtype)


def has_fused_rms_norm() -> bool:
    """Whether this build of torch has its root mean square norm as one kernel for GPUs."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CUDA")


@torch.inference_mode()
def find_norms(
    model: nn.Module, dtype: torch.dtype, device_type: str
) -> dict[nn.Module, FusedNorm]:
    """Return the norms among a model's modules that torch's functions compute within rounding.

    A candidate is a module without children or buffers, with one weight of one dimension or none, and
    with an epsilon. It is a norm if a copy of it, with random weights, and one of the functions agree
    on random rows, in the model's dtype and in float32. Modules with weights on other devices do not count.
    """
    found = {}
    for module in model.modules():
        weights = module._parameters
        if not _is_candidate(module) or any(
            weight is None
            or (weight.ndim, weight.dtype, weight.device.type) != (1, dtype, device_type)
            for weight in weights.values()
        ):
            continue
        norms = (
            FusedNorm(module, kind, next(iter(weights), ""), epsilon)
            for epsilon in _epsilons(module)
            for kind in KINDS
        )
        proved = (
            norm for norm in norms if all(_agrees(norm, one) for one in {dtype, torch.float32})
        )
        if (norm := next(proved, None)) is not None:
            found[module] = norm
    return found


def _is_candidate(module: nn.Module) -> bool:
    return (
        type(module) not in (nn.RMSNorm, nn.LayerNorm)  # one kernel as they are
        and "forward" not in module.__dict__  # such as accelerate's, which moves weights
        and not module._modules
        and not module._buffers
        and len(module._parameters) <= 1
    )


def _epsilons(module: nn.Module) -> list[str]:
    """Return the names of the attributes that may be a norm's epsilon."""
    return [
        name
        for name, value in vars(module).items()
        if type(value) is float and 0 < value <= LARGEST_EPSILON
    ]


def _agrees(norm: FusedNorm, dtype: torch.dtype) -> bool:
    """Whether both ways give the same rows in a dtype, for random weights."""
    module = copy.copy(norm.module)
    own = module._parameters.get(norm.weight)
    generator = torch.Generator().manual_seed(0)
    size = UNWEIGHTED_SIZE if own is None else len(own)
    if own is not None:
        random = torch.rand(size, generator=generator) + 0.5
        weight = own.detach().to(dtype, copy=True).copy_(random)
        module.__dict__["_parameters"] = {norm.weight: weight}
    # Also rows so small that it shows where the epsilon is added; their mean is not 0.
    smallest = vars(norm.module)[norm.epsilon] ** 0.5
    scales = torch.tensor([[30.0], [1.0], [smallest], [smallest / 4]])
    rows = (torch.randn(1, len(scales), size, generator=generator) + 0.5) * scales
    device = None if own is None else own.device
    rows = rows.to(device, dtype)
    try:
        expected = module(rows)
    except Exception:  # a module that takes other arguments may raise anything
        return False
    found = replace(norm, module=module)(rows)
    if not torch.is_tensor(expected) or (expected.shape, expected.dtype) != (rows.shape, dtype):
        return False
    steps = MOST_STEPS_EXACT if is_exact(dtype) else MOST_STEPS_HALF
    most = steps * torch.finfo(dtype).eps * expected.abs().amax(-1, keepdim=True).double()
    return bool(((found - expected).abs().double() <= most).all())
