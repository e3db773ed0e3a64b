"""Convolutions and recurrences over a draft tree, in place of those over a sequence.

A mixer of a known kind reads a whole tree in one call: its own code runs, but where it calls a
convolution or a recurrence over several tokens it calls these. The recurrences are those that
transformers' models compute for a single token, from each node's parent on, so that states are
plain decoding's up to rounding.

Shapes: N nodes in the order of the levels, n nodes of one depth, C channels, K inputs of a
convolution, H heads, G groups of heads, D and E head dimensions, S state size.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from ...engine.levels import LevelTree
from .layers import State, StateLayer

# Functions that modeling code calls, by name; the value is the method here that stands for it.
CONVOLUTION = "causal_conv1d_fn"
RECURRENCES = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space",
    "mamba_selective_scan": "selective_state_space",
}


# Gives the states after nodes [n, ...] from their parents' and the nodes' factors.
Step = Callable[..., torch.Tensor]


class TreeScan:
    """The functions that one mixer calls while it reads a tree, and the states that they leave.

    Args:
        tree: the tree.
        layer: the mixer's states before the tree.
        keeps_states: whether the states after all nodes are kept; else the one that is asked for is
            computed again, along its path.
    """

    def __init__(self, tree: LevelTree, layer: StateLayer, keeps_states: bool) -> None:
        self._tree = tree
        self._before = layer.state()
        self._keeps_states = keeps_states
        self._inputs: torch.Tensor | None = None  # of the convolution [1, C, K + N]
        self._step: Step | None = None  # of the recurrence, and its factors [N, ...]
        self._factors: tuple[torch.Tensor, ...] = ()
        self._states: list[torch.Tensor] = []  # after the nodes of each level [n, ...]

    def after(self, node: int) -> State:
        assert self._inputs is not None
        num_inputs = self._inputs.shape[-1] - self._tree.num_nodes
        columns = torch.tensor(self._tree.inputs_of(node, num_inputs), device=self._inputs.device)
        state = {**self._before, "conv_states": {0: self._inputs.index_select(-1, columns)}}
        if self._step is not None:
            state["recurrent_states"] = {0: self._recurrent_state(node)}
        return state

    def _recurrent_state(self, node: int) -> torch.Tensor:
        if self._states:
            depth, place = self._tree.place_of(node)
            return self._states[depth][place : place + 1].clone()
        assert self._step is not None
        state = self._first_state()
        for place in self._tree.path_to(node):
            state = self._step(state, *(part[place : place + 1] for part in self._factors))
        return state

    def convolution(
        self,
        hidden_states: torch.Tensor,  # the K inputs before the tree and the nodes [1, C, K + N]
        weight: torch.Tensor,  # [C, K]
        bias: torch.Tensor | None = None,  # [C]
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Convolve each node's path; return [1, C, N]."""
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
        query: torch.Tensor,  # [1, N, G, D]
        key: torch.Tensor,  # [1, N, G, D]
        value: torch.Tensor,  # [1, N, H, E]
        g: torch.Tensor,  # log of the decay [1, N, H] or [1, N, H, D]
        beta: torch.Tensor,  # [1, N, H]
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gated delta rule (Yang et al. 2024, arXiv 2412.06464), or Kimi's, whose decay is of
        each channel (Kimi Team 2025, arXiv 2510.26692).

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
        factors = (
            decay[..., None] if decay.ndim == 3 else decay[..., None, None],
            key[:, :, None],
            value[:, :, None],
            beta[..., None, None],
        )
        out = self._scan(
            _delta_step, factors, lambda state, query: query @ state, query[:, :, None]
        )
        return out[None, :, :, 0].to(dtype), out

    def state_space(
        self,
        hidden_states: torch.Tensor,  # [1, N, H, D]
        dt: torch.Tensor,  # time steps [1, N, H]; not limited, as those of single tokens are not
        A: torch.Tensor,  # [H]
        B: torch.Tensor,  # [1, N, G, S]
        C: torch.Tensor,  # [1, N, G, S]
        D: torch.Tensor | None = None,  # [H]
        dt_bias: torch.Tensor | None = None,  # [H]
        dt_softplus: bool = False,
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """Compute Mamba 2's recurrence (Dao and Gu 2024, arXiv 2405.21060).

        Returns:
            [1, N, H, D], with some state in place of the last if one is expected.
        """
        inputs, dt, B, C = hidden_states[0], dt[0], B[0], C[0]
        dt = _time_steps(dt, dt_bias, dt_softplus)
        if (repeats := inputs.shape[1] // B.shape[1]) > 1:
            B, C = (part.repeat_interleave(repeats, 1) for part in (B, C))
        decay = (dt.float() * A.float()).exp()[..., None, None]
        factors = (decay, (dt[..., None] * B)[:, :, None], inputs[..., None])
        out = self._scan(_diagonal_step, factors, _read, C[..., None])[..., 0]
        if D is not None:
            out = out + inputs * D[:, None]
        out = out[None].to(hidden_states.dtype)
        return (out, out) if return_final_states else out

    def selective_state_space(
        self,
        hidden_states: torch.Tensor,  # [1, C, N]
        dt: torch.Tensor,  # time steps [1, C, N]
        A: torch.Tensor,  # [C, S]
        B: torch.Tensor,  # [1, S, N]
        C: torch.Tensor,  # [1, S, N]
        D: torch.Tensor | None = None,  # [C]
        z: torch.Tensor | None = None,  # of the gate [1, C, N]
        delta_bias: torch.Tensor | None = None,  # [C]
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_: Any,
    ) -> Any:
        """Compute Mamba's recurrence (Gu and Dao 2023, arXiv 2312.00752).

        Returns:
            [1, C, N], with some state in place of the last if one is expected.
        """
        inputs, dt, B, C = (part[0].mT for part in (hidden_states, dt, B, C))  # [N, ...]
        dt = _time_steps(dt, delta_bias, delta_softplus).float()[..., None]
        decay = (dt * A.float()).exp()  # [N, C, S]
        factors = (decay, dt * B.float()[:, None], inputs.float()[..., None])
        out = self._scan(_diagonal_step, factors, _read, C[..., None])[..., 0]
        if D is not None:
            out = out + inputs * D
        if z is not None:
            out = out * functional.silu(z[0].mT)
        out = out.mT[None].to(hidden_states.dtype)
        return (out, out) if return_last_state else out

    def _scan(
        self,
        step: Step,
        factors: tuple[torch.Tensor, ...],  # of each node [N, ...]
        read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],  # of states and queries
        queries: torch.Tensor,  # of each node [N, ...]
    ) -> torch.Tensor:
        """Run a recurrence over the tree, level by level; return what is read of every node's state [N, ...].

        Raises:
            RuntimeError: if the mixer has more than one recurrence.
        """
        if self._step is not None:
            raise RuntimeError("the mixer calls its recurrence more than once")
        self._step, self._factors = step, factors
        sizes = [level.end - level.begin for level in self._tree.levels]
        rows = zip(*(part.split(sizes) for part in (queries, *factors)), strict=True)
        state, outputs = self._first_state(), []
        for level, (query, *parts) in zip(self._tree.levels, rows, strict=True):
            parents = state.index_select(0, level.parents.to(state.device))
            state = step(parents, *parts)
            outputs.append(read(state, query))
            if self._keeps_states:
                self._states.append(state)
        return torch.cat(outputs)

    def _first_state(self) -> torch.Tensor:
        state: torch.Tensor = self._before["recurrent_states"][0]  # [1, ...]
        return state


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, has_softplus: bool) -> torch.Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return functional.softplus(dt) if has_softplus else dt


def _delta_step(
    state: torch.Tensor,  # [n, H, D, E]
    decay: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    state = state.float() * decay
    change = (value - key @ state) * beta  # [n, H, 1, E]
    return torch.addcmul(state, key.mT, change)


def _diagonal_step(
    state: torch.Tensor, decay: torch.Tensor, inputs: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return states [n, ..., S] of Mamba's recurrences after one token each."""
    return torch.addcmul(inputs * values, state, decay).to(state.dtype)


def _read(state: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return state.to(query.dtype) @ query  # [n, ..., S] @ [n, ..., S, 1]


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


class ScanningForward:
    """A mixer's forward that calls a scan's functions; the modeling code is shared and stays as it is.

    Args:
        mixer: the mixer.
        recurrence: as from `scannable`.
    """

    def __init__(self, mixer: nn.Module, recurrence: str) -> None:
        function = unwrap(type(mixer).forward)
        self._recurrence = recurrence
        self._names = dict(function.__globals__)
        copy = FunctionType(
            function.__code__,
            self._names,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        self._forward = MethodType(copy, mixer)

    def calling(self, scan: TreeScan) -> Callable[..., Any]:
        """Return the forward, which calls this scan until the next call."""
        self._names[CONVOLUTION] = scan.convolution
        if self._recurrence:
            self._names[self._recurrence] = getattr(scan, RECURRENCES[self._recurrence])
        return self._forward

    def release(self) -> None:
        """Forget the scan, and with it the states that it keeps."""
        self._names.pop(CONVOLUTION, None)
        self._names.pop(self._recurrence, None)
