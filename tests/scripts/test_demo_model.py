"""The demo model's recipe: data, loops, and a folder that plain transformers loads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model import SpeculativeDecoder
from model.commands.command_line import UserError
from scripts.demo_model import answers as demo_answers
from scripts.demo_model import command as train_demo_model
from scripts.demo_model.antiloop import (
    Answer,
    AntiLoopConfig,
    escapes_of,
    make_lessons,
    onset,
    repeated,
    unlearn_loops,
    unlikelihood,
)
from scripts.demo_model.corpus import (
    CorpusConfig,
    Row,
    encode_turns,
    is_held_out,
    pack_epoch,
    read_rows,
    train_tokenizer,
)
from scripts.demo_model.loops import find_loop
from scripts.demo_model.training import lr_factor

WORDS = ("the", "a", "cat", "dog", "house", "runs", "sits", "big", "small", "and", "12", "345")


def make_rows(count: int = 400) -> list[Row]:
    """Short random sentences."""
    rng = random.Random(0)

    def sentence(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    return [Row(sentence(3, 12), sentence(3, 30)) for _ in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(make_rows(), vocab_size=320, context=512)


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row._asdict()) + "\n" for row in make_rows()))
    return path


def arguments(corpus_file: Path, folder: Path, **changes: object) -> list[str]:
    """A training run of a few seconds."""
    options: dict[str, object] = {
        "corpus": corpus_file,
        "out": folder / "model",
        "tokens": 20_000,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "intermediate": 48,
        "vocab-size": 320,
        "rounds": 0,
    }
    options |= changes
    return ["--no-compile", *(f"--{name}={value}" for name, value in options.items())]


def test_tokenizer_round_trip_and_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "Grüße, 1234!\n\n  x = [5]\t→ end"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer("cat")["input_ids"][0] == tokenizer.bos_token_id
    messages = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "the dog"},
        {"role": "user", "content": "a house"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<s>USER: the cat ASSISTANT: the dog</s>USER: a house ASSISTANT:"
    system = [{"role": "system", "content": "Be kind."}, messages[0]]
    rendered = tokenizer.apply_chat_template(system, tokenize=False)
    assert rendered == "<s>Be kind. USER: the cat "


def test_training_text_equals_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    config = CorpusConfig(system_share=0.0, two_turn_share=0.0, short_length=64, long_length=128)
    row = Row("the cat", "sees 12 dogs.")
    short, _ = pack_epoch(encode_turns([row], tokenizer, config), tokenizer, config, seed=0)
    chat = [
        {"role": "user", "content": row.prompt},
        {"role": "assistant", "content": row.response},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert short.token_ids[0, : len(expected)].tolist() == expected
    assert short.weights[0, len(expected) - 1] == config.eos_weight
    assert (short.token_ids[0, len(expected) :] == tokenizer.pad_token_id).all()


def test_packing_keeps_every_chat_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    config = CorpusConfig(system_share=0.1, two_turn_share=0.5, short_length=96, long_length=192)
    turns = encode_turns(make_rows(), tokenizer, config)
    short, long = pack_epoch(turns, tokenizer, config, seed=3)
    ends = sum(int((part.token_ids == tokenizer.eos_token_id).sum()) for part in (short, long))
    starts = sum(int((part.token_ids == tokenizer.bos_token_id).sum()) for part in (short, long))
    assert ends >= len(turns) - 1  # one turn may wait for a partner when the epoch ends
    assert starts < ends  # some chats have two turns
    assert (short.token_ids[:, 0] == tokenizer.bos_token_id).all()
    again, _ = pack_epoch(turns, tokenizer, config, seed=3)
    assert np.array_equal(again.token_ids, short.token_ids)
    other, _ = pack_epoch(turns, tokenizer, config, seed=4)
    assert not np.array_equal(other.token_ids[:5], short.token_ids[:5])


def test_held_out_prompts_are_never_trained_on() -> None:
    rows = make_rows()
    held_out = {row.prompt for row in rows if is_held_out(row)}
    assert 0 < len(held_out) < len(rows) / 10
    assert all(is_held_out(Row(prompt, "another answer")) for prompt in held_out)


def slow_find_loop(token_ids: list[int]) -> int | None:
    """The definition, word for word."""
    for end in range(24, len(token_ids) + 1):
        tail = token_ids[end - 24 : end]
        for period in range(1, 13):
            if all(tail[i] == tail[i - period] for i in range(period, 24)):
                return end
    return None


def test_find_loop_equals_its_definition() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        start = [rng.randrange(9) for _ in range(rng.randrange(20))]
        unit = [rng.randrange(9) for _ in range(rng.randint(1, 14))]
        repeats = rng.randint(1, 8)
        text = [*start, *(unit * repeats), *start]
        loop = find_loop(text)
        assert (loop.position if loop else None) == slow_find_loop(text)
        found += loop is not None
    assert 20 < found < 180


def test_lessons_mark_the_repetition_and_the_way_out() -> None:
    assert repeated([1, 2, 3, 1, 2, 3, 1], ngram=3) == [False] * 5 + [True, True]
    config = AntiLoopConfig(max_prompt=4, max_new_tokens=60, ngram=3)
    text = [9, 8, *([5, 6, 7] * 12)]
    assert onset(text, ngram=3) == 5, "after the first round of the loop"
    looping, other = Answer([1, 4], text), Answer([1, 3], text)
    escape = Answer([1, 4], [9, 8, 5, 6, 7, 11, 2], num_kept=5)
    (lesson,) = make_lessons([looping, other], [escape, None], config, pad=0)
    rows = {tuple(row[row > 0].tolist()): index for index, row in enumerate(lesson.token_ids)}
    assert set(rows) == {(1, 4, *text), (1, 3, *text), (1, 4, 9, 8, 5, 6, 7, 11, 2), ()}
    marked = lesson.unlikely[rows[(1, 4, *text)]].nonzero().flatten().tolist()
    assert marked == list(range(9, len(text) + 2))
    wanted = rows[1, 4, 9, 8, 5, 6, 7, 11, 2]
    assert lesson.token_ids[wanted][lesson.wanted[wanted] > 0].tolist() == [11, 2]
    assert lesson.wanted.sum() == 2


def test_endless_answers_without_a_loop_are_cut_where_they_repeat_or_in_the_middle() -> None:
    assert onset([1, 2, 3, 4, 5, 1, 2, 3, 9], ngram=3) == 7
    assert onset(list(range(10)), ngram=3) == 5


def test_a_way_out_is_sampled_and_ends_without_a_loop() -> None:
    looping = Answer([1, 4], [9, 8, *([5, 6, 7] * 12)])
    config = AntiLoopConfig(escapes=3, max_new_tokens=60, ngram=3)
    asked: list[list[int]] = []

    def sample(texts: list[list[int]]) -> list[list[int]]:
        asked.extend(texts)
        return [[11, 2], [5, 6, 7] * 20, [11, 12, 2]]

    (escape,) = escapes_of([looping], sample, 2, config)
    assert asked == [[1, 4, 9, 8, 5, 6, 7]] * 3
    assert escape == Answer([1, 4], [9, 8, 5, 6, 7, 11, 12, 2], num_kept=5), "the longest"
    assert escapes_of([looping], lambda _: [[5, 6, 7] * 20] * 3, 2, config) == [None]


def test_unlikelihood_is_minus_log_of_the_rest() -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.9])
    expected = -torch.log(1 - probabilities)
    torch.testing.assert_close(unlikelihood(-probabilities.log()), expected, atol=1e-3, rtol=0)


def test_learning_rate_warms_up_stays_and_falls() -> None:
    assert lr_factor(5, 0.0) == pytest.approx(0.1)
    assert lr_factor(60, 0.5) == 1.0
    assert lr_factor(60, 0.7) == pytest.approx(0.5)
    assert lr_factor(60, 1.0) == 0.0


def test_written_folder_loads_and_has_a_log(corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    run = arguments(corpus_file, tmp_path, tokens=5000)
    assert train_demo_model.main(run) == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["rope_theta"] == 10000.0
    log = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    assert log[-1]["held_out_response"] > 0 and log[-1]["tokens"] >= 5000
    assert "token_type_ids" not in AutoTokenizer.from_pretrained(folder)("cat")
    with pytest.raises(UserError, match="which holds a model; give a new folder"):
        train_demo_model.main(run)


def test_a_model_with_recurrent_states_is_trained_and_drafted_for(
    corpus_file: Path, tmp_path: Path
) -> None:
    if not hasattr(transformers, "Qwen3_5TextConfig"):
        with pytest.raises(UserError, match="recurrent: got transformers"):
            train_demo_model.main([*arguments(corpus_file, tmp_path), "--recurrent"])
        return
    options = arguments(corpus_file, tmp_path, layers=4, tokens=120_000)
    assert train_demo_model.main([*options, "--recurrent"]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "model/train_log.jsonl").open()]
    assert losses[-1] < losses[0]
    decoder = SpeculativeDecoder.from_pretrained(
        str(tmp_path / "model"), method="recycling", dtype=torch.float32
    )
    kinds = decoder.target.config.layer_types
    assert kinds == ["linear_attention"] * 3 + ["full_attention"]
    assert len(decoder.target.mixers._modules) == 3
    ids = torch.tensor([[1, 5, 6, 7]])
    expected = decoder.target.model.generate(ids, max_new_tokens=20, do_sample=False)
    assert decoder.generate(ids, max_new_tokens=20).token_ids == expected[0, 4:].tolist()


def test_a_round_against_loops_runs_and_is_counted(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = AntiLoopConfig(
        rounds=1, answers=8, batch_size=4, max_prompt=40, max_new_tokens=40, min_response=4
    )
    monkeypatch.setattr(
        train_demo_model, "unlearn_loops", lambda trainer, _: unlearn_loops(trainer, small)
    )
    run = arguments(corpus_file, tmp_path, tokens=5000)
    assert train_demo_model.main(run) == 0
    log = (tmp_path / "model" / "train_log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["round"] == 1


class Parrot:
    """Repeats what it is asked; ends its answers but those to prompts with a 3."""

    device = "cpu"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, fails_after: int) -> None:
        self.tokenizer, self.fails_after = tokenizer, fails_after
        self.asked: list[str] = []

    def generate(self, ids: torch.Tensor, **_: object) -> torch.Tensor:
        rows = []
        for row in ids.tolist():
            if len(self.asked) == self.fails_after:
                raise KeyboardInterrupt
            text = self.tokenizer.decode(row, skip_special_tokens=True)
            self.asked.append(text.removeprefix("USER: ").removesuffix(" ASSISTANT:"))
            answer = self.tokenizer(self.asked[-1], add_special_tokens=False)["input_ids"]
            end = self.tokenizer.eos_token_id if "3" not in self.asked[-1] else row[0]
            rows.append([*row, *answer, end])
        width = max(map(len, rows))
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def test_answers_that_end_become_a_corpus_and_a_cut_run_goes_on(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_answers, "BATCH_SIZE", 1)
    prompts, out = ["cat", "3 dogs", "a house", "runs", "sits"], tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        demo_answers.write_answers(Parrot(tokenizer, 2), tokenizer, prompts, out, 9)
    assert not out.exists()
    part = out.with_name("answers.jsonl.part")
    part.write_text(part.read_text() + '{"prompt": "a hou')  # killed while it wrote
    parrot = Parrot(tokenizer, fails_after=9)
    demo_answers.write_answers(parrot, tokenizer, prompts, out, 9)
    assert parrot.asked == prompts[2:], "nothing is answered twice"
    assert read_rows(out) == [Row(p, p) for p in ("cat", "a house", "runs", "sits")]
    assert not part.exists()


def test_a_model_answers_the_prompts_of_a_corpus(corpus_file: Path, tmp_path: Path) -> None:
    assert train_demo_model.main(arguments(corpus_file, tmp_path, tokens=5000)) == 0
    out = tmp_path / "answers.jsonl"
    options = [
        "--model",
        str(tmp_path / "model"),
        "--dtype",
        "float32",
        "--corpus",
        str(corpus_file),
        "--out",
        str(out),
    ]
    assert demo_answers.main([*options, "--max-new-tokens", "40"]) == 0
    asked = {row.prompt for row in make_rows()}
    assert {json.loads(line)["prompt"] for line in out.read_text().splitlines()} <= asked
    with pytest.raises(UserError, match=r"out: got nowhere/answers\.jsonl; allowed"):
        demo_answers.main([*options[:6], "--out", "nowhere/answers.jsonl"])
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        demo_answers.main([*options[:4], "--corpus", "missing.jsonl", *options[6:]])
    with pytest.raises(UserError, match="none"):
        demo_answers.main(["--model-path", str(tmp_path / "none"), *options[2:]])


def test_a_given_tokenizer_is_kept(corpus_file: Path, tmp_path: Path) -> None:
    given, tokenizer = tmp_path / "given", train_tokenizer(make_rows(), 310, context=512)
    tokenizer.save_pretrained(given)
    size = len(tokenizer)
    options = {"tokenizer": given, "tokens": 5000}
    assert train_demo_model.main(arguments(corpus_file, tmp_path, **options)) == 0
    written = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert written.get_vocab() == tokenizer.get_vocab()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "missing"}, "tokenizer: got missing; allowed: a folder"),
        ({"corpus": "missing.jsonl"}, "missing.jsonl"),
    ],
)
def test_bad_options_are_refused(
    corpus_file: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_demo_model.main(arguments(corpus_file, tmp_path, **change))


def test_bad_corpus_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2"):
        read_rows(path)
