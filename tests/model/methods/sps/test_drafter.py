"""Speculative sampling drafts what the draft model writes, and reads every token once.

Run: pytest tests/model/methods/sps/test_drafter.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.backends.target import TargetModel
from model.budget.acceptance import FIRST_WAIT
from model.budget.cost_model import CostModel
from model.engine.budget import DraftBudget
from model.engine.loop import generate
from model.engine.rules import SamplingRule, sampling_processors
from model.methods.sps import drafter as sps_module
from model.methods.sps.drafter import SpsConfig, SpsDrafter
from tests.model.budget.test_chain_acceptance import CHEAP, DEAR
from tests.model.decoded import draft_folder, drafter_for, random_ids, referee, target_of
from tests.model.families.family import VOCAB, Family

LLAMA = "Llama, grouped heads"
PROMPT = random_ids(20, seed=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def own_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target as its own draft model."""
    folder = tmp_path_factory.mktemp("draft")
    target_of(LLAMA).model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def near_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target with a little noise, which is right now and then."""
    folder = tmp_path_factory.mktemp("near")
    model = Family("near", "LlamaConfig").build()
    model.load_state_dict(target_of(LLAMA).model.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def count_read(monkeypatch: pytest.MonkeyPatch, target: TargetModel) -> list[int]:
    """Return the lengths of all later passes of other models than the target, as they come."""
    lengths: list[int] = []
    run = TargetModel.run

    def noted(self: TargetModel, token_ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if self is not target:
            lengths.append(len(token_ids))
        return run(self, token_ids, *rest, **more)

    monkeypatch.setattr(TargetModel, "run", noted)
    return lengths


@pytest.mark.parametrize("length", [1, 4])
def test_the_target_as_its_own_draft_accepts_everything(length: int, own_draft: str) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=own_draft, num_draft_tokens=length)
    answer = generate(target, drafter, PROMPT, max_new_tokens=30)
    assert answer.token_ids == referee(target, PROMPT, 30)
    assert answer.accept_lengths == [1 + length] * (30 // (1 + length))


@pytest.mark.parametrize("length", [1, 3, 5])
def test_tokens_equal_those_of_assisted_generation(length: int, near_draft: str) -> None:
    target = target_of(LLAMA)
    ids = torch.tensor([PROMPT])
    assistant = AutoModelForCausalLM.from_pretrained(near_draft)
    assisted = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        do_sample=False,
        max_new_tokens=60,
    )
    drafter = drafter_for("sps", target, draft_model=near_draft, num_draft_tokens=length)
    answer = generate(target, drafter, PROMPT, max_new_tokens=60)
    assert answer.token_ids == assisted[0, len(PROMPT) :].tolist()
    assert answer.token_ids == referee(target, PROMPT, 60)
    lengths = set(answer.accept_lengths)
    assert len(lengths) > 1 and max(lengths) <= 1 + length, "some guesses right, some wrong"


def test_every_draft_is_what_the_draft_model_writes(near_draft: str) -> None:
    """A cache that is rolled back wrong would change the drafts, and never the text."""
    target = target_of(LLAMA)
    draft_model = TargetModel(AutoModelForCausalLM.from_pretrained(near_draft).eval())
    drafter = drafter_for("sps", target, draft_model=near_draft, num_draft_tokens=3)
    drafts: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def noted(context: list[int], budget: DraftBudget) -> Any:
        tree = propose(context, budget)
        drafts.append((list(context), tree.token_ids.tolist()))
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    accepted = generate(target, drafter, PROMPT, max_new_tokens=40).accept_lengths
    assert {1, 4} < set(accepted), "all, some and none of the guesses accepted"
    for context, tokens in drafts:
        assert tokens == [context[-1], *referee(draft_model, context, 3)][: len(tokens)]


def test_every_token_is_read_once(near_draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=near_draft, num_draft_tokens=3)
    lengths = count_read(monkeypatch, target)
    answer = generate(target, drafter, PROMPT, max_new_tokens=40)
    # Guesses are read but for the last of each draft; those that were right are tokens of the text.
    num_guesses_read = sum(
        step.num_nodes - 2 - min(len(step.path) - 1, step.num_nodes - 2) for step in answer.steps
    )
    assert sum(lengths) <= len(PROMPT) + len(answer.token_ids) + num_guesses_read


def test_the_cache_grows_with_the_text(own_draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sps_module, "MORE_ROWS", 3)
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=own_draft, num_draft_tokens=4)
    answer = generate(target, drafter, PROMPT, max_new_tokens=40)
    assert answer.token_ids == referee(target, PROMPT, 40)
    assert answer.accept_lengths == [5] * 8


def test_sampled_text_is_that_of_plain_decoding(near_draft: str) -> None:
    target = target_of(LLAMA)
    texts = []
    for drafter in (
        drafter_for("vanilla", target),
        drafter_for("sps", target, draft_model=near_draft),
    ):
        rule = SamplingRule(sampling_processors(0.3, 0, 1.0), torch.Generator().manual_seed(3))
        answer = generate(target, drafter, PROMPT, max_new_tokens=40, rule=rule)
        texts.append(answer.token_ids)
    assert texts[0] == texts[1]
    assert max(answer.accept_lengths) > 1, "no draft was accepted: the equality says nothing"


@pytest.mark.parametrize("budget", ["fixed", "auto"])
def test_a_draft_that_does_not_pay_is_not_written(budget: str, own_draft: str) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=own_draft, budget=budget)
    drafter.start(PROMPT)
    lengths = [
        drafter.propose(PROMPT, DraftBudget(30, cost_curve=cost_curve)).topology.num_nodes
        for cost_curve in [*[DEAR] * (FIRST_WAIT + 1), CHEAP]
    ]
    if budget == "fixed":
        assert set(lengths) == {6}
    else:
        assert lengths[:-2] == [1] * FIRST_WAIT
        assert lengths[-2] == 2, "now and then one guess is tried all the same"
        assert lengths[-1] > 1


def test_guesses_that_come_false_are_given_up(own_draft: str, tmp_path: Path) -> None:
    Family("other", "LlamaConfig").build(seed=9).save_pretrained(tmp_path)
    target = target_of(LLAMA)
    lengths = []
    for folder in (own_draft, str(tmp_path)):
        drafter = drafter_for("sps", target, draft_model=folder)
        answer = generate(target, drafter, PROMPT, max_new_tokens=100)
        text = [*PROMPT, *answer.token_ids]
        drafter.wants_costs = True  # from here on as with --budget auto
        drafter.start(text)
        lengths.append(drafter.propose(text, DraftBudget(30, cost_curve=CHEAP)).topology.num_nodes)
    assert lengths == [6, 1]


def test_a_draft_model_is_loaded_once(own_draft: str) -> None:
    first, second = (drafter_for("sps", target_of(LLAMA), draft_model=own_draft) for _ in range(2))
    assert first.draft_costs() is second.draft_costs()


def test_a_draft_model_that_was_written_again_is_loaded_again(tmp_path: Path) -> None:
    drafts = []
    for seed in (1, 2):
        Family("draft", "LlamaConfig", {"num_hidden_layers": 1}).build(seed).save_pretrained(
            tmp_path
        )
        drafter = drafter_for("sps", target_of(LLAMA), draft_model=str(tmp_path))
        drafts.append(next(iter(drafter._model.model.parameters())))
    assert not torch.equal(*drafts)


def test_a_prompt_is_not_read_while_drafts_do_not_pay(
    near_draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=near_draft, budget="auto")
    lengths = count_read(monkeypatch, target)
    drafter.start(PROMPT)
    assert lengths == [len(PROMPT) - 1], "nothing is known yet"
    assert drafter.propose(PROMPT, DraftBudget(30, cost_curve=DEAR)).topology.num_nodes == 1
    lengths.clear()
    drafter.start(PROMPT)
    assert lengths == []
    late = drafter.propose(PROMPT, DraftBudget(30, cost_curve=CHEAP)).token_ids.tolist()
    assert lengths == [len(PROMPT) - 1, *[1] * (len(late) - 1)]
    drafter.reset()
    drafter.start(PROMPT)
    assert drafter.propose(PROMPT, DraftBudget(30, cost_curve=CHEAP)).token_ids.tolist() == late


def test_every_guess_is_priced_as_a_pass_of_the_draft_model(near_draft: str) -> None:
    drafter = drafter_for("sps", target_of(LLAMA), draft_model=near_draft, budget="auto")
    drafting = drafter.draft_costs()
    assert drafting is not None
    costs = CostModel((1, 2, 6), (1.0, 1.5, 2.0), (2.0, 3.0, 4.0)).fresh(drafting)
    near, far = drafting.near[0], drafting.far[0]
    assert costs.near == pytest.approx((1.0, 1.5 + near, 2.0 + 5 * near))
    assert costs.far == pytest.approx((2.0, 3.0 + far, 4.0 + 5 * far))


@pytest.mark.parametrize("prompt_length", [5, 14, 16, 17, 30])
def test_a_draft_model_with_a_shorter_context_falls_silent(
    prompt_length: int, tmp_path: Path
) -> None:
    options = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    Family(
        "short", "GPT2Config", options, without=("max_position_embeddings",)
    ).build().save_pretrained(tmp_path)
    target = target_of(LLAMA)
    drafter = drafter_for("sps", target, draft_model=str(tmp_path))
    prompt = random_ids(prompt_length, seed=2)
    answer = generate(target, drafter, prompt, max_new_tokens=20)
    assert answer.token_ids == referee(target, prompt, 20)
    assert answer.steps[-1].num_nodes == 1
    assert (answer.steps[0].num_nodes > 1) == (prompt_length <= 16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens: got 0; allowed: 1 to"),
        ({"draft_dtype": "int8"}, "draft_dtype: got 'int8'; allowed: auto"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SpsConfig(**options)


def test_a_draft_model_that_cannot_be_used_is_one_line_before_its_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        pytest.fail("the weights were about to load")

    monkeypatch.setattr(sps_module, "load_draft_model", fail)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such type"}))
    for name, vocab_size, text in (
        (None, VOCAB, "draft_model: got none; give"),
        ("./not-there", VOCAB, "allowed: a folder with a model, or a hub name ORG/NAME"),
        (str(tmp_path), VOCAB, "cannot be loaded"),
        (draft_folder(VOCAB).name, 99, f"has a vocabulary of {VOCAB} tokens; allowed: 99"),
    ):
        with pytest.raises(ValueError, match=text) as error:
            SpsDrafter(SpsConfig(draft_model=name), vocab_size, CPU)
        assert "\n" not in str(error.value)
