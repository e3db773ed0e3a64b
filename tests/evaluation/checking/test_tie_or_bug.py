"""Clean half-precision runs part at ties; injected engine bugs are called bugs.

Run: pytest tests/evaluation/checking/test_tie_or_bug.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from evaluation.checking.tie_or_bug import BUG, TIE, Judge, Judgement
from model.backends.passes.cache import TreeCache
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.tree import TreeTopology
from tests.model.decoded import drafter_for, random_ids
from tests.model.families.family import Family

SEEDS = range(3)
NUM_TOKENS = 40
METHODS = ("recycling", "lookahead")


def _target(seed: int, dtype: torch.dtype) -> TargetModel:
    """A random model whose logits are close, so that half precision comes to ties."""
    llama = Family("small", "LlamaConfig").build(seed)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(0.3 if weight.ndim > 1 else 1)
    return TargetModel(llama.to(dtype))


def _verdicts(dtype: torch.dtype) -> list[Judgement]:
    """Verdicts on every method and seed whose text parts from plain decoding's."""
    verdicts = []
    for seed in SEEDS:
        target = _target(seed, dtype)
        judge, plain = Judge(target), drafter_for("vanilla", target)
        prompt = random_ids(20, seed)
        text = generate(target, plain, prompt, max_new_tokens=NUM_TOKENS).token_ids
        judge.measure_noise_on([(prompt, text)])
        for extra in range(3):
            other = random_ids(20, 100 + 10 * seed + extra)
            ids = generate(target, plain, other, max_new_tokens=NUM_TOKENS).token_ids
            judge.measure_noise_on([(other, ids)])
        for method in METHODS:
            drafter = drafter_for(method, target)
            mine = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS).token_ids
            if mine != text:
                verdicts.append(judge.judge(prompt, (text, mine), (plain, drafter)))
    return verdicts


def test_clean_half_precision_parts_at_ties_and_float32_never() -> None:
    verdicts = _verdicts(torch.bfloat16)
    assert len(verdicts) >= 2, "nothing parts: the test proves nothing"
    assert [it.verdict for it in verdicts] == [TIE] * len(verdicts), list(map(str, verdicts))
    assert all(it.gap <= it.bound for it in verdicts)
    assert _verdicts(torch.float32) == []


Patch = pytest.MonkeyPatch


def _wrong_position(patch: Patch) -> None:
    """Nodes from depth 2 on stand one position too far."""
    right = TreeTopology.depth_tensor

    def wrong(self: TreeTopology, device: torch.device) -> torch.Tensor:
        depths = right(self, device)
        return depths + (depths >= 2)

    patch.setattr(TreeTopology, "depth_tensor", wrong)


def _extra_key(patch: Patch) -> None:
    """Every node sees one key too many, the last node's."""
    right = TreeTopology.additive_mask

    def wrong(self: TreeTopology, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        mask = right(self, device, dtype).clone()
        mask[:, -1] = 0
        return mask

    patch.setattr(TreeTopology, "additive_mask", wrong)


def _wrong_row(patch: Patch) -> None:
    """The row of the node after the last accepted one is kept in its place."""
    right = TreeCache.keep

    def wrong(self: TreeCache, base: int, rows: Sequence[int]) -> None:
        wrong_rows = [*rows[:-1], rows[-1] + 1]
        is_inside = len(rows) > 1 and base + rows[-1] + 1 < self.length
        right(self, base, wrong_rows if is_inside else rows)

    patch.setattr(TreeCache, "keep", wrong)


@pytest.mark.parametrize(
    ("inject", "dtype"),
    [
        *((bug, torch.bfloat16) for bug in (_wrong_position, _extra_key, _wrong_row)),
        (_extra_key, torch.float32),
    ],
)
def test_injected_bugs_are_called_bugs(
    inject: Callable[[Patch], None], dtype: torch.dtype, monkeypatch: Patch
) -> None:
    inject(monkeypatch)
    verdicts = _verdicts(dtype)
    assert len(verdicts) >= 3, "the bug changes too little: the test proves nothing"
    assert [it.verdict for it in verdicts] == [BUG] * len(verdicts), list(map(str, verdicts))


def test_a_wrong_token_in_a_file_is_a_bug_though_the_engine_is_right() -> None:
    target = _target(0, torch.bfloat16)
    judge, plain = Judge(target), drafter_for("vanilla", target)
    text = generate(target, plain, [1, 2, 3], max_new_tokens=NUM_TOKENS).token_ids
    judge.measure_noise_on([([1, 2, 3], text)])
    with torch.inference_mode():
        unlikely = int(target.model(torch.tensor([[1, 2, 3, *text[:30]]])).logits[0, -1].argmin())
    wrong = [*text[:30], unlikely, *text[31:]]
    verdict = judge.judge([1, 2, 3], (text, wrong), (plain, drafter_for("recycling", target)))
    assert verdict.verdict == BUG and verdict.gap > verdict.bound
    assert verdict.position == 30 and verdict.tokens == (text[30], wrong[30])
    with pytest.raises(ValueError, match="one is the beginning of the other"):
        judge.judge([1, 2, 3], (text, text[:9]), (plain, plain))
