"""Token Recycling: keeps the candidate tokens that decoding throws away, and drafts from them.

An adjacency matrix holds, for every token of the vocabulary, the top-k tokens predicted after its
last occurrence. A step fills a static tree template from it, level by level (`child =
matrix[token(parent), rank]`), verifies the tree in one forward pass, and writes the top-k of every
node's logits back, rejected nodes included.

Named templates are the JSON files in `templates/`; any other JSON file of the same form can be given by path.

Source: X. Luo et al., Turning Trash into Treasure: Accelerating Inference of LLMs with Token
Recycling, arXiv 2408.08696 (M, the adjacency matrix -> `_matrix`; k -> `output_id_topk`; the static
tree of section 3.2 -> `TreeTemplate`).

Shapes: N nodes (root included), V vocabulary, k successors kept for a token, C prompt tokens in a
chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from ...budget.measure import MAX_MEASURED_NODES
from ...budget.memory import check_ids, check_names, check_tensor, check_topk
from ...budget.paced import CostAwareDrafter
from ...budget.tree_template import TreeTemplate, read_rank_paths
from ...engine.budget import DraftBudget
from ...engine.drafter import Needs, VerifiedStep
from ...engine.read_out import likeliest
from ...engine.tree import DraftTree
from ...machine.hardware import Kept
from ...options import Options, option, start_option, unknown_name
from .adjacency import AdjacencyMatrix, DeviceTemplate
from .auto_tree import AutoTree, library_of_guesses

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
POLICIES = ("accepted-last", "accepted-only", "average", "original")
AUTO = "auto"


def template_names() -> list[str]:
    """Return the names of the templates that come with the project."""
    return sorted(file.stem for file in TEMPLATE_FOLDER.glob("*.json"))


def load_template(version: str, others: Sequence[str] = ()) -> TreeTemplate:
    """Load a template by name, or from a JSON file by path; `others` are further names for the error's text.

    Raises:
        ValueError: if the name is unknown, or the file or a path in it is wrong.
    """
    is_named = version in template_names()
    file = TEMPLATE_FOLDER / f"{version}.json" if is_named else Path(version)
    if not is_named and not file.is_file():
        known = unknown_name("tree_version", version, [*template_names(), *others])
        raise ValueError(f"{known}, or the path of a JSON file of rank paths")
    return TreeTemplate(read_rank_paths(file, version), version)


@dataclass(frozen=True, slots=True)
class RecyclingConfig(Options):
    """The default is the published code's method: the prompt is not harvested, rows are written in tree order after
    every step but the one that stops, warm-up passes count, and nothing is ever reset.
    """

    output_id_topk: int = option(8, "successors kept for each token (k)", least=1)
    tree_version: str = option(
        "2.2.2",
        "name of a tree template, a JSON file of rank paths, or auto: each step the tree "
        "that promises the most tokens per millisecond on this device",
    )
    start: str = start_option("the matrix lives")
    policy: str | None = option(
        None,
        "how rows are written. original: as in the published code; average: from every node, "
        "accepted ones last, and half of a row is kept; accepted-last: the same, but rows are "
        "overwritten; accepted-only: only from accepted nodes (default: original; average with "
        "--tree-version auto)",
        choices=POLICIES,
        derived=lambda given: "average" if given["tree_version"] == AUTO else "original",
    )
    harvest_prompt: bool | None = option(
        None,
        "seed the matrix from the prompt's logits (default: yes; no with --policy original; "
        "with --tree-version auto where the output head is a small part of the model)",
        derived=lambda given: (
            None if given["tree_version"] == AUTO else given["policy"] != "original"
        ),
    )

    def _check(self) -> None:
        if self.policy == "original" and self.harvest_prompt:
            raise ValueError(
                "harvest_prompt: got yes with policy original, which never harvests; allowed: the policy "
                "average, which is the method recycling-averaged"
            )
        if self.policy == "original" and self.start == "cold":
            raise ValueError(
                "start: got cold with policy original, which never resets; allowed: the policy average, which "
                "is the method recycling-averaged"
            )
        if self.tree_version != AUTO:
            load_template(self.tree_version, (AUTO,)).check_ranks(self.output_id_topk)
        elif self.policy == "original":
            raise ValueError("tree_version: got auto with policy original, whose tree is static")
        if self.tree_version == AUTO:
            library_of_guesses()  # fail before any weights load if it cannot be built


@dataclass(frozen=True, slots=True)
class AveragedRecyclingConfig(RecyclingConfig):
    """The same options, with this project's write-back where none is named."""

    policy: str | None = option(
        "average", "how rows are written, as of the method recycling", choices=POLICIES
    )


# The matrix is all that it drafts from. End to end, auto, harvested or not: SmolLM2-135M, whose head is
# 0.21 of it, 1.29x of plain decoding or 1.20x; the demo model, 0.30, 1.23x or 1.29x.
CHEAP_HEAD = 0.25


@lru_cache(maxsize=256)
def _levels_of(template: TreeTemplate) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the nodes of each depth below the root, their parents and their ranks, each int64 [nodes]."""
    parents, ranks = np.array(template.topology.parents), np.array(template.ranks)
    levels = map(np.array, template.topology.levels[1:])
    return [(nodes, parents[nodes], ranks[nodes]) for nodes in levels]


class RecyclingDrafter(CostAwareDrafter):
    """Drafts from the adjacency matrix: a static tree, or with `tree_version="auto"` the best-paying tree."""

    config_class = RecyclingConfig
    auto_options = MappingProxyType({"tree_version": AUTO})

    def __init__(self, config: RecyclingConfig, vocab_size: int, device: torch.device) -> None:
        super().__init__(config, vocab_size, device)
        check_topk(config.output_id_topk, vocab_size)
        self._is_original = config.policy == "original"
        self._writes_accepted_only = config.policy == "accepted-only"
        is_average = config.policy == "average"
        self.needs = Needs(
            num_candidates=config.output_id_topk,
            prompt_logits=config.harvest_prompt,
            cheap_head=CHEAP_HEAD,
            cold_start=config.start == "cold",
            warmup_memory=self._is_original,
            # The published loop stops after more than max_new_tokens + 1 tokens; its steps beyond
            # the limit still write rows for later questions.
            overrun=2 if self._is_original else 0,
        )
        self._guesses: AutoTree | None = None
        self.wants_costs = config.tree_version == AUTO
        averages_here = is_average and not self.wants_costs
        self._adjacency = AdjacencyMatrix(vocab_size, config.output_id_topk, device, averages_here)
        if self.wants_costs:
            self._guesses = AutoTree(self._matrix, is_average)
            self.max_nodes = MAX_MEASURED_NODES
        else:
            self._template = load_template(config.tree_version)
            self.max_nodes = self._template.topology.num_nodes
        self._on_device: Kept[DeviceTemplate] = Kept()

    @property
    def _matrix(self) -> np.ndarray:
        """The matrix on the host: filling a tree takes microseconds, and verification transfers the new rows."""
        return self._adjacency.successors.host

    def on_device(self) -> DeviceTemplate | None:
        """Return the static template's part of whole steps; None for policies that write rows differently."""
        if self._guesses or self._is_original or self._writes_accepted_only:
            return None
        return self._on_device.get(
            self._template, lambda: DeviceTemplate(self._adjacency, self._template, self.device)
        )

    @property
    def draft_sizes(self) -> Collection[int]:
        """The template's size, and the root alone (others come at the context's end); all of the automatic tree."""
        return super().draft_sizes if self.wants_costs else (1, self.max_nodes)

    def sibling(self) -> RecyclingDrafter:
        """Return a drafter with a text of its own, which only the automatic tree reads; all rows are shared."""
        sibling = super().sibling()
        sibling._guesses = self._guesses.sibling() if self._guesses else None
        return sibling

    def start(self, prompt_ids: Sequence[int]) -> None:
        if self._guesses:
            self._guesses.start(prompt_ids)

    def propose(self, context: Sequence[int], budget: DraftBudget) -> DraftTree:
        """Fill the template from the matrix, level by level, or grow a tree while it pays."""
        if context[-1] >= self.vocab_size:  # some prompt tokens have no logit and no row
            return DraftTree.chain(context[-1:])
        if self._guesses:  # --tree-version auto
            return self._guesses.grow(context[-1], self.max_nodes - 1, budget)
        template = self._template.within(budget)
        token_ids = np.empty(template.topology.num_nodes, dtype=np.int64)
        token_ids[0] = context[-1]
        for nodes, parents, ranks in _levels_of(template):
            token_ids[nodes] = self._matrix[token_ids[parents], ranks]
        return DraftTree(torch.from_numpy(token_ids), template.topology)

    def offer(
        self, context: Sequence[int], budget: DraftBudget, most: int, least: float = 0.0
    ) -> Sequence[float] | None:
        """Return the probabilities of the automatic tree; a template has none."""
        return self._guesses.offer(context[-1], most, budget, least) if self._guesses else None

    def take(self, count: int) -> DraftTree:
        return self._guesses.take(count) if self._guesses else super().take(count)

    def observe_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Seed the rows of a chunk of prompt tokens; of equal tokens the last one wins."""
        values, top_ids = likeliest(logits, self.config.output_id_topk)  # [C, k]
        has_row = [token < self.vocab_size for token in token_ids]
        tokens, rows, logits_of_rows = (
            list(compress(column, has_row))
            for column in (token_ids, top_ids.tolist(), values.tolist())
        )
        (self._guesses or self._adjacency).write(tokens, rows, logits_of_rows)

    def observe(self, step: VerifiedStep) -> None:
        """Write back the top-k after every node; of nodes with the same token the last one written wins."""
        acceptance, k = step.acceptance, self.config.output_id_topk
        order = acceptance.path
        if not self._writes_accepted_only:
            order = acceptance.accepted_last(step.tree.topology)
        if self._is_original:
            # In a last step the published code writes rows if the end of text is the bonus token.
            is_bonus = step.stop_reason == "eos" and len(acceptance.tokens) == len(acceptance.path)
            if step.stop_reason is not None and not is_bonus:
                return
            order.sort()
        tokens = acceptance.node_tokens
        order = [node for node in order if tokens[node] < self.vocab_size]
        if self._guesses:
            self._guesses.learn(acceptance, order)
            return
        token_ids, logits = acceptance.candidates
        rows = [token_ids[node][:k] for node in order]
        logits_of_rows = [logits[node][:k] for node in order]
        self._adjacency.write([tokens[node] for node in order], rows, logits_of_rows)

    def skip(self, tokens: Sequence[int]) -> None:
        if self._guesses:
            self._guesses.append(tokens)

    def reset(self) -> None:
        self._adjacency.clear()
        if self._guesses:
            self._guesses.reset()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the matrix, int32 [V, k]; averaged rows' shares, float32 [V, k]; the codes and rates of `auto`."""
        extra = self._guesses.memory() if self._guesses else self._adjacency.memory_of_shares()
        return {"adjacency": torch.from_numpy(self._matrix.copy()), **extra}

    def load_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        hint = (
            " (tree_version auto, policy average and the other policies keep rows of three kinds)"
        )
        check_names(tensors, self.memory(), hint)
        matrix = tensors["adjacency"]
        own, hint = self._matrix, " (vocabulary of the model, output_id_topk)"
        check_tensor("matrix: got", matrix, own.dtype, own.shape, hint)
        check_ids(matrix, self.vocab_size)
        if self._guesses:
            self._guesses.load_memory(tensors)
        else:
            self._adjacency.load_shares(tensors)
        self._matrix[:] = matrix.cpu().numpy()

    def describe(self) -> str:
        rows, k = self._matrix.shape
        size, kinds = self._matrix.nbytes, "int32"
        if self._adjacency.shares is not None:
            size, kinds = 2 * size, "int32 and float32"
        return f"adjacency matrix {rows} x {k} {kinds}: {size / 2**20:.2f} MiB"


class AveragedRecyclingDrafter(RecyclingDrafter):
    """The paper's tree from averaged rows, which the prompt fills too (ours)."""

    config_class = AveragedRecyclingConfig
