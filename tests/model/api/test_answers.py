"""Many prompts: each answer is the one of `generate`, whatever comes before, beside and after it.

Run: pytest tests/model/api/test_answers.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from model import GenerateOutput, SpeculativeDecoder, TokenRecycling
from model.engine.sequence import Request
from tests.hang import HANG
from tests.model.api.test_decoder import decoder_for, demo
from tests.pairs import pairs

TOPICS = ("the sea", "rain", "your name", "a boat and its people", "music")
PROMPTS = [f"USER: Tell me about {topic}. ASSISTANT:" for topic in TOPICS]
METHODS = ("vanilla", "recycling", "pld", "hybrid")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 14},
    "limits": {"max_new_tokens": [3, 14, 1, 9, 20]},
    "seeds": {"max_new_tokens": 10, "temperature": 1.2, "top_k": 50, "top_p": 0.95, "seed": 4},
    "stop strings": {"max_new_tokens": 20, "stop_strings": ["e", "@@@"]},
    "processors": {
        "max_new_tokens": 12,
        "logits_processors": [RepetitionPenaltyLogitsProcessor(1.5)],
    },
}


@lru_cache
def one_by_one(name: str) -> list[GenerateOutput]:
    """Return what plain decoding answers under an option set, one prompt after another."""
    decoder = decoder_for("vanilla", *demo())
    found = []
    for place, prompt in enumerate(PROMPTS):
        options = dict(OPTIONS[name])
        if name == "limits":
            options["max_new_tokens"] = options["max_new_tokens"][place]
        if name == "seeds":
            options["seed"] += place
        found.append(decoder.generate(prompt, **options))
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize(("name", "method"), pairs(list(OPTIONS), METHODS))
def test_answers_are_those_of_generate(name: str, method: str, batch_size: int) -> None:
    decoder = decoder_for(method, *demo())
    found = decoder.generate_all(PROMPTS, batch_size=batch_size, **OPTIONS[name])
    expected = one_by_one(name)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text and torch.equal(one.sequences, other.sequences)
        assert one.stop_reason == other.stop_reason
        assert sum(one.accept_lengths) == len(one.token_ids)
        assert one.prefill_time > 0 and one.decode_time > 0


def test_every_option_set_changes_the_answers() -> None:
    texts = [tuple(one.text for one in one_by_one(name)) for name in OPTIONS]
    assert len({*texts}) == len(OPTIONS), "an option without effect proves nothing"


def test_answers_come_as_they_finish_and_all_in_the_order_of_the_prompts() -> None:
    decoder = decoder_for("vanilla", *demo())
    words = {"batch_size": 3, "max_new_tokens": [9, 3, 6, 1, 2]}
    outputs = dict(decoder.as_completed(PROMPTS, **words))
    assert [*outputs] == [1, 3, 2, 4, 0]
    in_order = decoder.generate_all(PROMPTS, **words)
    assert [one.token_ids for one in in_order] == [
        outputs[index].token_ids for index in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("form", ["tuple", "array", "tensor", "outputs of a tokenizer"])
def test_prompts_come_in_any_form(form: str) -> None:
    model, tokenizer = demo()
    decoder = decoder_for("pld", model, tokenizer)
    rows = [tokenizer(prompt).input_ids[:6] for prompt in PROMPTS[:2]]
    prompts: Any = {
        "tuple": tuple(rows),
        "array": np.array(rows),
        "tensor": torch.tensor(rows),
        "outputs of a tokenizer": [{"input_ids": [row]} for row in rows],
    }[form]
    limits: Any = {"array": np.array([2, 4]), "tuple": range(2, 5, 2)}.get(
        form, torch.tensor([2, 4])
    )
    found = decoder.generate_all(prompts, max_new_tokens=limits)
    assert [len(one.token_ids) for one in found] == [2, 4]
    assert [one.sequences[0, :6].tolist() for one in found] == rows


def test_no_prompts_have_no_answers() -> None:
    decoder = decoder_for("pld", *demo())
    assert decoder.generate_all([]) == [] and list(decoder.as_completed(iter(()))) == []


# Prompts are read as far as there is room


class Endless:
    """Prompts without end; knows how many were read."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Iterator[str]:
        for number in count():
            self.num_read += 1
            yield PROMPTS[number % len(PROMPTS)]


def test_an_endless_iterable_is_read_as_far_as_there_is_room() -> None:
    decoder = decoder_for("vanilla", *demo())
    prompts = Endless()
    source = iter(prompts)
    answers = decoder.as_completed(source, batch_size=2, max_new_tokens=4)
    assert prompts.num_read == 0, "nothing is read before the first answer is asked for"
    for num_taken in range(1, 8):
        index, output = next(answers)
        assert index < prompts.num_read <= num_taken + 1, "one more than was taken is under way"
        assert len(output.token_ids) <= 4
    answers.close()
    assert next(source) == PROMPTS[(prompts.num_read - 1) % len(PROMPTS)], "it stays the caller's"


def test_prompts_may_follow_from_answers() -> None:
    """As the turns of several chats: a place is free when its answer was taken, and then a prompt is read."""
    model, tokenizer = demo()
    decoder = decoder_for("recycling", model, tokenizer)
    begun = [tokenizer(prompt).input_ids for prompt in PROMPTS[:2]]
    waiting, asked = deque(begun), list(begun)

    def turns() -> Iterator[list[int]]:
        while waiting:
            yield waiting.popleft()

    ended = []
    for index, output in decoder.as_completed(turns(), batch_size=2, max_new_tokens=5):
        ended.append(output)
        if index < 4:
            asked.append([*output.sequences[0].tolist(), *tokenizer(" USER: And?").input_ids])
            waiting.append(asked[-1])
    single = decoder_for("vanilla", model, tokenizer)
    expected = [single.generate(prompt, max_new_tokens=5).sequences.tolist() for prompt in asked]
    assert len(asked) == 6
    assert sorted(one.sequences.tolist() for one in ended) == sorted(expected)


# Errors


def bad_prompts() -> list[tuple[Any, str]]:
    """Return prompts that cannot be used, each with its error."""
    return [
        ([9_999_999], "got token 9999999; allowed: 0 to 8191"),
        ([], "got no token; allowed: at least one"),
        ([5] * 5000, "got 5000 tokens; allowed: fewer than the model's context"),
        (7, "got int; allowed: text, chat messages"),
        ([{"role": "user"}], "the chat template does not take these messages"),
    ]


@pytest.mark.parametrize(("prompt", "message"), bad_prompts())
def test_a_prompt_that_cannot_be_used_is_raised_in_its_turn(prompt: Any, message: str) -> None:
    decoder = decoder_for("pld", *demo())
    prompts = [PROMPTS[0], PROMPTS[1], prompt, PROMPTS[2]]
    answers = decoder.as_completed(iter(prompts), batch_size=1, max_new_tokens=3)
    assert [next(answers)[0], next(answers)[0]] == [0, 1]
    with pytest.raises(ValueError, match=f"^prompt 2: {message}"):
        next(answers)
    assert list(answers) == [], "the first error ends it"
    assert decoder.generate(PROMPTS[0], max_new_tokens=3).token_ids


@pytest.mark.parametrize(("prompt", "message"), bad_prompts())
def test_a_list_is_checked_before_the_first_token(
    prompt: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_for("pld", *demo())
    monkeypatch.setattr(decoder.target, "forward", None)
    monkeypatch.setattr(decoder.target, "prefill", None)
    prompts = [*PROMPTS, prompt]
    for ask in (
        lambda: decoder.as_completed(prompts),
        lambda: decoder.as_completed(tuple(prompts)),
        lambda: decoder.generate_all(prompts),
        lambda: decoder.generate_all(iter(prompts)),
    ):
        with pytest.raises(ValueError, match=f"^prompt 5: {message}"):
            ask()


@pytest.mark.parametrize("error", [ArithmeticError("of a processor"), KeyboardInterrupt()])
def test_answers_that_are_done_are_on_the_error(error: BaseException) -> None:
    decoder = decoder_for("pld", *demo())
    last = demo()[1](PROMPTS[4]).input_ids

    def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0].tolist() == last:
            raise error
        return scores

    words: dict[str, Any] = {"batch_size": 2, "max_new_tokens": [2, 3, 2, 4, 3]}
    expected = decoder.generate_all(PROMPTS, **words)
    with pytest.raises(type(error)) as raised:
        decoder.generate_all(PROMPTS, **words, logits_processors=[failing])
    done = vars(raised.value)["answers"]
    assert set(done) >= {0, 1, 2} and 4 not in done
    assert all(one.token_ids == expected[index].token_ids for index, one in done.items())


class Failing:
    """A processor that fails at one prompt, after some tokens."""

    def __init__(self, prompt_ids: list[int], length: int) -> None:
        self.prompt_ids, self.length = prompt_ids, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores as they are."""
        text = input_ids[0].tolist()
        if text[: len(self.prompt_ids)] == self.prompt_ids and len(text) >= self.length:
            raise ArithmeticError("failed in a processor")
        return scores


def failing() -> Failing:
    """Return one that fails in the midst of the second answer."""
    prompt_ids = demo()[1](PROMPTS[1]).input_ids
    return Failing(prompt_ids, len(prompt_ids) + 5)


@pytest.mark.parametrize("method", ["recycling", "hybrid"])
def test_errors_stand_in_the_place_of_answers_and_the_others_go_on(method: str) -> None:
    decoder = decoder_for(method, *demo())
    bad = [prompt for prompt, _ in bad_prompts()]
    prompts = [*PROMPTS[:2], *bad, *PROMPTS[2:]]
    for batch_size in (1, 3):
        found: list[Any] = decoder.generate_all(
            prompts,
            batch_size=batch_size,
            max_new_tokens=14,
            logits_processors=[failing()],
            return_exceptions=True,
        )
        for index, (_, message) in enumerate(bad_prompts(), start=2):
            assert isinstance(found[index], ValueError)
            assert str(found[index]).startswith(f"prompt {index}: {message}")
        assert isinstance(found[1], ArithmeticError)
        expected = one_by_one("greedy")
        good = [found[0], *found[2 + len(bad) :]]
        assert [one.token_ids for one in good] == [
            one.token_ids for one in (expected[0], *expected[2:])
        ]


def test_what_a_processor_raises_is_raised_and_the_decoder_is_free() -> None:
    decoder = decoder_for("recycling", *demo())
    words: dict[str, Any] = {"max_new_tokens": 14, "logits_processors": [failing()]}
    found = []
    with pytest.raises(ArithmeticError, match="failed in a processor") as error:
        for indexed in decoder.as_completed(PROMPTS, batch_size=2, **words):
            found.append(indexed)
    assert all(index != 1 for index, _ in found)
    assert "at prompt 1" in getattr(error.value, "__notes__", ["at prompt 1"])
    with ThreadPoolExecutor(1) as pool:  # another thread, which would have to wait
        pool.submit(decoder.generate, PROMPTS[0], max_new_tokens=2).result(timeout=HANG)


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_what_the_iterable_raises_comes_when_the_texts_under_way_have_ended(
    return_exceptions: bool,
) -> None:
    def broken() -> Iterator[str]:
        yield from PROMPTS[:3]
        raise OSError("no more")

    decoder = decoder_for("pld", *demo())
    answers = decoder.as_completed(
        broken(), batch_size=8, max_new_tokens=4, return_exceptions=return_exceptions
    )
    assert sorted(index for index, _ in (next(answers) for _ in range(3))) == [0, 1, 2]
    with pytest.raises(OSError, match="no more"):
        next(answers)


def test_limits_of_many_bound_other_arguments() -> None:
    decoder = decoder_for("pld", *demo())
    words: dict[str, Any] = {"min_new_tokens": 270, "max_new_tokens": [271, 270]}
    found = decoder.generate_all([[5, 6], [7, 8]], **words)
    assert [len(one.token_ids) for one in found] == [271, 270]


@pytest.mark.parametrize("num_limits", [2, 4])
def test_limits_are_as_many_as_prompts(num_limits: int) -> None:
    decoder = decoder_for("pld", *demo())
    limits = [2] * num_limits
    for prompts, number in ((PROMPTS[:3], "3"), (iter(PROMPTS[:3]), "an unknown number of")):
        said = f"^max_new_tokens: got {num_limits} limits for {number} prompts; allowed: one for"
        with pytest.raises(ValueError, match=said):
            decoder.as_completed(prompts, max_new_tokens=limits)  # before anything runs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0; allowed: integers of 1 or more"),
        ({"batch_size": True}, "batch_size: got True; allowed: integers of 1 or more"),
        ({"batch_size": "2"}, "batch_size: got '2'; allowed"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; allowed"),
        ({"max_new_tokens": "5"}, "max_new_tokens: got '5'; allowed"),
        ({"max_new_tokens": [5, 0]}, r"max_new_tokens\[1\]: got 0; allowed: integers of 1 or more"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"logits_processors": 3}, "logits_processors: got 3; allowed: a list of functions"),
        ({"seed": "a"}, "seed: got 'a'"),
        ({"stop_strings": [""]}, "stop_strings: got"),
        ({"prompts": PROMPTS[0]}, "prompts: got a str; allowed: several prompts, such as a list"),
        ({"prompts": {"input_ids": [[5]]}}, "prompts: got a dict; allowed: several prompts"),
        ({"prompts": 5}, "prompts: got a int; allowed: several prompts"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: got -1; allowed: integers of 0 to 8191"),
        (
            {"min_new_tokens": 400, "max_new_tokens": 300},
            "prompt 0: min_new_tokens: got 400; allowed: at most 300",
        ),
        ({"n": 0}, "n: got 0; allowed: integers of 1 or more"),
        ({"n": 2}, "n: got 2 with greedy decoding; allowed: a temperature above 0, or 1"),
    ],
)
def test_a_wrong_value_is_one_clear_error_at_once(words: dict[str, Any], message: str) -> None:
    decoder = decoder_for("pld", *demo())
    words = {"prompts": PROMPTS[:2]} | words
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.as_completed(**words)
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.generate_all(**words)


@pytest.mark.parametrize("name", ["as_completed", "generate_all"])
def test_an_argument_that_there_is_not_is_named(name: str) -> None:
    function: Any = getattr(decoder_for("pld", *demo()), name)
    with pytest.raises(TypeError, match=f"^num_beams: not an argument of decoder.{name}; allowed"):
        function(PROMPTS, num_beams=2)
    with pytest.raises(TypeError, match=f"decoder.{name}: got 'batchsize'; .*mean batch_size"):
        function(PROMPTS, batchsize=2)


def test_generate_says_where_several_prompts_go() -> None:
    decoder: Any = decoder_for("pld", *demo())
    for word in ("batch_size", "n"):
        with pytest.raises(TypeError, match=rf"^{word}: .*; allowed: generate_all\(prompts"):
            decoder.generate(PROMPTS[0], **{word: 4})
    for prompts in (PROMPTS, [[1, 2], [3, 4]], torch.ones(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"^prompt: got .*; several: generate_all\(prompts"):
            decoder.generate(prompts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_that_keep_the_state_of_a_text_are_refused(temperature: float) -> None:
    model, tokenizer = demo()
    guided = [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)]
    decoder = decoder_for("pld", model, tokenizer)
    said = r"^logits_processors: got a Unbatched.*, which keeps the state of one"
    with pytest.raises(ValueError, match=said):
        decoder.as_completed(PROMPTS, temperature=temperature, logits_processors=guided)


def test_a_model_that_was_changed_is_refused_whatever_is_returned() -> None:
    model, tokenizer = demo()
    decoder = decoder_for("pld", model, tokenizer)
    answers = decoder.as_completed(PROMPTS, batch_size=1, max_new_tokens=2, return_exceptions=True)
    next(answers)
    model.train()
    try:
        with pytest.raises(ValueError, match="model: is in training mode"):
            next(answers)
    finally:
        model.eval()


# Draws, memory, turns


def test_without_a_seed_the_draws_are_of_torchs_global_generator() -> None:
    decoder = decoder_for("vanilla", *demo())
    words = {"max_new_tokens": 5, "temperature": 1.5}
    texts = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append([one.token_ids for one in decoder.generate_all(PROMPTS, **words)])
    assert texts[0] == texts[1] != texts[2]
    before = torch.get_rng_state()
    decoder.generate_all(PROMPTS, seed=1, **words)
    assert torch.equal(torch.get_rng_state(), before), "with a seed it is left alone"


def test_what_is_learned_is_shared_and_stays() -> None:
    decoder = decoder_for("recycling-averaged", *demo())
    first, again = decoder.generate_all(PROMPTS[:1] * 2, batch_size=1, max_new_tokens=20)
    assert len(again.steps) < len(first.steps), "the second should know the text"
    assert decoder.drafter.memory()["adjacency"].any()
    assert len(decoder.generate(PROMPTS[0], max_new_tokens=20).steps) == len(again.steps)


def test_without_sharing_each_text_begins_with_a_copy_of_what_is_known() -> None:
    decoder = decoder_for("recycling", *demo())
    decoder.generate(PROMPTS[0], max_new_tokens=12)
    known = decoder.drafter.memory()["adjacency"]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    found = decoder.generate_all(prompts, batch_size=2, max_new_tokens=12, shares_memory=False)
    assert torch.equal(decoder.drafter.memory()["adjacency"], known)
    for prompt, output in zip(prompts, found, strict=True):
        expected = decoder.session().generate(prompt, max_new_tokens=12)
        assert output.accept_lengths == expected.accept_lengths


@pytest.mark.parametrize("shares_memory", [True, False])
def test_with_a_cold_start_each_text_begins_with_nothing(shares_memory: bool) -> None:
    model, tokenizer = demo()
    cold = TokenRecycling(model, tokenizer, start="cold", tree_version="2.2.2", policy="average")
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    expected = [cold.generate(prompt, max_new_tokens=12).accept_lengths for prompt in prompts]
    found = cold.generate_all(prompts, batch_size=2, max_new_tokens=12, shares_memory=shares_memory)
    assert [one.accept_lengths for one in found] == expected
    assert max(map(max, expected)) > 1, "nothing was ever accepted"


def test_answers_and_other_texts_wait_for_each_other() -> None:
    decoder = decoder_for("pld", *demo())
    expected = [one.token_ids for one in one_by_one("greedy")]

    def request(number: int) -> bool:
        if number % 3 == 0:
            found = decoder.generate_all(PROMPTS[:3], batch_size=2, max_new_tokens=14)
            return [one.token_ids for one in found] == expected[:3]
        if number % 3 == 1:
            place = number % len(PROMPTS)
            return decoder.generate(PROMPTS[place], max_new_tokens=14).token_ids == expected[place]
        for index, output in decoder.as_completed(PROMPTS, batch_size=3, max_new_tokens=14):
            return output.token_ids == expected[index]  # and leaves
        return False

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(request, range(9)))


@pytest.mark.parametrize("way", ["leave", "close", "last answer"])
def test_answers_that_are_over_free_the_decoder(way: str) -> None:
    decoder = decoder_for("recycling", *demo())
    answers = decoder.as_completed(PROMPTS[:3], batch_size=2, max_new_tokens=4)
    if way == "leave":
        for _ in answers:
            break
        del answers
    elif way == "close":
        next(answers)
        answers.close()
    else:
        for _ in range(3):
            next(answers)
    with ThreadPoolExecutor(1) as pool:  # another thread, which would have to wait
        pool.submit(decoder.generate, PROMPTS[0], max_new_tokens=2).result(timeout=HANG)


def test_a_text_that_takes_the_turn_ends_the_answers() -> None:
    decoder = decoder_for("recycling", *demo())
    answers = decoder.as_completed(PROMPTS, batch_size=2, max_new_tokens=[2, 9, 9, 9, 9])
    next(answers)
    expected = one_by_one("greedy")[2].token_ids
    assert decoder.generate(PROMPTS[2], max_new_tokens=14).token_ids == expected
    with pytest.raises(RuntimeError, match="one text at a time"):
        next(answers)
    assert decoder.generate(PROMPTS[2], max_new_tokens=14).token_ids == expected


def test_progress_goes_to_standard_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = decoder_for("pld", *demo())
    words: dict[str, Any] = {"max_new_tokens": 2, "return_exceptions": True}
    decoder.generate_all(PROMPTS[:3], **words)
    assert capsys.readouterr() == ("", "")
    decoder.generate_all([*PROMPTS[:2], []], **words, show_progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "3/3" in shown.err
    assert len(list(decoder.as_completed(iter(PROMPTS[:2]), **words, show_progress=True))) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "2/?" in shown.err


def test_settings_of_the_checkpoint_that_do_not_count_are_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = demo()
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.3)
    decoder = SpeculativeDecoder(model, tokenizer, "pld")
    for _ in range(2):
        decoder.generate_all(PROMPTS[:2], max_new_tokens=2)
    assert caplog.text.count("repetition_penalty=1.3 apply only to the model's own generate") == 1


def test_a_text_that_is_removed_leaves_its_place_and_the_turn() -> None:
    decoder = decoder_for("recycling", *demo())
    expected = decoder.generate(PROMPTS[0], max_new_tokens=12).token_ids
    batch = decoder.queue.batch(2)
    for key, prompt in enumerate(PROMPTS[:2]):
        batch.add(key, Request(demo()[1](prompt).input_ids, 12))
    found = [event.record for event in batch.step() if event.key == 0]
    batch.remove(1)
    assert len(batch) == 1 and batch.has_capacity
    while len(batch):
        found += [event.record for event in batch.step()]
    assert [token for record in found if record for token in record.tokens] == expected
    batch.add("more", Request([5, 6], 3))
    batch.remove("more")
    assert decoder.generate(PROMPTS[0], max_new_tokens=12).token_ids == expected, "its turn"
