r"""Report how the demo model speaks: ended answers, loops, held-out loss.

Answers questions of Spec-Bench's form by greedy decoding and prints, by category, the share of
answers that end by themselves and the share that loop; with a corpus also the held-out loss. Looped
text flatters every drafting method, so the model that ships is held to these figures.

Decoding is plain Hugging Face ``generate``, left padded, no penalty of any kind. An answer loops if
at any point its trailing 24 tokens are periodic with a period of at most 12. A question's second
turn follows the model's own first answer. The table and one JSON line go to stdout.

Example:
    python -m scripts.demo_model.report --model data/demo/model --questions data/demo/question.jsonl
    python -m scripts.demo_model.report --model data/demo/model --corpus corpus.jsonl.gz \
        --questions data/spec_bench/question.jsonl --answers answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.answers.progress import progress
from evaluation.questions.questions import Question, load_questions
from model.commands.command_line import OptionParser, run_command, user_errors
from model.commands.files import check_output, write_whole
from scripts.demo_model.corpus import CorpusConfig, encode_turns, read_rows, split_rows
from scripts.demo_model.generation import continued
from scripts.demo_model.loops import find_loop

BATCH_SIZE = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Asked(NamedTuple):
    """One question, and the benchmark file that it is of."""

    file: str
    question: Question


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The model's answer to one turn."""

    file: str
    question_id: int | str
    category: str
    turn: int
    prompt_tokens: int
    new_tokens: int
    is_ended: bool
    is_looped: bool
    text: str


class Summary(NamedTuple):
    """Figures of one group of answers."""

    answers: int
    ended: float
    looped: float
    mean_tokens: float


class Speaker:
    """A model with its tokenizer, answering in batches."""

    def __init__(self, folder: str, dtype: torch.dtype, max_new_tokens: int, batch: int) -> None:
        """Load the model.

        Args:
            folder: Model folder.
            dtype: Dtype to compute in.
            max_new_tokens: Longest answer.
            batch: Answers decoded at once.

        Raises:
            ValueError: The folder holds no model.
        """
        if not (Path(folder) / "config.json").is_file():
            raise ValueError(f"model: got {folder}, allowed a folder with config.json")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.max_new_tokens, self.batch = max_new_tokens, batch

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat that waits for an answer."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Greedy answers, eos included where it was reached."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        options = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return continued(self.model, prompts, pad, eos, self.batch, **options)

    def answer_turn(
        self, questions: Sequence[Asked], turn: int, earlier: dict[int, str]
    ) -> list[TurnAnswer]:
        """Answer turn ``turn`` of the questions.

        Args:
            questions: Questions that have that turn.
            turn: Index of the turn, 0 or 1.
            earlier: First answers by position in ``questions``; read when ``turn`` is 1.
        """
        prompts = []
        for index, (_, question) in enumerate(questions):
            messages = [{"role": "user", "content": question.turns[0]}]
            if turn == 1:
                messages.append({"role": "assistant", "content": earlier[index]})
                messages.append({"role": "user", "content": question.turns[1]})
            prompts.append(self.prompt_ids(messages))
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: dict[int, TurnAnswer] = {}
        bar = progress(total=len(order), desc=f"turn {turn + 1}")
        for start in range(0, len(order), self.batch):
            chosen = order[start : start + self.batch]
            rows = self.generate([prompts[index] for index in chosen])
            for index, row in zip(chosen, rows, strict=True):
                answers[index] = self._answer(questions[index], turn, prompts[index], row)
            bar.update(len(chosen))
        bar.close()
        return [answers[index] for index in range(len(questions))]

    def _answer(self, asked: Asked, turn: int, prompt: list[int], row: list[int]) -> TurnAnswer:
        return TurnAnswer(
            file=asked.file,
            question_id=asked.question.question_id,
            category=asked.question.category,
            turn=turn,
            prompt_tokens=len(prompt),
            new_tokens=len(row),
            is_ended=row[-1] == self.tokenizer.eos_token_id,
            is_looped=find_loop(row) is not None,
            text=self.tokenizer.decode(row, skip_special_tokens=True).strip(),
        )

    def answer(self, questions: Sequence[Asked]) -> list[TurnAnswer]:
        """Answer every turn (two at most) of every question."""
        first = self.answer_turn(questions, 0, {})
        index = [i for i, asked in enumerate(questions) if len(asked.question.turns) > 1]
        earlier = {place: first[i].text for place, i in enumerate(index)}
        second = self.answer_turn([questions[i] for i in index], 1, earlier) if index else []
        return first + second

    @torch.no_grad()
    def held_out_loss(self, corpus: Path) -> dict[str, float]:
        """Mean loss in nats per token over held-out rows, each alone in its sequence."""
        config = replace(CorpusConfig(), long_length=self.model.config.max_position_embeddings)
        turns = encode_turns(split_rows(read_rows(corpus)).held_out, self.tokenizer, config)
        sums = {"prompt": [0.0, 0], "response": [0.0, 0]}
        for turn in progress(turns, desc="held-out"):
            ids = torch.tensor(
                [[self.tokenizer.bos_token_id, *turn.prompt_ids, *turn.response_ids]]
            )
            logits = self.model(ids).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            cut = len(turn.prompt_ids)
            for name, part in (("prompt", losses[:cut]), ("response", losses[cut:])):
                sums[name][0] += part.sum().item()
                sums[name][1] += len(part)
        response = sums["response"][0] / sums["response"][1]
        both = sum(pair[0] for pair in sums.values()) / sum(pair[1] for pair in sums.values())
        return {"rows": len(turns), "response": round(response, 4), "all_tokens": round(both, 4)}


def summarize(answers: Sequence[TurnAnswer]) -> Summary:
    """Figures of a group of answers."""
    count = len(answers)
    return Summary(
        count,
        round(sum(answer.is_ended for answer in answers) / count, 4),
        round(sum(answer.is_looped for answer in answers) / count, 4),
        round(sum(answer.new_tokens for answer in answers) / count, 1),
    )


def groups(answers: Sequence[TurnAnswer]) -> dict[str, dict[str, Summary]]:
    """Figures by file and category; ``all`` is the whole file."""
    result: dict[str, dict[str, Summary]] = {}
    for file in dict.fromkeys(answer.file for answer in answers):
        members = [answer for answer in answers if answer.file == file]
        names = dict.fromkeys(answer.category for answer in members)
        result[file] = {
            name: summarize([answer for answer in members if answer.category == name])
            for name in names
        }
        result[file]["all"] = summarize(members)
    return result


def print_table(table: dict[str, dict[str, Summary]], max_new_tokens: int) -> None:
    """Print the table; one row a category."""
    print(
        f"ended: eos within {max_new_tokens} tokens; looped: trailing 24 tokens periodic, p <= 12"
    )
    print(f"{'file':<28} {'category':<16} {'answers':>7} {'ended':>7} {'looped':>7} {'tokens':>7}")
    for file, rows in table.items():
        for name, row in rows.items():
            print(
                f"{file:<28} {name:<16} {row.answers:>7} {row.ended:>7.1%} {row.looped:>7.1%} "
                f"{row.mean_tokens:>7.1f}"
            )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = OptionParser(prog="python -m scripts.demo_model.report", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--corpus", type=Path, help="training corpus, for the held-out loss")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="(default: 256)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--answers", type=Path, help="JSONL file for the answers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse_arguments(argv)
    if options.answers:
        check_output(options.answers, "answers")
    questions = [
        Asked(f"{path.parent.name}/{path.name}", question)
        for path in options.questions
        for question in load_questions(path)
    ]
    with user_errors(OSError):
        speaker = Speaker(options.model, DTYPES[options.dtype], options.max_new_tokens, BATCH_SIZE)
    if options.threads:
        torch.set_num_threads(options.threads)
    started = time.perf_counter()
    answers = speaker.answer(questions)
    seconds = time.perf_counter() - started
    if options.answers:
        lines = [json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in answers]
        write_whole(options.answers, "".join(lines))
    table = groups(answers)
    print_table(table, options.max_new_tokens)
    result: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "seconds": round(seconds, 1),
        "files": {f: {n: s._asdict() for n, s in rows.items()} for f, rows in table.items()},
    }
    if options.corpus:
        result["held_out_loss"] = speaker.held_out_loss(options.corpus)
        print("held-out loss (nats/token):", result["held_out_loss"])
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command(main)
