"""The library: a method on a loaded model, which makes texts whole, in pieces, or many at a time.

It wraps the loop (`model.engine.loop`) and its batches, takes and returns text, and keeps two things from prompt to
prompt: the method's memory and the KV cache of the last text.

    from model import SpeculativeDecoder

    decoder = SpeculativeDecoder.from_pretrained("data/demo/model")
    print(decoder.generate("USER: Who are you? ASSISTANT:").text)

Shapes: P tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar, overload

import torch
from transformers import PreTrainedModel

from ..backends.graphs.graphed_target import graphed
from ..backends.proofs.self_test import prove
from ..backends.proofs.support import eos_ids_of
from ..backends.target import TargetModel
from ..budget import memory
from ..engine.sequence import Request
from ..engine.step import StepRecord
from ..methods import CustomMethod, MethodName, drafter_class
from ..options import chosen
from .answers import answers_of, check_prompts
from .defaults import choice_of, config_of, named_method, option_names
from .generate_arguments import refuse_foreign, warn_of_settings
from .loading.models import base_of, check_tokenizer, load
from .output import GenerateOutput, StreamPiece
from .permits import SequenceQueue
from .prompts import Prompt
from .text_options import ManyTexts, OneText, TextOptions, Texts, shows
from .texts import Text

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of Python 3.11

Decoder = TypeVar("Decoder", bound="SpeculativeDecoder")


class SpeculativeDecoder:
    """A method on a loaded model.

    There is one memory and one cache, so texts wait for each other, whatever threads they come from
    (`model.api.permits`). `session` makes a decoder for another text at the same time.

    Args:
        model: a loaded causal LM on its device(s), in eval mode, also with peft's LoRA adapters or
            compiled. Or a target that passed `model.backends.proofs.self_test`. A model is tested once. On one
            GPU its passes are replayed as CUDA graphs; `TargetModel(model)` launches each kernel by itself.
        tokenizer: its tokenizer; None if prompts are token ids and no text is wanted.
        method: a method's name, or `CustomMethod("package.module:DrafterClass")`; None: what pays on the model's
            device (`model.api.defaults`).
        options: the method's options. Of recycling:
            `output_id_topk=8, tree_version="2.2.2", start="hot", policy=None, harvest_prompt=None`;
            those of all others are listed in docs/methods.md, and are the fields of `decoder.drafter.config`.

    Attributes:
        target: the checked model.
        drafter: the method, with its memory.
        texts: decodes token ids.

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
        method: MethodName | CustomMethod | None = None,
        **options: Any,
    ) -> None:
        base = model if isinstance(model, TargetModel) else base_of(model)
        check_tokenizer(tokenizer)
        name, options, _ = choice_of(method, self.own_method, options, base.device)
        config = config_of(name, options)
        if isinstance(base, TargetModel):
            target = base
        else:
            target = graphed(base)
            prove(target)
        drafter = drafter_class(name)(config, target.vocab_size, target.device)
        drafter.check_target(target)
        self.target, self.drafter, self.tokenizer, self.method = target, drafter, tokenizer, name
        self.queue = SequenceQueue(target, drafter)
        self._has_warned = False

    @classmethod
    def from_pretrained(
        cls: type[Decoder],
        path: str | Path,
        method: MethodName | CustomMethod | None = None,
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
            weights: of a GGUF file: "native" keeps them in their bits, "native-int8" also rounds activations to 8
                bits and multiplies in whole numbers, "dequantised" unpacks them; "auto" is native on the CPU, for
                the types that the kernel knows.
            options: the method's options. Of recycling:
                `output_id_topk=8, tree_version="2.2.2", start="hot", policy=None, harvest_prompt=None`;
                those of all others are listed in docs/methods.md. All else, such as `revision`, goes to
                transformers' `from_pretrained`.

        Raises:
            ValueError: for an argument that neither takes, or a value that is not allowed; before weights load.
            UnsupportedModelError: if drafts cannot be verified exactly with this model.
            OSError: if there is no such model.
        """
        named = named_method(method, cls.own_method)
        names = option_names(named) if named else []
        of_method = {name: value for name, value in options.items() if name in names}
        of_model = {name: value for name, value in options.items() if name not in names}
        if named:
            config_of(named, of_method)  # before the weights load
        model, tokenizer = load(path, dtype, device_map, of_model, names, weights)
        return cls(model, tokenizer, method, **of_method)

    def __repr__(self) -> str:
        """Return the model, the method with the options that are not its defaults, device and dtype."""
        model, config = self.target.model, self.drafter.config
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        options = "".join(f", {key}={value!r}" for key, value in chosen(config).items())
        where = f"device='{self.target.device}', dtype={self.target.dtype}"
        return f"{type(self).__name__}({name!r}, method={self.method!r}{options}, {where})"

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token ids that end a text: the generation config's, and the tokenizer's."""
        return eos_ids_of(self.target.model, self.tokenizer)

    @shows(TextOptions)
    def generate(self, prompt: Prompt = (), **arguments: Unpack[OneText]) -> GenerateOutput:
        """Answer a prompt.

        The prompt is text; chat messages, for the tokenizer's template; token ids as a sequence, or a tensor or
        numpy array [P] or [1, P]; or a tokenizer's output (`input_ids` and `attention_mask`). An empty text is the
        token with which the tokenizer begins every text.

        Raises:
            TypeError: for an argument that there is not, which says what does it here.
            ValueError: if a value is not allowed, or the prompt leaves no room in the context.
        """
        text = self._text(self.generate, prompt, arguments)
        return text.output(list(self.queue.steps_of(text.request)), self.target.device)

    @shows(TextOptions)
    def stream(
        self, prompt: Prompt = (), **arguments: Unpack[OneText]
    ) -> Generator[StreamPiece, None, None]:
        """Return the answer to a prompt step by step; arguments, checked at once, and errors as `generate`.

        No piece ends inside a character, or shows what may begin a stop string. Leaving the iteration, or its
        `close()`, ends the answer; the cache still serves the next prompt.
        """
        text = self._text(self.stream, prompt, arguments)
        return text.pieces(self.queue.steps_of(text.request))

    @shows(TextOptions)
    async def astream(
        self, prompt: Prompt = (), **arguments: Unpack[OneText]
    ) -> AsyncGenerator[StreamPiece, None]:
        """Yield the answer as `stream`, from a thread of its own: the event loop goes on meanwhile.

        Leaving the iteration, or cancelling its task, ends the answer after the step under way.
        """
        worker = ThreadPoolExecutor(1, thread_name_prefix="astream")
        in_thread = partial(asyncio.get_running_loop().run_in_executor, worker)
        pieces: Generator[StreamPiece, None, None] | None = None
        try:
            pieces = await in_thread(partial(self.stream, prompt, **arguments))
            while (piece := await in_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            if pieces is not None:
                worker.submit(pieces.close)
            worker.shutdown(wait=False)

    @overload
    def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        return_exceptions: Literal[False] = False,
        **arguments: Unpack[ManyTexts],
    ) -> Generator[tuple[int, GenerateOutput], None, None]: ...

    @overload
    def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        return_exceptions: Literal[True],
        **arguments: Unpack[ManyTexts],
    ) -> Generator[tuple[int, GenerateOutput | Exception], None, None]: ...

    @shows(answers_of)
    def as_completed(
        self, prompts: Iterable[Prompt], **arguments: Any
    ) -> Generator[tuple[int, Any], None, None]:
        """Return the answers to many prompts, each with its prompt's index, as they finish.

        Each text is the one of `generate`, whatever the others are; with seeds too. Arguments are checked at once.
        The first step waits for the decoder's text under way, and other texts wait while some of these are under
        way. The KV cache of the last text is neither used nor changed.

        - prompts: any iterable. Of what has a length, such as a list, every prompt is checked before the first
          token. Any other may be endless: one is read when there is room for its text, and after the answers that
          have made room were taken.
        - max_new_tokens: limit, of all texts or of each prompt's.
        - n: texts of each prompt, which are drawn; those of prompt i have the indices n x i, n x i + 1, ...
        - batch_size: most texts under way. A model whose texts cannot share passes decodes them in turn.
        - shares_memory: whether the method learns from all texts for all, and keeps it. Else each text begins
          with a copy of what is known, and learns for itself. With a cold start each begins with nothing.
        - return_exceptions: whether the error of a text (its prompt cannot be used, a processor failed) stands in
          the place of its answer, and the others go on. Else it is raised, which ends the iteration, as in
          `Executor.map`: answers that came before are yours, texts under way are given up.
        - show_progress: whether a progress bar is written to standard error.

        The seed is the first text's; each next one has the next seed. None uses torch's global generator, in an
        order that depends on the batch. `max_time` counts from the begin of each text. `cancel` also ends the
        reading of prompts. Processors see one text at a time, [1, P]; none may keep the state of a text.

        Raises:
            TypeError: for an argument that there is not.
            ValueError: for a value that is not allowed, at once; "prompt 3: ..." for one that cannot be used: of a
                list at once, else in its turn.
            RuntimeError: at a step, if another text has the permit (`model.api.permits`).
            Exception: what a processor raises, or the iterable: that when the texts under way have ended.
        """
        refuse_foreign(arguments, self.as_completed)
        self._warn_once()
        return answers_of(self.queue, self.tokenizer, prompts, **arguments)

    @overload
    def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        return_exceptions: Literal[False] = False,
        **arguments: Unpack[ManyTexts],
    ) -> list[GenerateOutput]: ...

    @overload
    def generate_all(
        self,
        prompts: Iterable[Prompt],
        *,
        return_exceptions: Literal[True],
        **arguments: Unpack[ManyTexts],
    ) -> list[GenerateOutput | Exception]: ...

    @shows(answers_of)
    def generate_all(self, prompts: Iterable[Prompt], **arguments: Any) -> list[Any]:
        """Answer many prompts, several in each pass of the model; arguments and errors as `as_completed`.

        All prompts are read, and checked, before the first token. What ends the call later, such as a processor's
        error or Ctrl-C, has the answers that were done in its attribute `answers`, by their indices.

        Returns:
            The answers in the order of the prompts; once `cancel` is set, those of the texts that had begun.
        """
        refuse_foreign(arguments, self.generate_all)
        check_prompts(prompts)
        known = prompts if isinstance(prompts, Sized) else list(prompts)
        answers = self.as_completed(known, **arguments)
        found: dict[int, Any] = {}
        try:
            for index, output in answers:
                found[index] = output
        except BaseException as error:
            vars(error)["answers"] = found
            raise
        return [found[index] for index in sorted(found)]

    def steps(self, prompt_ids: Sequence[int], **options: Any) -> Generator[StepRecord, None, None]:
        """Return the steps of a text; `options` are those of a `Request`, all else as `SequenceQueue.steps_of`."""
        return self.queue.steps_of(Request(prompt_ids, **options))

    def reset(self) -> None:
        """Forget what the method has learned and the last text, and free its rows."""
        self.queue.reset()

    def _text(self, function: Callable[..., Any], prompt: Prompt, arguments: Any) -> Text:
        """Return the text that a function of the decoder is asked for."""
        refuse_foreign(arguments, function)
        self._warn_once()
        texts = Texts(self.target, self.tokenizer, TextOptions(**arguments))
        return texts.text(texts.read(prompt))

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_of_settings(self.target.model)

    def session(self: Decoder) -> Decoder:
        """Return a decoder for another text at the same time, in milliseconds.

        It has the same model and weights, a cache of its own, and a copy of what was learned so far, from
        where it learns by itself. Steps of several sessions take turns.
        """
        options = dataclasses.asdict(self.drafter.config)
        twin = type(self)(self.target, self.tokenizer, CustomMethod(self.method), **options)
        with self.queue.permits.memory():
            learned = self.drafter.memory()
        if learned:
            twin.drafter.load_memory(learned)
        return twin

    # Of any copy: weights are not copied.
    __copy__ = session

    def __deepcopy__(self: Decoder, memo: dict[int, Any]) -> Decoder:
        return self.session()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "decoder: cannot be pickled, since its kernels belong to this process; allowed: "
            "save_memory here, and load_memory in a new decoder there"
        )

    def save_memory(self, path: str | Path) -> None:
        """Save what the method has learned to a safetensors file.

        Raises:
            ValueError: if the method keeps nothing across prompts.
        """
        with self.queue.permits.memory():
            memory.save_memory(self.drafter, Path(path), self.tokenizer)

    def load_memory(self, path: str | Path) -> None:
        """Load what `save_memory` wrote.

        Raises:
            ValueError: if it was learned with another tokenizer, or does not fit this method and its options.
        """
        with self.queue.permits.memory():
            self.drafter.load_memory(memory.read_memory(path, self.tokenizer))


class TokenRecycling(SpeculativeDecoder):
    """Token Recycling on a loaded model; arguments as `SpeculativeDecoder`, which has all other methods.

    Its options, with the method's defaults:
    `output_id_topk=8, tree_version="2.2.2", start="hot", policy=None, harvest_prompt=None`

    - output_id_topk: successors kept for each token (k).
    - tree_version: "2.2.2", the paper's tree; a JSON file of rank paths; or "auto": each step the tree that
      pays most on the device. On a CPU "auto" is taken where none is given.
    - start: "hot" keeps what was learned from prompt to prompt; "cold" clears it before each.
    - policy: how rows are written: "original", as published; "average", which "auto" takes where none is given;
      "accepted-last" or "accepted-only".
    - harvest_prompt: whether rows are made of the prompt's logits too; None: where that pays.
    """

    own_method = "recycling"
