"""The check passes exact sampling, and rejects rules that are biased a little or share no stream.

Run: pytest tests/evaluation/checking/test_sampling_check.py
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from evaluation import sampling_check
from evaluation.sampling_check import (
    SETTINGS,
    VOCAB_SIZE,
    Sampler,
    Setting,
    main,
    p_value,
    total_variation,
)
from model.commands.command_line import UserError
from model.engine.rules import Processor, SamplingRule
from model.methods import METHODS

FEW = 60
# Enough that a bias of some percent shows.
MANY = 400


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    """The small model."""
    return Sampler(0)


class BiasedRule(SamplingRule):
    """Takes the likeliest token wherever it has more than 0.4: what a biased acceptance would do."""

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return the likeliest token, or a draw."""
        drawn = super().choose(logits, prefix)
        return int(logits.argmax()) if logits.softmax(-1).max() > 0.4 else drawn


class UnfilteredRule(SamplingRule):
    """Forgets the processors: tokens come that top-k has forbidden."""

    def __init__(self, processors: Sequence[Processor], generator: torch.Generator) -> None:
        super().__init__([], generator)


class WastefulRule(SamplingRule):
    """Draws twice for each token: the right distribution, but not the plain loop's text."""

    def choose(self, logits: torch.Tensor, prefix: Sequence[int], tie_margin: float = 0.0) -> int:
        """Return the second of two draws."""
        super().choose(logits, prefix)
        return super().choose(logits, prefix)


def test_settings_cover_what_changes_a_distribution(sampler: Sampler) -> None:
    assert {(setting.temperature, setting.top_p < 1) for setting in SETTINGS} >= {
        (1.0, False),
        (0.7, True),
    }
    assert any(setting.top_k for setting in SETTINGS)
    assert any(setting.repetition_penalty > 1 for setting in SETTINGS)
    for setting in SETTINGS:
        assert sum(sampler.distribution(setting).values()) == pytest.approx(1, abs=1e-5)
    distinct = {round(max(sampler.distribution(setting).values()), 6) for setting in SETTINGS}
    assert len(distinct) == len(SETTINGS), "two settings with one distribution"


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=str)
def test_recycling_samples_exactly(sampler: Sampler, setting: Setting) -> None:
    check = sampler.check("recycling", setting, MANY)
    assert check.is_passed, check
    assert check.mean_accepted > 1.5, "nothing is accepted: the check proves nothing"


def test_a_biased_rule_is_rejected(sampler: Sampler) -> None:
    check = sampler.check("recycling", SETTINGS[0], MANY, BiasedRule)
    assert check.p_value < 1e-6 and not check.is_passed


def test_forbidden_tokens_are_counted(sampler: Sampler) -> None:
    check = sampler.check("recycling", Setting(0.7, top_k=4), FEW, UnfilteredRule)
    assert check.num_impossible > 0 and not check.is_passed


def test_another_use_of_the_random_stream_is_seen(sampler: Sampler) -> None:
    check = sampler.check("pld", SETTINGS[0], MANY, WastefulRule)
    assert check.p_value > 1e-4, "the distribution is right"
    assert check.num_differing > 0 and not check.is_passed


@pytest.mark.parametrize("method", METHODS)
def test_a_method_passes_the_command(
    method: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "SETTINGS", SETTINGS[-1:])
    assert main(["--num-samples", str(FEW), "--method", method]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["passed"] is True
    assert [check["method"] for check in report["checks"]] == [method]


def test_without_a_method_all_are_checked(
    sampler: Sampler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_check, "SETTINGS", SETTINGS[-1:])
    check = sampler.check("pld", SETTINGS[-1], FEW)
    monkeypatch.setattr(Sampler, "check", lambda self, method, *_: replace(check, method=method))
    assert main(["--num-samples", str(FEW)]) == 0
    said = capsys.readouterr()
    assert f"{len(METHODS)}/{len(METHODS)}" in said.err, "no progress was shown"
    report = json.loads(said.out.splitlines()[-1])
    assert [check["method"] for check in report["checks"]] == list(METHODS)


def test_mistakes_are_one_line() -> None:
    for words, says in (
        (["--num-samples", "0"], "num_samples: got 0"),
        (["--num-samples", "1", "--method", "pld"], "num_samples: got 1, too few"),
        (["--seed", "-1"], "seed: got -1"),
    ):
        with pytest.raises(UserError, match=says):
            main(words)


def test_the_statistics_are_calibrated() -> None:
    texts = list(itertools.product(range(VOCAB_SIZE), repeat=2))
    expected = dict.fromkeys(texts, 1 / len(texts))
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(200):
        draws = torch.randint(len(texts), (500,), generator=generator).tolist()
        values.append(p_value(Counter(texts[draw] for draw in draws), expected))
    assert 0.4 < sum(values) / len(values) < 0.6
    assert 2 <= sum(value < 0.05 for value in values) <= 20
    half = {text: 1 / len(texts) for text in texts[: len(texts) // 2]}
    assert total_variation(Counter(dict.fromkeys(half, 3)), expected) == pytest.approx(0.5)
