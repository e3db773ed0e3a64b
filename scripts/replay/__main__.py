r"""Record once, replay anywhere: score drafters without the model.

`record` answers questions greedily and keeps the likeliest tokens after every text on the way.
`run` decodes the same questions with any train-free drafter, template, k, number of nodes or start,
through the one loop, with the recorded rows in place of the model. Texts that nobody asked about
before are missing; with `--extend` the model is asked about them, and they stay in the file.

Examples:
    python -m scripts.replay record --out demo.replay --num-questions 8
    python -m scripts.replay run demo.replay --extend \
        --drafters recycling "recycling-averaged --start cold" "hybrid --budget fixed --num-nodes 16" pld
    python -m scripts.replay run demo.replay --drafters "recycling-averaged --start cold"  # recorded by now
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evaluation.answers.record import git_commit, model_fingerprint
from evaluation.inference.config import AnswerOptions, QuestionOptions
from evaluation.questions.conversation import (
    Conversation,
    Message,
    asked_ids,
    check_system,
    choose_conversation,
)
from evaluation.questions.questions import Question, load_questions, question_file_of
from evaluation.reporting.tables import figure_text, json_line, markdown_table
from model.backends.proofs.support import eos_ids_of
from model.backends.target import TargetModel
from model.commands.command_line import OptionParser, UserError, add_options, config_of, run_command
from model.commands.files import check_output, refuse_outputs
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.machine.timing import progress
from scripts.replay.recording import RecordedTurn, Recording, Source
from scripts.replay.scores import check_replayable, drafter_from, figures, replay, score
from scripts.replay.target import ReplayTarget, load_recorded_model, refuse_unrecordable

# Likeliest tokens kept of every row, by default.
TOP_K = 32
# Rows after the limit that drafts and drafters' own overrun may reach.
REACH = 256


def build_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m scripts.replay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record", help="answer questions and keep the rows")
    record.add_argument("--out", required=True, help="file to write")
    add_options(record, ModelOptions, ("model_path", "dtype", "device", "threads"))
    add_options(record, QuestionOptions, ("bench_name", "question_file", "num_questions"))
    record.add_argument("--max-new-tokens", type=int, default=128, help="(%(default)s)")
    record.add_argument(
        "--top-k", type=int, default=TOP_K, help="likeliest tokens kept (%(default)s)"
    )
    run = commands.add_parser("run", help="score drafters on a recording")
    run.add_argument("recording", help="file of `record`")
    run.add_argument(
        "--drafters", nargs="+", required=True, help='methods with options: "pld --match latest"'
    )
    run.add_argument("--extend", action="store_true", help="ask the model for what is missing")
    add_options(run, ModelOptions, ("threads",))
    return parser


def record(args: argparse.Namespace) -> tuple[Recording, TargetModel]:
    """Answer questions greedily; return the recording and the model."""
    if args.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: got {args.max_new_tokens}; allowed: 1 or more")
    options = config_of(ModelOptions, vars(args))
    file = question_file(args)
    questions = load_questions(file, count=config_of(QuestionOptions, vars(args)).num_questions)
    model = check_model(options)
    conversation = choose_conversation(
        AnswerOptions().conv_template, options.model_path, model.tokenizer
    )
    check_system(conversation, questions, options.model_path)
    target = load_target(options, model)
    if not 2 <= args.top_k <= target.vocab_size:
        raise UserError(f"top_k: got {args.top_k}; allowed: 2 to {target.vocab_size}")
    source = Source(
        model_path=options.model_path,
        model_fingerprint=model_fingerprint(options.model_path, model.hf_config),
        dtype=str(model.dtype).removeprefix("torch."),
        git_commit=git_commit(),
        vocab_size=target.vocab_size,
        top_k=args.top_k,
        chain_only=target.chain_only,
        max_new_tokens=args.max_new_tokens,
        eos_ids=tuple(sorted(eos_ids_of(target.model, model.tokenizer) | conversation.stop_ids)),
        # The benchmark's name, if the file lies in its folder.
        questions=file.parent.name if file.name == "question.jsonl" else file.name,
    )
    recording = Recording(source)
    for question in progress(questions, unit="question"):
        recording.turns += answer_turns(recording, target, conversation, question)
    return recording, target


def question_file(args: argparse.Namespace) -> Path:
    asked = config_of(QuestionOptions, vars(args))
    return question_file_of(asked.bench_name, asked.question_file)


def answer_turns(
    recording: Recording, target: TargetModel, conversation: Conversation, question: Question
) -> list[RecordedTurn]:
    """Return the turns of a question, answered by plain decoding; their rows are recorded.

    Raises:
        UserError: if the model cannot be recorded or a prompt cannot be answered.
    """
    vanilla = drafter_from("vanilla", target.vocab_size)
    history: list[Message] = []
    turns = []
    for place, user in enumerate(question.turns):
        prompt_ids = tuple(asked_ids(conversation, question, place, history))
        refuse_unrecordable(target, len(prompt_ids) + recording.source.max_new_tokens + REACH)
        limit = target.context_limit()
        turn = RecordedTurn(question.question_id, question.category, limit, prompt_ids, ())
        try:
            answer = replay(ReplayTarget(recording, target), vanilla, turn).token_ids
        except ValueError as error:
            raise UserError(f"question {question.question_id}: {error}") from error
        turns.append(replace(turn, answer_ids=tuple(answer)))
        history.append(Message(user, conversation.text(answer)))
    return turns


def run(file: Path, drafters: Sequence[str], extend: bool, threads: int | None = None) -> None:
    """Score drafters on a recording, and print a table.

    Raises:
        UserError: if a drafter cannot be replayed, or rows are missing.
    """
    recording = Recording.load(file)
    source = recording.source
    made = [(words, drafter_from(words, source.vocab_size)) for words in drafters]
    for words, drafter in made:
        check_replayable(drafter, words, source.top_k)
    target = ReplayTarget(recording, load_recorded_model(source, threads) if extend else None)
    num_known = recording.num_texts
    rows = {}
    for words, drafter in progress(made, unit="drafter"):
        rows[words] = figures(score(target, drafter, recording.turns))
    if recording.num_texts > num_known:  # before anything is printed: a reader may leave
        recording.save(file)
    print(
        f"{len(recording.turns)} turns of {source.questions}, {source.model_path}, {source.dtype}"
    )
    header = ["drafter", "MAT", "MAT before loops", "nodes a step"]
    print(
        markdown_table(header, [[words, *map(figure_text, found)] for words, found in rows.items()])
    )
    if recording.num_texts > num_known:
        print(f"{recording.num_texts - num_known} texts added: {_size(recording, file)}")
    print(json_line({words: found._asdict() for words, found in rows.items()}))


def _size(recording: Recording, file: Path) -> str:
    rows = f"{recording.num_texts} texts with {recording.source.top_k} tokens each"
    return f"{rows}, {file.stat().st_size / 2**20:.1f} MiB in {file}"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.command == "run":
        run(Path(args.recording), args.drafters, args.extend, getattr(args, "threads", None))
        return 0
    out = Path(args.out)
    check_output(out, "out")
    refuse_outputs([out], [question_file(args)])
    recording, _ = record(args)
    recording.save(out)
    print(f"{len(recording.turns)} turns: {_size(recording, out)}")
    return 0


if __name__ == "__main__":
    run_command(main)
