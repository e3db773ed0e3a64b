"""The cache of the last text: a known beginning is not read again, and no token changes.

Run: pytest tests/model/backends/passes/test_prefix_cache.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch.nn.utils import prune

import model.engine.loop
from model.backends.passes import weights
from model.backends.passes.prefix_cache import PrefixCache
from model.backends.target import TargetModel
from model.engine.loop import generate
from model.engine.verification import ReferenceRows
from model.methods import METHODS
from tests.model.decoded import drafter_for, known, random_ids, referee, target_of
from tests.model.engine.test_near_ties import model_with_twins
from tests.pairs import pairs

LLAMA = "Llama, grouped heads"
FAMILIES = [LLAMA, "Qwen2, sliding window", "Gemma 3n text", "BLOOM"]
PROMPT = random_ids(9, seed=1, vocab_size=64)
QUESTIONS = [random_ids(length, seed=2, vocab_size=64) for length in (5, 6)]


class Reading:
    """Counts the tokens that a target reads in plain passes over a prompt."""

    def __init__(self, target: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tokens = 0
        prefill = target.prefill

        def counted(*arguments: object, **options: object) -> Iterator[object]:
            for chunk in prefill(*arguments, **options):  # type: ignore[arg-type]
                self.num_tokens += len(chunk.token_ids)
                yield chunk

        monkeypatch.setattr(target, "prefill", counted)

    def since(self) -> int:
        """Return the number of tokens read since the last call."""
        number, self.num_tokens = self.num_tokens, 0
        return number


def turns(target: TargetModel, method: str, cache: PrefixCache | None) -> list[list[int]]:
    """Return the answers of a chat: each question follows all that was said before."""
    drafter = drafter_for(method, target)
    text, answers = list(PROMPT), []
    for question in [[], *QUESTIONS]:
        text += question
        answer = generate(target, drafter, text, max_new_tokens=8, prefix_cache=cache).token_ids
        answers.append(answer)
        text += answer
    return answers


@pytest.mark.parametrize(("method", "family"), pairs(METHODS, FAMILIES))
def test_turns_of_a_chat_are_answered_as_without_a_cache(method: str, family: str) -> None:
    assert turns(target_of(family), method, PrefixCache()) == expected_turns(family)


@cache
def expected_turns(family: str) -> list[list[int]]:
    """Return the answers of plain decoding without a cache."""
    target = target_of(family)
    expected = turns(target, "vanilla", None)
    assert expected[0] == referee(target, PROMPT, 8)
    return expected


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(known(LLAMA).build())
    reading = Reading(target, monkeypatch)
    drafter, cache = drafter_for("vanilla", target), PrefixCache()

    def num_read(prompt: list[int], max_new_tokens: int = 4) -> int:
        generate(target, drafter, prompt, max_new_tokens=max_new_tokens, prefix_cache=cache)
        return reading.since()

    assert num_read(PROMPT) == 8, "the last token is the first tree's root"
    answer = referee(target, PROMPT, 4)
    assert num_read([*PROMPT, *answer, 5, 6, 7], 100) == 3, "the answer's last token and two more"
    assert num_read([*PROMPT, *answer, 5, 9, 9, 9]) == 2, "the beginning of the last text"
    assert num_read(PROMPT) == 0
    assert num_read([7, *PROMPT]) == 9, "nothing in common"
    cache.clear()
    assert num_read([7, *PROMPT]) == 9


@pytest.mark.parametrize(
    ("name", "num_at_border"),
    # Those that the text before does not have; the first reads the text again at the border.
    [("Phi 3, longrope", 45 - 20 + 48), ("Llama, dynamic rope", 45 - 20)],
)
def test_rows_that_depend_on_the_length_are_not_kept(
    name: str, num_at_border: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other = TargetModel(known(name).build()), TargetModel(known(name).build())
    reading = Reading(target, monkeypatch)
    drafter, cache = drafter_for("vanilla", target), PrefixCache()
    # On both sides of the border at 48; the answer to 46 tokens grows over it.
    for length in (20, 46, 20, 60, 20, 70):
        prompt = random_ids(70, seed=4)[:length]
        expected = generate(other, drafter, prompt, max_new_tokens=5).token_ids
        answer = generate(target, drafter, prompt, max_new_tokens=5, prefix_cache=cache)
        assert answer.token_ids == expected
        assert reading.since() == (num_at_border if length == 46 else length - 1)


@pytest.mark.parametrize(
    "change",
    [
        "write",
        "exchange",
        "exchange twice",
        "data",
        "number",
        "swapped rows",
        "buffer",
        "hook before",
        "hook after",
        "prune",
    ],
)
def test_changed_weights_make_all_rows_new(change: str) -> None:
    target = TargetModel(known(LLAMA).build())
    drafter, cache = drafter_for("recycling", target), PrefixCache()
    generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
    layer = target.model.model.layers[0].self_attn.v_proj
    with torch.no_grad():
        if change == "write":
            layer.weight.mul_(-1)
        for _ in range(change.count("twice") + change.count("exchange")):
            layer.weight = torch.nn.Parameter(-0.9 * layer.weight)
        if change == "data":
            layer.weight.data.mul_(-1)
        if change == "number":
            layer.weight.data[3, 5] += 4
        if change == "swapped rows":
            layer.weight.data[:] = layer.weight.data.flip(0)
        if change == "buffer":
            target.model.model.rotary_emb.inv_freq.mul_(0.1)
        if change == "hook before":
            layer.register_forward_pre_hook(lambda module, inputs: (-inputs[0],))
        if change == "hook after":
            layer.register_forward_hook(lambda module, inputs, output: -output)
        if change == "prune":
            prune.l1_unstructured(layer, "weight", amount=0.7)
    answer = generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
    assert answer.token_ids == referee(target, PROMPT, 8)


@pytest.mark.parametrize("has_sparse", [False, True], ids=["dense", "sparse"])
def test_tensors_of_any_kind_are_compared(
    has_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = known(LLAMA).build()
    for name, tensor in {
        "no_number": torch.tensor([float("nan"), 1.0]),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4),
        "complex": torch.ones(2, dtype=torch.complex64),
        "flags": torch.tensor([True, False]),
        "transposed": torch.ones(64, 3).t(),
    }.items():
        model.register_buffer(name, tensor)
    if has_sparse:  # its numbers are not compared, so that nothing is kept
        model.register_buffer("sparse", torch.eye(3).to_sparse())
    target = TargetModel(model)
    reading = Reading(target, monkeypatch)
    drafter, cache = drafter_for("vanilla", target), PrefixCache()
    for expected in (len(PROMPT) - 1, (len(PROMPT) - 1) * has_sparse):
        generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
        assert reading.since() == expected
    target.model.transposed.data[2, 60] = 2
    generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
    assert reading.since() == len(PROMPT) - 1, "one number"


def test_writes_that_pytorch_does_not_count_are_seen() -> None:
    with torch.inference_mode():
        target = TargetModel(known(LLAMA).build())
    drafter, cache = drafter_for("vanilla", target), PrefixCache()
    generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
    with torch.inference_mode():
        target.model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    answer = generate(target, drafter, PROMPT, max_new_tokens=8, prefix_cache=cache)
    with torch.inference_mode():
        assert answer.token_ids == referee(target, PROMPT, 8)


def test_a_text_that_is_left_or_fails_in_a_step_leaves_usable_rows() -> None:
    target = TargetModel(known(LLAMA).build())
    drafter, cache = drafter_for("recycling", target), PrefixCache()
    options = {"max_new_tokens": 20, "prefix_cache": cache}
    steps = model.engine.loop.decode(target, drafter, PROMPT, **options)
    text = [*PROMPT, *next(steps).tokens, *next(steps).tokens]
    forward = target.run

    def interrupted(*arguments: object, **more: object) -> torch.Tensor:
        forward(*arguments, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    target.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    target.run = forward  # type: ignore[method-assign]
    for prompt in ([*text, 5, 6], [*text, *random_ids(30)], PROMPT):
        answer = generate(target, drafter, prompt, **options)
        assert answer.token_ids == referee(target, prompt, 20)


def num_differing() -> int:
    """Count answers that differ from those without a cache, in models full of near-ties.

    Every method meets one of two models.
    """
    count = 0
    for seed in range(2):
        target = model_with_twins(seed, 2)
        expected = turns(target, "vanilla", None)
        for method in list(METHODS)[seed::2]:
            found = turns(target, method, PrefixCache())
            count += sum(one != other for one, other in zip(found, expected, strict=True))
    return count


def test_near_ties_fall_as_without_a_cache() -> None:
    assert num_differing() == 0


def test_without_reading_the_prompt_again_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reference_token = ReferenceRows._reference_token

    def trusting(rows: ReferenceRows, text: list[int], rule: None) -> int:
        rows._num_rows = max(rows._num_rows, rows._prompt_length - 1)
        return reference_token(rows, text, rule)

    monkeypatch.setattr(ReferenceRows, "_reference_token", trusting)
    assert num_differing() > 0, "nothing differs: the test above proves nothing"


def test_sums_of_weights_see_every_change_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of other devices, too, which is torch's own functions."""
    numbers = torch.arange(1.0, 40_001.0)
    for kernel in (weights.short_pass_kernel, lambda: None):
        monkeypatch.setattr(weights, "short_pass_kernel", kernel)
        sums = {weights._sum(numbers.untyped_storage())}
        for change in (
            lambda: numbers.mul_(-1),
            lambda: numbers[7].add_(1),
            lambda: numbers[-1].add_(1),
            lambda: numbers.copy_(numbers.flip(0)),
            lambda: numbers.copy_(numbers.roll(8192)),
        ):
            change()
            sums.add(weights._sum(numbers.untyped_storage()))
        assert len(sums) == 6


def test_kept_texts_have_no_room_for_rows_that_are_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, cache = target_of(LLAMA), PrefixCache()
    prompts = [random_ids(30, seed=seed, vocab_size=64) for seed in range(4)]
    answers = []
    for prompt in prompts:
        drafter = drafter_for("recycling", target)
        answers.append(generate(target, drafter, prompt, max_new_tokens=8, prefix_cache=cache))
    *others, last = cache._kept
    assert [one.cache.capacity for one in others] == [one.num_rows for one in others]
    assert last.cache.capacity > last.num_rows, "the next turn goes on there"
    reading = Reading(target, monkeypatch)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer.token_ids, 5]
        drafter = drafter_for("vanilla", target)
        found = generate(target, drafter, text, max_new_tokens=8, prefix_cache=cache).token_ids
        assert reading.since() <= 3 and found == referee(target, text, 8)
    assert cache.open(target, prompts[0], 40).length >= 8
    fresh = PrefixCache()
    fresh.store(fresh.open(target, prompts[0], 40), prompts[0])
    assert not fresh._kept, "nothing was read"
