"""Bases of drafters with trained heads, which are read at once, and loaded when the target model is known.

Shapes: C tokens in a chunk, D width of the hidden states, p nodes with children.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from ...backends.passes.hidden import FINAL
from ...backends.target import TargetModel
from ...budget.best_first import Guesser
from ...budget.tree_template import TreeTemplate, read_rank_paths
from ...engine.budget import MAX_DRAFT, DraftBudget
from ...engine.drafter import Drafter, Needs, VerifiedStep
from ...machine.hardware import Kept, uploaded
from .head_files import HeadFiles
from .replayed import MOST_REPLAYED, TIMES, ReplayedCalls, ReplayedRows

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self

# Hidden states that wait to be read, at most: a rest may be long. Of a prompt that may wait more do.
MOST_UNREAD, MOST_LATE = 64, 4096
# The static tree of Medusa and Hydra: the most useful nodes come first.
TREE = "mc_sim_7b_63"
TREE_FILE = Path(__file__).parent / "templates" / f"{TREE}.json"
NUM_NODES, NUM_RANKS = 63, 10


class GuessLevel(NamedTuple):
    """One level of a tree, as indices on the device."""

    num_guesses: int  # k, so that all ranks are there
    readers: torch.Tensor  # nodes of the level that have children [p], among the nodes of the level
    parents: torch.Tensor  # for each node of the next level, its parent among the readers
    ranks: torch.Tensor  # for each node of the next level, its rank among its parent's guesses


@lru_cache(maxsize=256)
def levels_of(tree: TreeTemplate, device: torch.device) -> list[GuessLevel]:
    """Return the levels of a template but the last, whose nodes have no children; kept by template and device."""
    topology, found = tree.topology, []
    for nodes, below in zip(topology.levels, topology.levels[1:], strict=False):
        readers = [node for node in nodes if topology.children[node]]
        ranks = [tree.ranks[node] for node in below]
        indices = (
            [nodes.index(node) for node in readers],
            [readers.index(topology.parents[node]) for node in below],
            ranks,
        )
        rows = (torch.tensor(each, device=device) for each in indices)
        found.append(GuessLevel(1 + max(ranks), *rows))
    return found


# The rows of one text: `clear`, `sibling` (another text, for the same weights) and `read`, which takes a chunk:
# hidden states [C, D], and the token after each of them. `fixed`: its rows where passes are replayed, or None.
Text = TypeVar("Text", bound=Any)


class StateReader(Guesser, Generic[Text]):
    """A guesser that reads every accepted token from the hidden state before it, when it next guesses.

    So while drafting rests, a step costs no pass of the heads.
    """

    def __init__(self, config: Any, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        self._target: TargetModel | None = None
        self._text: Text | None = None  # until the model is known
        self._prompt_ids: Sequence[int] = ()
        self._num_read = 0
        self._unread: list[tuple[Sequence[int], torch.Tensor]] = []

    def sibling(self) -> Self:
        """Return a drafter whose text has rows of its own; the weights are shared."""
        sibling = super().sibling()
        sibling._text = self._text.sibling() if self._text else None
        sibling._unread = []
        return sibling

    def check_target(self, target: TargetModel) -> None:
        super().check_target(target)
        self.for_target(target)

    def for_target(self, target: TargetModel) -> Drafter:
        """Make the text for the model, once; raises ValueError if weights do not fit it, or cannot be loaded."""
        if target is not self._target:
            self.check_config(target.config)
            self._text, self._target = self._text_of(target), target
        return self

    def _text_of(self, target: TargetModel) -> Text:
        raise NotImplementedError

    def prepare(self, target: TargetModel, num_tokens: int) -> None:
        self._prepare(num_tokens, self.propose)
        super().prepare(target, num_tokens)  # what is captured after this is late

    def prepare_guesses(self, num_tokens: int) -> None:
        self._prepare(num_tokens, self.guesses)

    @torch.inference_mode()
    def _prepare(self, num_tokens: int, draft: Callable[..., object]) -> None:
        """Capture what is read of texts, and drafted after them, where passes are replayed."""
        rows: ReplayedRows | None = getattr(self._text, "fixed", None)
        if rows is None or self._target is None:
            return
        width = len(self.needs.hidden_layers) * (self.needs.hidden_size or 0)
        hidden = torch.zeros(
            MOST_REPLAYED, width, dtype=self._target.dtype, device=self._target.device
        )

        def read(count: int) -> None:
            assert self._text is not None
            self._text.read([0] * count, hidden[:count])

        rows.prepare(num_tokens, read, partial(draft, [0], DraftBudget(MAX_DRAFT)))

    def start(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids, self._num_read, self._unread = prompt_ids, 0, []
        if self._text is not None:
            self._text.clear()

    @torch.inference_mode()
    def observe_prompt_hidden(self, token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Read a chunk of the prompt: C hidden states, each with the token after it."""
        begin, end = self._num_read, self._num_read + len(token_ids)
        self._num_read = end
        most = self._most_unread
        kept = hidden.clone() if most > MOST_UNREAD else hidden
        self._unread.append((self._prompt_ids[begin + 1 : end + 1], kept))
        if most == MOST_UNREAD or end > most:
            self.read_text()

    @torch.inference_mode()
    def observe(self, step: VerifiedStep) -> None:
        """Keep the accepted tokens and the model's hidden states before them, to be read."""
        if step.stop_reason is None:
            assert step.hidden is not None
            path = uploaded(step.acceptance.path, step.hidden.device)
            self._unread.append((step.acceptance.tokens, step.hidden[path]))
            if sum(len(tokens) for tokens, _ in self._unread) > self._most_unread:
                self.read_text()

    @property
    def _most_unread(self) -> int:
        """Hidden states that may wait; where passes are replayed a prompt costs little, and does not wait."""
        is_late = self.reads_late and getattr(self._text, "fixed", None) is None
        return MOST_LATE if is_late else MOST_UNREAD

    def read_text(self) -> Text | None:
        """Read what is unread; return the text, or None if the model is not known."""
        if self._text is not None and self._unread:
            tokens, hidden = zip(*self._unread, strict=True)
            self._unread = []
            # Joining one alone would launch a copy.
            joined = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
            self._text.read([*chain(*tokens)], joined)
        return self._text


@lru_cache(maxsize=16)
def tree_of(num_nodes: int, num_heads: int, num_ranks: int) -> TreeTemplate:
    """Return the first nodes of the tree, as far as heads and ranks reach; the same object on every call.

    A tiny vocabulary has fewer guesses after a node than the tree's 10 ranks.
    """
    first = read_rank_paths(TREE_FILE, TREE)[:num_nodes]
    kept = [path for path in first if len(path) <= num_heads and max(path) < num_ranks]
    return TreeTemplate(kept, TREE)


class HeadDrafter(Drafter):
    """Base of all drafters with trained heads.

    Raises:
        ValueError: if the heads are missing, damaged, or have another vocabulary.
    """

    # The method whose heads it drafts with; empty: heads of its own.
    heads_of: ClassVar[str] = ""

    @classmethod
    def write_untrained_heads(cls, folder: Path, config: Any) -> None:
        """Write random heads for a model with this text config: what checks of the method draft with."""
        raise NotImplementedError


class StaticHeadDrafter(HeadDrafter):
    """Base of drafters whose heads read the final hidden states, and fill a static tree.

    Siblings share the heads, whichever loads them.
    """

    _heads: nn.Module | None = None
    _target: TargetModel | None = None
    _calls: ReplayedCalls | None = None
    _output: Any = None  # the target model's output head

    def _take(
        self, files: HeadFiles, num_heads: int, vocab_size: int | None, hidden_size: int
    ) -> None:
        files.check_vocabulary(vocab_size, self.vocab_size)
        self._files, self._num_heads = files, num_heads
        self._loaded: Kept[nn.Module] = Kept()  # by dtype
        self.needs = Needs(hidden_layers=(FINAL,), hidden_size=hidden_size)
        self._tree = tree_of(self.config.num_nodes, num_heads, min(NUM_RANKS, self.vocab_size))
        self.max_nodes = self._tree.topology.num_nodes

    def _new_heads(self) -> nn.Module:
        raise NotImplementedError

    def check_target(self, target: TargetModel) -> None:
        super().check_target(target)
        self.for_target(target)

    def for_target(self, target: TargetModel) -> Drafter:
        """Load the heads in the target model's dtype, once; return this drafter."""
        self._heads = self._loaded.get(target.dtype, lambda: self._load(target))
        if self._calls is None or self._target is not target:
            self._calls, self._target = ReplayedCalls(target), target
        self._output = target.model.get_output_embeddings()
        return self

    def prepare(self, target: TargetModel, num_tokens: int) -> None:
        if target.is_replayed:
            self.prepare_drafts(num_tokens)
        super().prepare(target, num_tokens)  # what is captured after this is late

    def prepare_drafts(self, num_tokens: int) -> None:
        """Capture what is read and drafted after texts of up to `num_tokens` tokens."""
        assert self._target is not None
        hidden = torch.zeros(
            MOST_REPLAYED, self.needs.hidden_size or 0, dtype=self._target.dtype, device=self.device
        )
        self._prepare(num_tokens, hidden)
        self.start([0])

    def _prepare(self, num_tokens: int, hidden: torch.Tensor) -> None:
        """Draft after states [n, D]; subclasses that keep rows of a text read them after texts of all lengths."""
        for _ in range(TIMES):
            self.observe_prompt_hidden([0], hidden[:1])
            self.propose([0], DraftBudget(MAX_DRAFT))

    def _load(self, target: TargetModel) -> nn.Module:
        self.check_config(target.config)
        with torch.device("meta"):
            heads = self._new_heads()
        return self._files.load_into(heads, target.dtype, self.device)

    def describe(self) -> str:
        return f"{self._num_heads} heads, a tree of {self.max_nodes - 1} nodes"
