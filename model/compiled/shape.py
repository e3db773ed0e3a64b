"""A function of tensors, compiled for one shape, and called again without asking anything twice.

A call of what `torch.compile` returns looks up a thousand things about the model, which takes as long as
a small model's pass, and collects its weights one by one through all its modules, which takes
a fifth. Within a text neither changes. So a call in a text goes through torch, and others give the same
code the same inputs but for the step's own. If that call has found code and inputs as they were in the last
text, so are those of other shapes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch


class Again:
    """A call of compiled code, made again with other arguments.

    Args:
        code: what is called.
        inputs: of the call.
        places: of arguments among the inputs, and which arguments they are.
        output: place of the result among the code's results; None if there is none.
        has_graphs: whether the code is replayed as a CUDA graph.
    """

    def __init__(
        self,
        code: Callable[..., Any],
        inputs: Sequence[Any],
        places: Mapping[int, int],
        output: int | None,
        has_graphs: bool,
    ) -> None:
        self._code = code
        self._inputs = inputs
        self._places = places
        self._output = output
        self._has_graphs = has_graphs

    def __call__(self, arguments: Sequence[object]) -> torch.Tensor | None:
        """Return the result of a call with other arguments of the same shapes."""
        _begin(self._has_graphs)
        given = list(self._inputs)
        for place, index in self._places.items():
            given[place] = arguments[index]
        found = self._code(*given)
        return None if self._output is None else _own(found[self._output], self._has_graphs)

    def is_like(self, other: Again) -> bool:
        """Whether another call gives the same code the same inputs, but for the step's own."""
        return (
            (self._code, self._places, self._output) == (other._code, other._places, other._output)
            and len(self._inputs) == len(other._inputs)
            and all(
                place in self._places or mine is theirs or (type(mine) is int and mine == theirs)
                for place, (mine, theirs) in enumerate(
                    zip(self._inputs, other._inputs, strict=True)
                )
            )
        )


class CompiledShape:
    """A function, compiled when it is first called.

    Args:
        function: of arguments and things that stay, such as a cache's view; returns one tensor, or None, and
            changes nothing but tensors.
        backend: torch.compile's.
        has_dynamic_lengths: whether dimensions may be symbols; those that are marked dynamic always are.
        has_graphs: whether the code is replayed as a CUDA graph.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor | None],
        backend: str,
        has_dynamic_lengths: bool,
        has_graphs: bool,
    ) -> None:
        self._backend = backend
        self._has_graphs = has_graphs
        self._compiled = torch.compile(
            _copied(function),
            backend=self._compile,
            dynamic=None if has_dynamic_lengths else False,
            fullgraph=True,
        )
        # The last call's code, inputs and results.
        self._last: tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]] | None = None
        self._is_new = False  # whether the last call compiled

    def first(
        self, arguments: Sequence[object], *others: object
    ) -> tuple[torch.Tensor | None, Again | None]:
        """Call the function through torch.

        Returns:
            Its result, and what calls it again with other arguments of the same shapes and the same
            others, as long as the model stays as it is; None where torch does more than to run the code
            on the arguments.
        """
        self._last, self._is_new = None, False
        result = self._through_torch(arguments, others)
        if self._is_new:
            # What traced the function refers to itself and to its callers, with all that they hold.
            gc.collect()
        last, self._last = self._last, None
        return _own(result, self._has_graphs), last and self._again(arguments, result, *last)

    def _again(
        self,
        arguments: Sequence[object],
        result: torch.Tensor | None,
        code: Callable[..., Any],
        inputs: Sequence[Any],
        results: Sequence[Any],
    ) -> Again | None:
        """Return what calls the code of the last call again, None where that is not all there is to do."""
        # Of each tensor among the arguments, where it is among the inputs.
        tensors = {index for index, value in enumerate(arguments) if torch.is_tensor(value)}
        index_of = {id(arguments[index]): index for index in tensors}
        places = {
            place: index_of[id(value)]
            for place, value in enumerate(inputs)
            if id(value) in index_of
        }
        outputs = [place for place, value in enumerate(results) if value is result]
        if len(places) != len(tensors) or set(places.values()) != tensors:
            return None  # one that is not used, or used twice
        if result is not None and not outputs:
            return None
        output = None if result is None else outputs[0]
        return Again(code, inputs, places, output, self._has_graphs)

    def _through_torch(
        self, arguments: Sequence[object], others: Sequence[object]
    ) -> torch.Tensor | None:
        _begin(self._has_graphs)
        result: torch.Tensor | None = self._compiled(*arguments, *others)
        return result

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Compile for torch, which calls this when it has traced the function."""
        self._is_new = True
        if self._backend == "inductor":
            # Without graphs, calling kernels from Python takes as long as a small model's kernels.
            option = "triton.cudagraphs" if self._has_graphs else "cpp_wrapper"
            code = torch._inductor.compile(graph, examples, options={option: True})
        else:
            code = torch._dynamo.lookup_backend(self._backend)(graph, examples)

        def recorded(*inputs: Any) -> Any:
            results = code(*inputs)
            self._last = (code, inputs, results)
            return results

        return recorded


def _begin(has_graphs: bool) -> None:
    if has_graphs:
        torch.compiler.cudagraph_mark_step_begin()


def _own(result: torch.Tensor | None, has_graphs: bool) -> torch.Tensor | None:
    """Return a result that stays: the next replay writes over the graph's own output."""
    return result.clone() if has_graphs and result is not None else result


def _copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function as another: torch keeps what it compiled with a function's code, and
    tries one shape after the other at every call, which takes longer than a small model's pass.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
