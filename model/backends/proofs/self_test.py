"""Self-test of a loaded model: do its verified drafts agree with plain forward passes?

A chain and a small tree of random tokens go through the model like any draft. The logits of every
node, and of a step after a kept branch, must equal those of plain passes over prefix and path (one
sequence, transformers' own cache and mask). With recurrent states a plain pass reads the path token
by token, as plain decoding does: some models compute another recurrence over several tokens. The
step after the kept branch then proves the kept states. A model with hooks, or with functions from
outside transformers, is compared with its own generation, token by token (`model.backends.proofs.plain_decoding`).
The test knows nothing of the architecture, so it also catches what the config does not show.
Kernels with which drafts are not lossless are turned off. Sliding windows of transformers' masks are
short in a copy of the model that is tested in its place (`model.backends.proofs.plain_decoding`); windows that a
model makes itself are as they are (`support.why_chain_only`).

Shapes: N nodes, V vocabulary, L tokens of a plain pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any, NamedTuple

import torch
from torch import nn

from ...engine.tree import DraftTree, TreeTopology
from ...kernels.linear import WHOLE_STEP
from ...machine.files import read_measured, write_measured
from ...machine.hardware import give_back_threads
from ..passes.weights import Weights
from ..target import TargetModel
from .kept_verdict import NAME, verdict_key
from .plain_decoding import PlainDecoding, plain_logits, run_plainly, with_short_windows
from .snapshot import ModelSnapshot
from .support import UnsupportedModelError, new_cache

logger = logging.getLogger(__name__)

# 13 nodes: branches at several depths, a deep chain, and siblings.
TREE = TreeTopology.from_parents((-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 10))
TREE_PATH = (0, 1, 4, 7, 11)  # skips rows, so that `TreeCache.keep` must move some
CHAIN = TreeTopology.chain(6)
CHAIN_PATH = (0, 1, 2, 3)
PREFIX_LENGTH = 11
# What logits are compared with, in messages.
PLAIN, STEPWISE = "plain forward passes", "its own generation, token by token,"
# After this long a line says what is going on: on a busy machine the test of a small model took a minute.
SLOW_SECONDS = 3.0
# What was proved of a model, by the settings of the test: of its last states, such as with several adapters.
_VERDICTS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, ...], list[ProofVerdict]]] = (
    weakref.WeakKeyDictionary()
)
MOST_VERDICTS = 4


@dataclass(frozen=True, slots=True)
class Probe:
    """A random prefix, a draft after it, a path to keep, and one more token after that path."""

    prefix: list[int]
    nodes: list[int]
    topology: TreeTopology
    path: Sequence[int]
    extra: int

    @classmethod
    def random(cls, vocab_size: int, is_chain: bool, prefix_length: int = PREFIX_LENGTH) -> Probe:
        """Return the same probe for the same arguments."""
        topology, path = (CHAIN, CHAIN_PATH) if is_chain else (TREE, TREE_PATH)
        num_tokens = prefix_length + topology.num_nodes + 1
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            vocab_size, (num_tokens,), generator=generator, device=generator.device
        ).tolist()
        return cls(ids[:prefix_length], ids[prefix_length:-1], topology, path, ids[-1])

    @property
    def kept(self) -> list[int]:
        """The kept path and the token after it."""
        return [*(self.nodes[node] for node in self.path), self.extra]


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Difference between verified logits and those of plain passes."""

    error: float  # the largest difference; infinite if verification raised
    allowed: float  # the largest difference that rounding can explain
    failure: str = ""  # the exception in one line; empty if there was none
    compared_with: str = PLAIN

    @property
    def is_exact(self) -> bool:
        """Whether rounding can explain the difference; never for a NaN."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        return self.failure or (
            f"its logits differ from {self.compared_with} by {self.error:.1e} "
            f"(allowed: {self.allowed:.1e})"
        )


class Findings(NamedTuple):
    """What a self-test finds of a target; fields without a comment are as of the target."""

    chain_reason: str
    is_same_in_parts: bool
    use_kernels: bool
    are_scanned: bool  # the states of its mixers, if it has some

    @classmethod
    def of(cls, target: TargetModel) -> Findings:
        are_scanned = bool(target.mixers and target.mixers.are_scanned)
        return cls(target.chain_reason, target.is_same_in_parts, target.use_kernels, are_scanned)

    def set_on(self, target: TargetModel) -> None:
        """Set on a target what was found of one like it."""
        target.chain_reason = target.chain_reason or self.chain_reason
        target.is_same_in_parts = self.is_same_in_parts
        if target.mixers:
            target.mixers.are_scanned = self.are_scanned
        if target.use_kernels != self.use_kernels:
            target.switch_kernels(self.use_kernels)


class ProofVerdict(NamedTuple):
    """The result of a self-test."""

    code: dict[Hashable, Any]  # of the model that was tested, as `ModelSnapshot`
    weights: list[int]  # sums of the numbers in its tensors
    error: float  # the largest difference between logits
    findings: Findings

    def write(self, key: str | None) -> None:
        """Keep it for later starts, unless the key is None."""
        if key is not None:
            write_measured(NAME, key, {"error": self.error, **self.findings._asdict()})

    @classmethod
    def read(cls, key: str | None, target: TargetModel, sums: list[int]) -> ProofVerdict | None:
        """Return what an earlier start found of a target; None if nothing is kept."""
        found: Any = read_measured(NAME, key) if key is not None else None
        if not isinstance(found, dict) or found.keys() != {"error", *Findings._fields}:
            return None
        findings = Findings(*(found[name] for name in Findings._fields))
        return cls(target.snapshot.code, sums, found["error"], findings)


def prove(target: TargetModel, say: Callable[[str], object] = logger.info) -> float:
    """Self-test a model, unless it passed the same test before, with the same code; and again when that changes.

    What an earlier start on this machine proved of the same weights and code counts (`kept_verdict`). A model with
    hooks, with a forward of its own or compiled is tested every time: what it computes cannot be told from its
    classes.

    Returns:
        The largest difference between logits.

    Raises:
        UnsupportedModelError: as `self_test`.
    """
    model = target.model
    settings = (target.machine_key, str(target.use_kernels))
    with target.lock:
        target.proof = prove
        code, own = target.snapshot.code, target.snapshot.own
        verdicts = _VERDICTS.setdefault(model, {}).setdefault(settings, [])
        is_plain = not own.is_on_modules and all(map(_is_plain, model.modules()))
        weights = Weights.of(target) if is_plain else None
        if weights is None:
            return self_test(target, say=say)
        sums = weights.sums
        verdict = next((one for one in verdicts if one.code == code and one.weights == sums), None)
        if verdict is None:
            key = verdict_key(settings, code, sums)
            verdict = ProofVerdict.read(key, target, sums)
            if verdict is None:
                error = self_test(target, say=say)
                verdict = ProofVerdict(target.snapshot.code, sums, error, Findings.of(target))
                verdict.write(key)
            verdicts[:] = [verdict, *verdicts[: MOST_VERDICTS - 1]]
    found = verdict.findings
    if found.chain_reason and not target.chain_reason:
        _use_chains(target, found.chain_reason)
    if target.use_kernels and not found.use_kernels:
        message = "model type %s: kernels are off, since a draft failed with them before"
        logger.warning(message, target.config.model_type)
    found.set_on(target)
    return verdict.error


def _is_plain(module: nn.Module) -> bool:
    own = vars(module)
    return "forward" not in own and own.get("_compiled_call_impl") is None


@torch.inference_mode()
def self_test(
    target: TargetModel,
    prefix_length: int = PREFIX_LENGTH,
    say: Callable[[str], object] = logger.info,
) -> float:
    """Compare verified drafts, each after a prefix, with plain forward passes: a chain, and a tree.

    If chains are right and trees are not, the model is set to chains only, with a warning. If the test takes long,
    `say` gets a line for people.

    Returns:
        The largest difference between logits.

    Raises:
        UnsupportedModelError: if the model cannot verify chains, or its context is too short for one.
    """
    kind = f"model type {target.config.model_type}"
    limit = target.steady_limit()
    if limit is not None and limit < CHAIN.num_nodes + 2:
        raise UnsupportedModelError(
            f"{kind}: has a context of {limit} tokens; allowed: {CHAIN.num_nodes + 2} or more"
        )
    if limit is not None:
        prefix_length = min(prefix_length, limit - CHAIN.num_nodes - 1)
    with target.lock, _said_if_slow(kind, say):
        tested = with_short_windows(target)
        error = _tested(tested, prefix_length)
        if tested is not target:
            Findings.of(tested).set_on(target)
        # Some models keep something of their first passes.
        target.snapshot = ModelSnapshot(target.model)
    give_back_threads()  # another thread may decode
    return error


def _tested(target: TargetModel, prefix_length: int) -> float:
    """Test a target, and set on it what is found; as `self_test`."""
    chain, tree = _compare_both(target, prefix_length)
    if not (chain.is_exact and tree.is_exact) and target.has_kernels:
        chain, tree = _without_kernels(target, prefix_length, chain, tree)
    mixers = target.mixers
    if mixers and mixers.are_scanned and not (chain.is_exact and tree.is_exact):
        mixers.are_scanned = False
        chain, tree = _compare_both(target, prefix_length)
    if not chain.is_exact:
        kind = f"model type {target.config.model_type}"
        raise UnsupportedModelError(f"{kind}: {_why_not_lossless(target, chain)}")
    if mixers:
        probe = Probe.random(target.vocab_size, True, prefix_length)
        sequence = [*probe.prefix, *probe.kept]
        target.is_same_in_parts = _is_same_in_parts(target, sequence, chain.allowed)
    if not tree.is_exact:
        _use_chains(target, f"a verified tree is not lossless: {tree}")
        return chain.error
    return max(chain.error, tree.error)


def _why_not_lossless(target: TargetModel, chain: LogitComparison) -> str:
    """Return why a model is refused, in one line."""
    if chain.compared_with == STEPWISE:
        return (
            f"a verified chain is not lossless: {chain}; allowed: hooks, and functions from outside "
            "transformers, that treat every position alike and leave the inputs of a step as they are"
        )
    probe = Probe.random(target.vocab_size, is_chain=True, prefix_length=2)
    noise = PlainDecoding(target).noise(probe.prefix, probe.kept)
    if not chain.failure and noise > chain.allowed:
        return (
            f"a verified chain is not lossless: the model's own logits depend on how many tokens a pass reads, by "
            f"{noise:.1e} (allowed: {chain.allowed:.1e}), as when activations are quantised in each pass; "
            "allowed: quantised weights only"
        )
    return f"a verified chain is not lossless: {chain}"


def _compare_both(
    target: TargetModel, prefix_length: int
) -> tuple[LogitComparison, LogitComparison]:
    """Return the comparisons of a chain and of a tree; of the chain twice, if drafts must be chains.

    With states drafts also begin a sequence, where there is no state yet; the worse comparison counts.
    """
    found = []
    for is_chain in (True, target.chain_only):
        lengths = (prefix_length, 0) if target.mixers else (prefix_length,)
        probes = (Probe.random(target.vocab_size, is_chain, length) for length in lengths)
        found.append(max((compare(target, probe) for probe in probes), key=lambda one: one.error))
    return found[0], found[1]


def _without_kernels(
    target: TargetModel, prefix_length: int, chain: LogitComparison, tree: LogitComparison
) -> tuple[LogitComparison, LogitComparison]:
    """Compare without kernels; they stay off, with a warning, if more comparisons are exact then."""
    target.switch_kernels(False)
    found = _compare_both(target, prefix_length)
    if [one.is_exact for one in found] <= [chain.is_exact, tree.is_exact]:
        target.switch_kernels(True)
        return chain, tree
    reason = chain if not chain.is_exact else tree
    kind = target.config.model_type
    logger.warning(
        "model type %s: kernels are off, since a draft fails with them: %s", kind, reason
    )
    return found


def _use_chains(target: TargetModel, reason: str) -> None:
    """Set a target to chains only, with a warning."""
    target.chain_reason = reason
    logger.warning("model type %s: chain drafts only: %s", target.config.model_type, reason)


@torch.inference_mode()
def compare(target: TargetModel, probe: Probe) -> LogitComparison:
    """Compare the logits of a verified draft with plain forward passes."""
    plain = PlainDecoding(target)
    expected = expected_logits(target, probe)
    allowed = allowed_difference(target, probe, expected)
    try:
        found = verified_logits(target, probe)
    except Exception as error:
        # A model made without 4-D masks in mind may raise anything.
        reason = (str(error).splitlines() or [""])[0]
        return LogitComparison(float("inf"), allowed, f"{type(error).__name__}: {reason}")
    difference = float((found - expected).abs().max())
    name = STEPWISE if plain.is_stepwise else PLAIN
    comparison = LogitComparison(difference, allowed, compared_with=name)
    logger.info("self-test, %d nodes: %s", probe.topology.num_nodes, comparison)
    return comparison


def allowed_difference(target: TargetModel, probe: Probe, expected: torch.Tensor) -> float:
    """Return the largest difference from the expected logits that rounding can explain.

    In float32: 1e-3 standard deviations of the logits. In half precision, and where layers round to eight
    bits: four times the error of a token-by-token loop, or four roundings of the largest logit if that is more.
    """
    if target.dtype.itemsize >= 4 and not target.is_whole:
        return 1e-3 * float(expected.std())
    # The loop may be exact by chance, so some roundings are always allowed.
    size = torch.finfo(target.dtype).eps + (WHOLE_STEP if target.is_whole else 0.0)
    rounding = size * float(expected.abs().max())
    return 4 * max(PlainDecoding(target).noise(probe.prefix, probe.kept), rounding)


def verified_logits(target: TargetModel, probe: Probe) -> torch.Tensor:
    """Return logits [N + 1, V] from verification: of every node, then of one token after the kept path."""
    cache = target.new_cache(len(probe.prefix) + probe.topology.num_nodes + 1)
    for _ in target.prefill([*probe.prefix, probe.nodes[0]], cache, with_logits=False):
        pass
    tree = DraftTree(torch.tensor(probe.nodes, device=target.device), probe.topology)
    logits = target.forward(tree, cache)
    cache.keep(len(probe.prefix), probe.path)
    step = target.forward(DraftTree.chain([probe.extra]), cache)
    return torch.cat((logits, step)).float()


def expected_logits(target: TargetModel, probe: Probe) -> torch.Tensor:
    """Return the same logits from plain decoding: of each leaf's path, and of the kept path."""
    plain = PlainDecoding(target)
    num_nodes = probe.topology.num_nodes
    rows: list[torch.Tensor | None] = [None] * num_nodes
    for leaf in range(num_nodes):
        if probe.topology.children[leaf]:
            continue
        path = probe.topology.path_to(leaf)
        logits = plain.path_logits(probe.prefix, [probe.nodes[node] for node in path])
        for node, row in zip(path, logits, strict=True):
            rows[node] = row
    rows.append(plain.path_logits(probe.prefix, probe.kept)[-1])
    return torch.stack([row for row in rows if row is not None])


def _is_same_in_parts(target: TargetModel, token_ids: list[int], allowed: float) -> bool:
    """Whether a sequence has the same states read in one pass, in two, and token by token."""
    whole = plain_logits(target, token_ids)
    alone = plain_logits(target, token_ids, len(token_ids) - 1)
    cache, half = new_cache(target.model), len(token_ids) // 2
    ids = torch.tensor(token_ids, device=target.device)
    run_plainly(target, ids[:half], 0, cache)
    try:
        last = run_plainly(target, ids[half:], half, cache).float()
    except (IndexError, RuntimeError, ValueError):  # Mamba's, in older versions of transformers 5
        return False
    differences = (whole - alone, whole[half:] - last)
    return all(float(difference.abs().max()) <= allowed for difference in differences)


@contextmanager
def _said_if_slow(kind: str, say: Callable[[str], object]) -> Iterator[None]:
    text = (
        f"{kind}: comparing drafts with plain forward passes, once a model; slow on a busy machine"
    )
    timer = Timer(SLOW_SECONDS, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
