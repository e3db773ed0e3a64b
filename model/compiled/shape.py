"""A function of tensors, compiled for one shape; repeated calls skip torch's guard checks.

A call of a function from `torch.compile` checks about a thousand guards on the model, which takes
as long as a small model's pass, and collects the weights through all modules, which takes a fifth
of that. Within a text neither changes. So one call in a text goes through torch; later calls run
the same code on the same inputs, except for the step's own arguments. If that one call finds code
and inputs as in the last text, those of other shapes are unchanged too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch


class RepeatedCall:
    """A repeatable call of compiled code, with new arguments each time.

    Args:
        code: the compiled code.
        inputs: inputs of the first call.
        places: for each argument among the inputs, its place there and its index.
        output: index of the result among the code's results; None if there is no result.
    """

    def __init__(
        self,
        code: Callable[..., Any],
        inputs: Sequence[Any],
        places: Mapping[int, int],
        output: int | None,
    ) -> None:
        self._code = code
        self._inputs = inputs
        self._places = places
        self._output = output

    def __call__(self, arguments: Sequence[object]) -> torch.Tensor | None:
        """Return the result for other arguments of the same shapes."""
        given = list(self._inputs)
        for place, index in self._places.items():
            given[place] = arguments[index]
        found = self._code(*given)
        return None if self._output is None else found[self._output]

    def is_like(self, other: RepeatedCall) -> bool:
        """Whether both calls have the same code and the same inputs, apart from the arguments."""
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
    """A function that is compiled at its first call.

    Args:
        function: takes arguments and constant objects, such as a cache's view; returns one tensor
            or None, and changes nothing but tensors.
        backend: backend of torch.compile.

    Attributes:
        seconds: spent on compilation.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor | None],
        backend: str,
    ) -> None:
        self._backend = backend
        self.seconds = 0.0
        self._compiled = torch.compile(
            copied(function),
            backend=self._compile,
            fullgraph=True,
        )
        # The last call's code, inputs and results.
        self._last: tuple[Callable[..., Any], tuple[Any, ...], Sequence[Any]] | None = None
        self._is_new = False  # whether the last call compiled

    def first(
        self, arguments: Sequence[object], *others: object
    ) -> tuple[torch.Tensor | None, RepeatedCall | None]:
        """Call the function through torch.

        Returns:
            Its result, and an `RepeatedCall` for further calls with arguments of the same shapes, valid
            while the model is unchanged; None if torch does more than run the code on the
            arguments.
        """
        self._last, self._is_new = None, False
        begin = time.perf_counter()
        result = self._through_torch(arguments, others)
        if self._is_new:
            self.seconds += time.perf_counter() - begin
            # The tracer is in a reference cycle that keeps its callers and all their objects alive.
            gc.collect()
        last, self._last = self._last, None
        return result, last and self._again(arguments, result, *last)

    def _again(
        self,
        arguments: Sequence[object],
        result: torch.Tensor | None,
        code: Callable[..., Any],
        inputs: Sequence[Any],
        results: Sequence[Any],
    ) -> RepeatedCall | None:
        """Return a callable that reruns the last call's code; None if that would not be the whole call."""
        # For each tensor argument, its place among the inputs.
        tensors = {index for index, value in enumerate(arguments) if torch.is_tensor(value)}
        index_of = {id(arguments[index]): index for index in tensors}
        places = {
            place: index_of[id(value)]
            for place, value in enumerate(inputs)
            if id(value) in index_of
        }
        outputs = [place for place, value in enumerate(results) if value is result]
        if len(places) != len(tensors) or set(places.values()) != tensors:
            return None  # an argument is unused, or used twice
        if result is not None and not outputs:
            return None
        output = None if result is None else outputs[0]
        return RepeatedCall(code, inputs, places, output)

    def _through_torch(
        self, arguments: Sequence[object], others: Sequence[object]
    ) -> torch.Tensor | None:
        result: torch.Tensor | None = self._compiled(*arguments, *others)
        return result

    def _compile(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """Compile a traced graph; torch calls this."""
        self._is_new = True
        if self._backend == "inductor":
            # Calling kernels from Python takes as long as the kernels of a small model.
            code = torch._inductor.compile(graph, examples, options={"cpp_wrapper": True})
        else:
            code = torch._dynamo.lookup_backend(self._backend)(graph, examples)

        def recorded(*inputs: Any) -> Any:
            results = code(*inputs)
            self._last = (code, inputs, results)
            return results

        return recorded


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with a code object of its own.

    Torch stores compiled shapes with the code object and tries them one by one at every call, which
    takes longer than a small model's pass.
    """
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
