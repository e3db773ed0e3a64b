"""Convolutions and recurrences over a draft tree, in place of those over a text.

A mixer of a known kind reads a whole tree in one call: its own code runs, but where it calls a
convolution or a recurrence over several tokens it calls these. The recurrences are those that
transformers' models compute for a single token, from each node's parent on, so that states are
plain decoding's up to rounding.

Shapes: N nodes in the order of the levels, n nodes of one depth, C channels, K inputs of a
convolution, H heads, G groups of heads, D and E head dimensions, S state size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .layers import State, StateLayer
from .tree import LevelTree

# Functions that modeling code calls, by name; the value is the method here that stands for it.
CONVOLUTION = "causal_conv1d_fn"
RECURRENCES = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space",
    "mamba_selective_scan": "selective_state_space",
}


class TreeScan:
    """What one mixer calls while it reads a tree.

    Args:
        tree: the tree.
        layer: the mixer's states before the tree.
    """

    def __init__(self, tree: LevelTree, layer: StateLayer) -> None:
        self._tree = tree
        self._before = layer.state()
        self._inputs: torch.Tensor | None = None  # of the convolution [1, C, K + N]
        self._states: list[torch.Tensor] = []  # after the nodes of each level [n, ...]

    def after(self, node: int) -> State:
        """Return the state after a node."""
        assert self._inputs is not None
        num_inputs = self._inputs.shape[-1] - self._tree.num_nodes
        columns = torch.tensor(self._tree.inputs_of(node, num_inputs), device=self._inputs.device)
        state = {**self._before, "conv_states": {0: self._inputs.index_select(-1, columns)}}
        if self._states:
            depth, place = self._tree.place_of(node)
            state["recurrent_states"] = {0: self._states[depth][place : place + 1].clone()}
        return state

    def convolution(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Convolve each node's path.

        Args:
            hidden_states: the K inputs before the tree and the nodes [1, C, K + N].
            weight: [C, K].
            bias: [C].
            activation: name of the function after it.

        Returns:
            [1, C, N].
        """
        self._inputs = hidden_states
        num_channels, num_inputs = weight.shape
        columns = self._tree.inputs(num_inputs).to(hidden_states.device)  # [N, K]
        inputs = hidden_states[0].index_select(1, columns.flatten())
        # In float32, as convolutions add up half precision.
        out = (inputs.view(num_channels, -1, num_inputs).float() * weight[:, None].float()).sum(-1)
        if bias is not None:
            out = out + bias[:, None]
        out = out.to(weight.dtype)
        if activation is not None:
            out = ACT2FN[activation](out)
        return out[None].to(hidden_states.dtype)

    def delta_rule(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gated delta rule (Yang et al. 2024, arXiv 2412.06464), or Kimi's, whose decay is of
        each channel (Kimi Team 2025, arXiv 2510.26692).

        Args:
            query: [1, N, G, D].
            key: [1, N, G, D].
            value: [1, N, H, E].
            g: log of the decay [1, N, H] or [1, N, H, D].
            beta: [1, N, H].
            use_qk_l2norm_in_kernel: whether queries and keys get length 1.

        Returns:
            [1, N, H, E], and some state in place of the last.
        """
        dtype = value.dtype
        query, key, value, decay, beta = (
            part[0].float() for part in (query, key, value, g.float().exp(), beta)
        )
        if use_qk_l2norm_in_kernel:
            query, key = (
                part * (part.square().sum(-1, True) + 1e-6).rsqrt() for part in (query, key)
            )
        query = query * query.shape[-1] ** -0.5
        if (repeats := value.shape[1] // key.shape[1]) > 1:
            query, key = (part.repeat_interleave(repeats, 1) for part in (query, key))
        rows = self._by_level(
            query[:, :, None],
            key[:, :, None],
            value[:, :, None],
            decay[..., None] if decay.ndim == 3 else decay[..., None, None],
            beta[..., None, None],
        )
        states, outputs = [self._first_state().float()], []
        for level, (queries, keys, values, decays, betas) in zip(
            self._tree.levels, rows, strict=True
        ):
            state = _parents(states[-1], level.parents) * decays  # [n, H, D, E]
            change = (values - keys @ state) * betas  # [n, H, 1, E]
            state = torch.addcmul(state, keys.mT, change)
            outputs.append(queries @ state)
            states.append(state)
        self._keep(states[1:])
        return torch.cat(outputs)[None, :, :, 0].to(dtype), states[-1]

    def state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """Compute Mamba 2's recurrence (Dao and Gu 2024, arXiv 2405.21060).

        Args:
            hidden_states: [1, N, H, D].
            dt: time steps [1, N, H]; not limited, as those of single tokens are not.
            A: [H].
            B: [1, N, G, S].
            C: [1, N, G, S].
            D: [H].
            dt_bias: [H].
            dt_softplus: whether time steps go through a softplus.
            return_final_states: whether a last state is expected.

        Returns:
            [1, N, H, D], with some state in place of the last.
        """
        inputs, dt, B, C = hidden_states[0], dt[0], B[0], C[0]
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = functional.softplus(dt)
        if (repeats := inputs.shape[1] // B.shape[1]) > 1:
            B, C = (part.repeat_interleave(repeats, 1) for part in (B, C))
        decay = (dt.float() * A.float()).exp()[..., None, None]
        update = (dt[..., None] * B)[:, :, None] * inputs[..., None]  # [N, H, D, S]
        states = self._diagonal(decay, update)
        out = (states.to(C.dtype) @ C[..., None])[..., 0]
        if D is not None:
            out = out + inputs * D[:, None]
        out = out[None].to(hidden_states.dtype)
        return (out, states) if return_final_states else out

    def selective_state_space(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """Compute Mamba's recurrence (Gu and Dao 2023, arXiv 2312.00752).

        Args:
            hidden_states: [1, C, N].
            dt: time steps [1, C, N].
            A: [C, S].
            B: [1, S, N].
            C: [1, S, N].
            D: [C].
            z: of the gate [1, C, N].
            delta_bias: [C].
            delta_softplus: whether time steps go through a softplus.
            return_last_state: whether a last state is expected.

        Returns:
            [1, C, N], with some state in place of the last.
        """
        inputs, dt, B, C = (part[0].mT for part in (hidden_states, dt, B, C))  # [N, ...]
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)
        if delta_softplus:
            dt = functional.softplus(dt)
        dt = dt.float()[..., None]
        decay = (dt * A.float()).exp()  # [N, C, S]
        states = self._diagonal(decay, dt * B.float()[:, None] * inputs.float()[..., None])
        out = (states.to(C.dtype) @ C[..., None])[..., 0]
        if D is not None:
            out = out + inputs * D
        if z is not None:
            out = out * functional.silu(z[0].mT)
        out = out.mT[None].to(hidden_states.dtype)
        return (out, states) if return_last_state else out

    def _diagonal(self, decay: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Return the states decay x parent's state + update after all nodes [N, ...]."""
        states = [self._first_state()]
        for level, (decays, updates) in zip(
            self._tree.levels, self._by_level(decay, update), strict=True
        ):
            state = torch.addcmul(updates, _parents(states[-1], level.parents), decays)
            states.append(state.to(states[-1].dtype))
        self._keep(states[1:])
        return torch.cat(states[1:])

    def _by_level(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return these tensors [N, ...] cut into levels [n, ...]."""
        sizes = [level.end - level.begin for level in self._tree.levels]
        return list(zip(*(tensor.split(sizes) for tensor in tensors), strict=True))

    def _first_state(self) -> torch.Tensor:
        """Return the state before the tree [1, ...]."""
        state: torch.Tensor = self._before["recurrent_states"][0]
        return state

    def _keep(self, states: Sequence[torch.Tensor]) -> None:
        """Keep the states after the nodes of each level.

        Raises:
            RuntimeError: if the mixer has more than one recurrence.
        """
        if self._states:
            raise RuntimeError("the mixer calls its recurrence more than once")
        self._states = list(states)


def _parents(states: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Return the states [n, ...] of the parents, of those of the level above."""
    return states.index_select(0, parents.to(states.device))


def scannable(mixer: nn.Module) -> str | None:
    """Return the name of the recurrence that a mixer calls, "" if it has a convolution alone; None if
    it cannot read a tree in one call.
    """
    code = getattr(unwrap(type(mixer).forward), "__code__", None)
    is_own = "forward" not in vars(mixer) and not hasattr(mixer, "_hf_hook")
    if code is None or not is_own or CONVOLUTION not in code.co_names:
        return None
    found = [name for name in RECURRENCES if name in code.co_names]
    has_recurrence = "update_recurrent_state" in code.co_names
    if len(found) != has_recurrence:
        return None
    return found[0] if found else ""


def scanning_forward(mixer: nn.Module, recurrence: str, scan: TreeScan) -> Callable[..., Any]:
    """Return a mixer's forward that calls a scan's functions; the modeling code is shared and stays as it is."""
    function = unwrap(type(mixer).forward)
    names = {**function.__globals__, CONVOLUTION: scan.convolution}
    if recurrence:
        names[recurrence] = getattr(scan, RECURRENCES[recurrence])
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, mixer)
