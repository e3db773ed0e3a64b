"""The library: a method on a loaded model, with `generate` and `stream`.

`model.api.base_decoder` generates the texts.

    from model import TokenRecycling

    decoder = TokenRecycling.from_pretrained("data/demo/model")
    print(decoder.generate("USER: Who are you? ASSISTANT:").text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel

from ..compiled.graphs import graphed
from ..engine.self_test import prove
from ..engine.target import TargetModel
from ..methods import MethodName, drafter_class
from ..options import chosen, unknown_name
from .base_decoder import BaseDecoder
from .defaults import Choice, default_choice, paying_options
from .loading import base_of, check_tokenizer, load
from .saved_memory import read_memory, save_memory

Decoder = TypeVar("Decoder", bound="SpeculativeDecoder")


class SpeculativeDecoder(BaseDecoder):
    """A method on a loaded model.

    There is one memory and one cache, so texts wait for each other, whatever threads they come from
    (`model.api.turns`). `session` makes a decoder for another text at the same time.

    Args:
        model: a loaded causal LM on its device(s), in eval mode, also with peft's LoRA adapters or
            compiled. Or a target that passed `model.engine.self_test`. A model is tested once. On one
            GPU its passes are replayed as CUDA graphs; `TargetModel(model)` launches each kernel by itself.
        tokenizer: its tokenizer; None if prompts are token ids and no text is wanted.
        method: a method's name, or "package.module:DrafterClass"; None: what pays on the model's device
            (`model.api.defaults`).
        options: the method's options. Of recycling:
            `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
            those of all others are listed in docs/methods.md, and are the fields of `decoder.drafter.config`.

    Attributes:
        target: the checked model.
        drafter: the method, with its memory.

    Raises:
        ValueError: for an unknown method or option, or a value that is not allowed.
        UnsupportedModelError: if drafts cannot be verified exactly with this model.
    """

    # The method where none is named; None: what pays on the device.
    own_method: ClassVar[str | None] = None

    def __init__(
        self,
        model: PreTrainedModel | TargetModel,
        tokenizer: Any = None,
        method: MethodName | str | None = None,
        **options: Any,
    ) -> None:
        base = model if isinstance(model, TargetModel) else base_of(model)
        check_tokenizer(tokenizer)
        method, options, _ = self._choice(method, options, base)
        config = _config_of(method, options)
        if isinstance(base, TargetModel):
            target = base
        else:
            target = graphed(base)
            prove(target)
        drafter = drafter_class(method)(config, target.vocab_size, target.device)
        drafter.check_target(target)
        super().__init__(target, drafter, tokenizer)
        self.method = method

    @classmethod
    def from_pretrained(
        cls: type[Decoder],
        path: str | Path,
        method: MethodName | str | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        weights: str = "auto",
        **options: Any,
    ) -> Decoder:
        """Load a model and its tokenizer.

        Args:
            path: folder, GGUF file or hub name of a causal LM.
            method: as for the decoder.
            dtype: "auto" is the checkpoint's own. In float32 texts equal those of plain decoding exactly.
            device_map: where to put the weights (needs accelerate); None is the CPU.
            weights: of a GGUF file: "native" keeps them in their bits, "dequantised" unpacks them; "auto" is native
                on the CPU, for the types that the kernel knows.
            options: the method's options. Of recycling:
                `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`;
                those of all others are listed in docs/methods.md. All else, such as `revision`, goes to
                transformers' `from_pretrained`.

        Raises:
            ValueError: for an argument that neither takes, or a value that is not allowed; before weights load.
            UnsupportedModelError: if drafts cannot be verified exactly with this model.
            OSError: if there is no such model.
        """
        named = method or cls.own_method
        names = _option_names(named) if named else []
        of_method = {name: value for name, value in options.items() if name in names}
        of_model = {name: value for name, value in options.items() if name not in names}
        if named:
            _config_of(named, of_method)  # before the weights load
        model, tokenizer = load(path, dtype, device_map, of_model, names, weights)
        return cls(model, tokenizer, method, **of_method)

    @classmethod
    def _choice(
        cls, method: str | None, options: dict[str, Any], model: PreTrainedModel | TargetModel
    ) -> Choice:
        """Return the method and its options, those that pay on the device where none is named."""
        if method is not None:
            return Choice(method, options)
        if cls.own_method is not None:
            return Choice(cls.own_method, paying_options(cls.own_method, options, model.device))
        if options:
            raise ValueError(
                f"options: got {', '.join(options)} without a method; name the method that has "
                'them, such as method="recycling"'
            )
        return default_choice(model.device)

    def __repr__(self) -> str:
        """Return the model, the method with the options that are not its defaults, device and dtype."""
        model, config = self.target.model, self.drafter.config
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        options = "".join(f", {key}={value!r}" for key, value in chosen(config).items())
        where = f"device='{self.target.device}', dtype={self.target.dtype}"
        return f"{type(self).__name__}({name!r}, method={self.method!r}{options}, {where})"

    def session(self: Decoder) -> Decoder:
        """Return a decoder for another text at the same time, in milliseconds.

        It has the same model and weights, a cache of its own, and a copy of what was learned so far, from
        where it learns by itself. Steps of several sessions take turns.
        """
        config = self.drafter.config
        options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        twin = type(self)(self.target, self.tokenizer, self.method, **options)
        with self._turns.step:
            memory = self.drafter.memory()
        if memory:
            twin.drafter.load_memory(memory)
        return twin

    def __copy__(self: Decoder) -> Decoder:
        """Return a `session`. So is a deep copy: weights are not copied."""
        return self.session()

    def __deepcopy__(self: Decoder, memo: dict[int, Any]) -> Decoder:
        return self.session()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "decoder: cannot be pickled, since its kernels belong to this process; allowed: "
            "save_matrix here, and load_matrix in a new decoder there"
        )

    def save_matrix(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file.

        Raises:
            ValueError: if the method keeps nothing across prompts.
        """
        with self._turns.step:
            save_memory(self.drafter, Path(path), self.tokenizer)

    def load_matrix(self, path: str | Path) -> None:
        """Load what `save_matrix` wrote.

        Raises:
            ValueError: if it was learned with another tokenizer, or does not fit this method and its options.
        """
        with self._turns.step:
            self.drafter.load_memory(read_memory(path, self.tokenizer))


class TokenRecycling(SpeculativeDecoder):
    """Token Recycling on a loaded model; arguments as `SpeculativeDecoder`.

    Its options, with the method's defaults:
    `output_id_topk=8, tree_version="2.2.2", start="hot", policy="average", harvest_prompt=None`

    - output_id_topk: successors kept for each token (k).
    - tree_version: "2.2.2", the paper's tree; a JSON file of rank paths; or "auto": each step the tree that
      pays most on the device. On a CPU "auto" is taken where none is given.
    - start: "hot" keeps what was learned from prompt to prompt; "cold" clears it before each.
    - policy: how rows are written: "average", "accepted-last", "accepted-only" or "original".
    - harvest_prompt: whether rows are made of the prompt's logits too; None: where that pays.

    Another method is named by `method=`; the options of all others are listed in docs/methods.md.
    """

    own_method = "recycling"


def _option_names(method: str) -> list[str]:
    return [field.name for field in dataclasses.fields(drafter_class(method).config_class)]


def _config_of(method: str, options: Mapping[str, Any]) -> Any:
    names = _option_names(method)
    for name in options:
        if name not in names:
            raise ValueError(unknown_name(f"option of {method}", name, names or ["none"]))
    return drafter_class(method).config_class(**options)
