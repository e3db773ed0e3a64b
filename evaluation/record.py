"""Record a model once, so that methods can be judged anywhere without it; measure what steps cost; check a trace.

The model answers questions greedily, by plain decoding, and is then asked about every text that the named methods
draft. What it says is kept (`evaluation.replay.trace`). A recording that was interrupted goes on where it stopped.
Acceptance lengths of these methods are then replayed exactly, and those of all methods that learn from accepted
tokens alone.

`--costs` measures passes by nodes, length of the text and sequences on this machine. `--check` draws texts of a
trace at random, asks the model again, and names those whose rows it does not confirm.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from evaluation.answers.record import check_weights, git_commit, model_fingerprint
from evaluation.inference.config import AnswerOptions, QuestionOptions, RunConfig
from evaluation.inference.plan import Asked, check_asked
from evaluation.questions.conversation import Message, asked_ids
from evaluation.questions.questions import Question
from evaluation.replay.costs import measure
from evaluation.replay.replaying import Replay, replayable
from evaluation.replay.target import ReplayTarget, refuse_unrecordable
from evaluation.replay.trace import (
    LARGEST,
    LARGEST_SAMPLE,
    NUM_KEPT,
    SOURCE,
    SUFFIX,
    RecordedQuestion,
    RecordedTurn,
    Source,
    append,
    questions_of,
)
from model.backends.proofs.support import eos_ids_of
from model.backends.target import TargetModel
from model.budget.measure import use_fastest_threads
from model.budget.memory import vocabulary_hash
from model.commands.command_line import (
    OptionParser,
    UserError,
    add_options,
    config_of,
    run_command,
    user_errors,
)
from model.commands.files import check_output, file_hash
from model.commands.loading import check_model, load_target
from model.commands.model_options import ModelOptions
from model.engine.loop import generate
from model.engine.read_out import likeliest, logit_samples_of, sampled_ids
from model.machine.hardware import machine_name
from model.machine.timing import progress
from model.methods.vanilla.drafter import VanillaConfig, VanillaDrafter
from model.options import Options, option

# Methods that learn from rejected nodes, in the sizes of docs/bank.md; the others need no more than the answers.
METHODS = (
    *("recycling", "recycling-averaged", "hybrid --budget fixed --num-nodes 63"),
    *("racer", "goose", "samd", "lookahead"),
)
# Tokens beyond the limit that drafts and a method's own overrun may reach.
REACH, OVERRUN = 256, 2
# By how much a recorded number may differ from one that another pass computes: a sample's step, and a share.
TOLERANCE, RELATIVE = 1.0, 0.02
EXAMPLES = """\
examples:
  python -m evaluation.record data/demo/model --num-questions 30 --out traces/demo
  python -m evaluation.record smollm2-135m --bench-name spec_bench mbpp --num-questions 80 --max-new-tokens 64 \\
      --out traces/smollm2
  python -m evaluation.record smollm2-135m --threads 2 --costs costs/smollm2-this-machine.json
  python -m evaluation.record smollm2-135m --check traces/smollm2 --sample 500
"""


@dataclass(frozen=True, slots=True)
class RecordOptions(Options):
    """What is recorded, measured or checked."""

    out: str | None = option(None, "folder of the trace; an interrupted one goes on", metavar="DIR")
    methods: tuple[str, ...] = option(
        METHODS, "methods whose rejected drafts are recorded, too", metavar="METHOD"
    )
    max_new_tokens: int = option(128, "most new tokens of an answer", least=1)
    num_likeliest: int = option(
        65, f"likeliest tokens kept after an answer's tokens; {NUM_KEPT} elsewhere", least=NUM_KEPT
    )
    costs: str | None = option(
        None, "file to write the cost curve of this machine to", metavar="FILE"
    )
    check: str | None = option(None, "folder of a trace to check", metavar="DIR")
    sample: int = option(200, "texts that are checked", least=1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(
        prog="python -m evaluation.record",
        description="Record a model's texts, measure its steps, or check a trace.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model_path", metavar="MODEL", help="folder, GGUF file, or name of a model")
    add_options(parser, RecordOptions)
    add_options(
        parser.add_argument_group("model"), ModelOptions, ("dtype", "device", "threads", "weights")
    )
    questions, words = parser.add_argument_group("questions"), "benchmarks (default: demo)"
    questions.add_argument("--bench-name", nargs="+", default=["demo"], metavar="NAME", help=words)
    add_options(questions, QuestionOptions, ("question_file", "num_questions", "shuffle"))
    add_options(questions, AnswerOptions, ("conv_template",))
    given = vars(parser.parse_args(argv))
    options, benches = config_of(RecordOptions, given), given.pop("bench_name")
    if not (options.out or options.costs or options.check):
        raise UserError("out, costs, check: got none; give --out DIR, --costs FILE or --check DIR")
    with user_errors():
        runs = {bench: RunConfig.of(given | {"bench_name": bench}) for bench in benches}
    run = runs[benches[0]]
    if options.costs:
        check_output(options.costs, "costs")
    # Before the weights load.
    participants = [replayable(words) for words in options.methods]
    asked = {bench: check_asked(one) for bench, one in runs.items()} if options.out else {}
    for question in (one for some in asked.values() for one in some.questions):
        if question.fields or question.predictions:
            raise UserError(
                f"question {question.question_id!r}: got response_format, tool_choice or prediction; allowed: "
                "questions without, since a trace holds free texts"
            )
    checked = next(iter(asked.values())).model if asked else check_model(run.model)
    assert checked is not None, "a model is given"
    source = Source.read(Path(options.check)) if options.check else None
    if source is not None:
        fingerprint, where = source.model_fingerprint, f"the trace {options.check} is"
        check_weights(run.model.model_path, checked.hf_config, fingerprint, where, "record again")
    target = load_target(run.model, checked)
    if run.model.threads is None:
        use_fastest_threads(target)
    code = 0
    if options.costs:
        file = Path(options.costs)
        measure(target, file.stem, run.model.model_path).write(file)
        print(f"costs of steps in {file}")
    if options.out:
        made = _source(run, options, asked, target)
        for participant in participants:
            Replay(made, participant)  # refuses what no trace can serve
        folder = Path(options.out)
        _begin(folder, made)
        for bench, one in asked.items():
            replays = [Replay(made, participant) for participant in participants]
            record(folder / f"{bench}{SUFFIX}", made, one, target, replays)
        print(_size(folder, made))
    if options.check and source is not None:
        code = check(Path(options.check), source, target, options.sample)
    return code


def _source(
    run: RunConfig, options: RecordOptions, asked: dict[str, Asked], target: TargetModel
) -> Source:
    first = next(iter(asked.values()))
    assert first.model is not None and first.conversation is not None, "a model is given"
    longest = max(
        len(asked_ids(one.conversation, question, len(question.turns) - 1, []))  # type: ignore[arg-type]
        for one in asked.values()
        for question in one.questions
    )
    refuse_unrecordable(target, longest + options.max_new_tokens + REACH)
    tokenizer = first.model.tokenizer
    return Source(
        name=Path(options.out or "").resolve().name,
        model_path=run.model.model_path,
        model_fingerprint=model_fingerprint(run.model.model_path, first.model.hf_config),
        vocabulary=vocabulary_hash(tokenizer),
        dtype=str(first.model.dtype).removeprefix("torch."),
        machine=machine_name(),
        git_commit=git_commit(),
        vocab_size=target.vocab_size,
        context=target.context_limit(),
        chain_only=target.chain_only,
        head_share=target.head_share,
        eos_ids=sorted(eos_ids_of(target.model, tokenizer) | first.conversation.stop_ids),
        conv_template=first.conversation.name,
        max_new_tokens=options.max_new_tokens,
        num_likeliest=min(options.num_likeliest, target.vocab_size),
        methods=list(options.methods),
        sets={
            bench: {
                "sha256": file_hash(one.question_file),
                "num_questions": run.questions.num_questions,
                "shuffle": run.questions.shuffle,
                "num_asked": len(one.questions),
            }
            for bench, one in asked.items()
        },
    )


def _begin(folder: Path, source: Source) -> None:
    """Write a trace's source, or compare it with the one that is there; a `UserError` if they differ."""
    if not (folder / SOURCE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        source.write(folder)
        return
    there, here = asdict(Source.read(folder)), asdict(source)
    for key, value in here.items():
        if there[key] != value and key not in ("git_commit", "machine"):
            raise UserError(
                f"out: {folder} has a trace with {key} {there[key]!r}, this one has {value!r}; give another folder"
            )


def record(
    file: Path, source: Source, asked: Asked, target: TargetModel, replays: Sequence[Replay]
) -> None:
    """Record a benchmark's questions into a file, after those that it has."""
    num_done = 0
    for question in questions_of(file, is_open=True):  # from which methods have learned
        for one in replays:
            one.answer(question)
        num_done += 1
    plain = ReplayTarget(source, target)
    for one in replays:
        one.target.live = target
    total, left = len(asked.questions), asked.questions[num_done:]
    for question in progress(left, initial=num_done, total=total, unit="question"):
        recorded = answered(plain, asked, question)
        for one in replays:
            one.answer(recorded)
        append(file, recorded)


def answered(plain: ReplayTarget, asked: Asked, question: Question) -> RecordedQuestion:
    """Return a question with its answers by plain decoding; a `UserError` if a prompt cannot be answered."""
    source, conversation = plain.source, asked.conversation
    assert conversation is not None, "a model is given"
    recorded = RecordedQuestion(
        question.question_id, question.category, len(sampled_ids(source.vocab_size))
    )
    plain.question = recorded
    vanilla = VanillaDrafter(VanillaConfig(), source.vocab_size, plain.device)
    vanilla.needs = replace(vanilla.needs, overrun=OVERRUN)
    history: list[Message] = []
    for place, user in enumerate(question.turns):
        prompt_ids = list(asked_ids(conversation, question, place, history))
        limits = {"max_new_tokens": source.max_new_tokens, "eos_ids": source.eos_ids}
        try:
            found = generate(plain, vanilla, prompt_ids, **limits)
        except ValueError as error:
            raise UserError(f"question {question.question_id}: {error}") from error
        text = conversation.text(found.token_ids)
        recorded.turns.append(RecordedTurn(prompt_ids, found.token_ids, text))
        history.append(Message(user, text))
    return recorded


def _size(folder: Path, source: Source) -> str:
    """Return a line about a trace: its size, and the bytes of an answered token."""
    files = [folder / f"{bench}{SUFFIX}" for bench in source.sets]
    num_bytes = sum(file.stat().st_size for file in files)
    found = [
        (one.num_texts, sum(len(turn.answer_ids) for turn in one.turns))
        for file in files
        for one in questions_of(file)
    ]
    num_texts, num_tokens = map(sum, zip(*found, strict=True))
    return (
        f"{len(found)} questions, {num_tokens} tokens of answers, {num_texts} texts: "
        f"{num_bytes / 1e6:.1f} MB in {folder}, {num_bytes / num_tokens:.0f} bytes a token"
    )


@torch.inference_mode()
def check(folder: Path, source: Source, target: TargetModel, num_drawn: int) -> int:
    """Ask the model again about texts of a trace, drawn at random; print whose rows differ; return 1 for any."""
    files = [folder / f"{bench}{SUFFIX}" for bench in source.sets]
    counts = [question.num_texts for file in files for question in questions_of(file)]
    drawn = sorted(random.sample(range(sum(counts)), min(num_drawn, sum(counts))))
    lines: list[str] = []
    begin = 0
    found = (question for file in files for question in questions_of(file))
    for question in progress(found, total=len(counts), unit="question"):
        for place in drawn:
            if 0 <= place - begin < question.num_texts:
                text = question.path_to(1 + place - begin)
                largest = _largest_difference(question, 1 + place - begin, text, target)
                if largest > TOLERANCE:
                    lines.append(
                        f"question {question.question_id!r}, a text of {len(text)} tokens that ends with token "
                        f"{text[-1]}: a logit differs by {largest:.2f}"
                    )
        begin += question.num_texts
    print(
        "\n".join([*lines, f"{len(lines)} of {len(drawn)} texts have another row than the model's"])
    )
    return int(bool(lines))


def _largest_difference(
    question: RecordedQuestion, node: int, text: Sequence[int], target: TargetModel
) -> float:
    """Return by how much a number of a text's row differs from the model's, beyond what rounding explains."""
    cache = target.new_cache(len(text))
    token_ids = torch.tensor(text, device=target.device)
    logits = target.read(token_ids, 0, cache, last_logits_only=True)[-1:].float().cpu()
    (ids,), (values,) = question.rows([node], question.width(node))
    recorded = torch.tensor([*values, *values])
    computed = torch.cat((logits[:, ids], likeliest(logits, len(ids))[0]), dim=1)[0]
    pairs = [(recorded, computed.clamp(-LARGEST, LARGEST))]
    if not question.lacks(node, 0, with_samples=True):
        samples = torch.from_numpy(question.samples([node])[0])
        largest = LARGEST_SAMPLE
        pairs.append((samples, logit_samples_of(logits)[0].round().clamp(-largest, largest)))
    return max(float(((there - here).abs() - RELATIVE * here.abs()).max()) for there, here in pairs)


if __name__ == "__main__":
    run_command(main)
