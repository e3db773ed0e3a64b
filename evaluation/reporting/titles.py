"""Titles of methods, tasks, options and conditions: the words of every table and picture.

Use:
    method_title("pld")  # Prompt lookup (PLD)
    entry_titles(group)["pld (match=latest)"].short  # Prompt lookup (PLD) (b)
    group_facts(groups)[0]["Decoding"]  # greedy, at most 128 new tokens a turn
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from evaluation.answers.record import UNKNOWN, Use, conditions
from evaluation.questions.pinned_data import PINNED
from evaluation.questions.questions import DATA_FOLDER
from evaluation.scoring.groups import Entry, Group
from model.methods import BUILT_IN, words_of

REFEREE_TITLES = {
    "generate": "transformers generate",
    "generate-pld": "transformers prompt lookup",
    "generate-assisted": "transformers assisted generation",
    "generate-static": "transformers generate, static cache (compiled on a GPU)",
    "generate-batch": "transformers generate_batch",
    "llama.cpp": "llama.cpp",
    "llama.cpp-ngram": "llama.cpp, n-gram speculation",
    "llama.cpp-draft": "llama.cpp, draft model",
    "openvino": "OpenVINO GenAI",
    "openvino-pld": "OpenVINO GenAI, prompt lookup",
    "ctranslate2": "CTranslate2",
}
# As Spec-Bench's Leaderboard.md calls them.
TASK_TITLES = {
    "mt_bench": "Multi-turn Conversation",
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "QA",
    "math_reasoning": "Math Reasoning",
    "rag": "RAG",
    "code": "Code",
    "overall": "Overall",
}
# Titles of columns beside which a category of anybody's stands.
TAKEN_TITLES = {*TASK_TITLES.values(), *("Models", "#Mean accepted tokens", "Tokens/s", "Measured")}
BENCH_TITLES = {
    "spec_bench": "Spec-Bench",
    "mt_bench": "MT-bench",
    "mbpp": "MBPP",
    "demo": "demo questions",
    UNKNOWN: "questions not recorded",
}
# Options of runs in words; options without words are shown as "name value".
RUN_WORDS = {
    "load_matrix": "memory loaded before the first question",
    "num_questions": "{} questions, evenly spread",
    "prompt_tokens": "questions with {} prompt tokens",
    "question_begin": "questions from index {}",
    "question_end": "questions before index {}",
    "shard": "shard {} of the questions",
    "shuffle": "questions shuffled with seed {}",
}
# Options that several methods of this project have; a method's own words come first. A method of somebody
# else may mean something else by the same name.
BUILT_IN_WORDS = {
    "budget=auto": "as many drafted tokens as pay",
    "budget=fixed": "a fixed number of drafted tokens",
    "harvest_prompt=True": "memory seeded from the prompt",
    "harvest_prompt=False": "memory not seeded from the prompt",
    "heads": "heads of {}",
    "match": "{} match continued",
    "max_ngram_size": "n-grams of at most {} tokens looked up",
    "num_nodes": "at most {} drafted tokens a step",
    "num_pred_tokens": "chains of at most {} tokens",
    "output_id_topk": "{} successors kept for each token",
    "policy": "write-back {}",
    "prompt_lookup_num_tokens": "chains of at most {} tokens",
    "start=cold": "memory emptied before each question",
    "start=hot": "memory kept across questions",
    "tree_version": "tree {}",
    "tree_version=auto": "tree sized to the device",
}
# Conditions in words; those not here are shown as "name value", a condition's default never.
CONDITION_WORDS = {
    "dtype": "{}",
    "device": "{}",
    "machine": "{}",
    "threads": "{} threads",
    "threads=1": "1 thread",
    "max_new_tokens": "at most {} new tokens a turn",
    "temperature": "sampling at temperature {}",
    **dict.fromkeys(("temperature=0", "temperature=0.0"), "greedy"),
    "top_k": "from the {} likeliest tokens",
    "top_p": "from the likeliest tokens of probability {}",
    "min_p": "from tokens of {} of the likeliest one's probability or more",
    "seed": "seed {}",
    "repetition_penalty": "repetition penalty {}",
    "stop": "answers end after {}",
    "system_prompt": "system prompt: {}",
    "compile=True": "compiled passes",
    "lacks_kernels=True": "torch's own kernels",
    "graphs=auto": "passes replayed as CUDA graphs",
    "graphs=off": "kernels launched one by one",
    "sdpa_backends": "attention {}",
    "num_workers": "{} worker processes",
    "batch_size": "batches of {} texts",
    "num_choices": "{} answers to each question",
    "conv_template": "conversation template {}",
    "commit": "commit {}",
    "replayed": "replayed, times predicted by {}",
}
SILENT = {"threads": "None", "max_new_tokens": "None", "conv_template": "tokenizer"}
# The conditions under each heading of a group; what is in none of them comes last.
HEADINGS = {
    "Decoding": (
        *("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty"),
        *("max_new_tokens", "stop", "batch_size", "num_choices", "conv_template", "system_prompt"),
    ),
    "Precision": ("dtype",),
    "Device": ("device", "machine", "threads", "num_workers"),
    "Software": (
        "compile",
        "graphs",
        "kernels",
        "weights",
        "lacks_kernels",
        "sdpa_backends",
        "commit",
    ),
}
# Characters of a condition's value that are shown.
LONGEST_VALUE = 60
SOFTWARE = ("torch", "transformers")


class Title(NamedTuple):
    """A row's name."""

    short: str  # for a cell: a letter tells entries of one method apart
    long: str  # for a picture, which has no notes: their options instead


def method_title(method: str) -> str:
    """Return the name for people of a method, also by its published name; of an unknown one, itself."""
    if method in REFEREE_TITLES:
        return REFEREE_TITLES[method]
    published = (words.title for words in map(words_of, BUILT_IN) if words.published == method)
    return next(published, None) or words_of(method).title


def task_title(task: str) -> str:
    """Return the title of a task; an unknown one is its own, told apart from other columns' titles."""
    if task not in TASK_TITLES and task in TAKEN_TITLES:
        return f"{task} (category)"
    return TASK_TITLES.get(task, task)


def counted_title(task: str, groups: Sequence[Group]) -> str:
    """Return a task's title and how many of its questions have figures, each number: "QA (n=7, 20)"."""
    every = [row.figures.figure(task, "questions") for group in groups for row in group.rows]
    counts = sorted({int(count) for count in every if count > 0})
    return f"{task_title(task)} (n={', '.join(map(str, counts))})" if counts else task_title(task)


def options_text(options: Mapping[str, Any], method: str | None = None) -> str:
    """Return options of a method, or of a run, as words, without those that are not set."""
    tables: list[Mapping[str, str]] = [RUN_WORDS]
    if method in BUILT_IN or method in REFEREE_TITLES:
        tables.insert(0, BUILT_IN_WORDS)
    if method is not None:
        tables.insert(0, words_of(method).options)
    return ", ".join(
        _words(tables, name, _shown(value)) for name, value in options.items() if value is not None
    )


def _shown(value: Any) -> str:
    """Return an option's value as a text; of a path on this machine the last two parts."""
    text = str(value)
    return "/".join(PurePath(text).parts[-2:]) if PurePath(text).is_absolute() else text


def _words(tables: Sequence[Mapping[str, str]], name: str, value: str) -> str:
    """Return a name and its value in the words of the first table that has some."""
    found = (table.get(f"{name}={value}") or table.get(name) for table in tables)
    words = next(filter(None, found), f"{name.replace('_', ' ')} {{}}")
    return words.replace("{}", value)  # not by format: a value is any text


def entry_titles(group: Group) -> dict[str, Title]:
    """Return the name of every entry of a group, by its label."""
    entries = [row.entry for row in group.rows]
    names = {entry.label: variant_title(entry) for entry in entries}
    titles = {}
    for entry in entries:
        name = names[entry.label]
        namesakes = sorted(label for label in names if names[label] == name)
        title = Title(name, name)
        if len(namesakes) > 1:
            place = namesakes.index(entry.label)  # a, b, ... z, then 27, 28, ...
            letter = string.ascii_lowercase[place : place + 1] or str(place + 1)
            options = options_text(entry.differing, entry.method) or "no other options"
            title = Title(f"{name} ({letter})", f"{name} ({letter}: {options})")
        titles[entry.label] = title
    return titles


def short_titles(group: Group) -> dict[str, str]:
    """Return the name of every entry of a group for a cell, by its label."""
    return {label: title.short for label, title in entry_titles(group).items()}


def variant_title(entry: Entry) -> str:
    """Return an entry's name, with what its options make of the method: "Token Recycling, as published"."""
    title = method_title(entry.method)
    if title == entry.method:
        # Of a package that this process has not imported: as its run recorded it.
        recorded = entry.files[0].record.values.get("method_title")
        title = " ".join(recorded.split()) if isinstance(recorded, str) else title
    for option, words in words_of(entry.method).variants.items():
        name, _, value = option.partition("=")
        if str(entry.options.get(name)) == value:
            return f"{title}, {words}"
    return title


def engine_text(entry: Entry) -> str:
    """Return what another program said of itself, such as "xllamacpp 2026.10; AVX2 FMA"; empty of our methods."""
    said = [file.record.engine for file in entry.files]
    texts = ["{program}; {precision}; {features}".format(**one) for one in said if one]
    return " or ".join(dict.fromkeys(texts))


def shared_options(group: Group) -> dict[str, Any]:
    """Return the options that all entries of a group have in common, beside the methods' own."""
    first, *others = (file.record.further_options() for file in group.files)
    return {
        name: value
        for name, value in first.items()
        if all(options.get(name) == value for options in others)
    }


def group_facts(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return each group's conditions in words, by name; usual and unknown ones are left out.

    Weights and questions are told by the first digits of their hashes where nothing else tells two
    groups apart, and questions where they are not those of the benchmark.
    """
    found = [_facts(group) for group in groups]
    for facts, group, same in zip(found, groups, [found.count(it) for it in found], strict=True):
        if same > 1:
            weights = group.facts["model"].rpartition("@")[2]
            facts |= {
                "Weights": f"weights {weights}",
                "Question file": group.facts["question_file"],
            }
    return found


def _facts(group: Group) -> dict[str, str]:
    facts = group.facts
    usual = {item.key: str(item.default) for item in conditions(Use.COMPARED)} | SILENT
    words = {
        name: ""
        if value in (UNKNOWN, usual.get(name))
        else _words([CONDITION_WORDS], name, _short(value))
        for name, value in facts.items()
        if name not in ("model", "bench", "question_file")  # which have other words
    }
    model = _model_title(group)
    asked = [BENCH_TITLES.get(facts["bench"], facts["bench"])]
    if not _is_of_benchmark(facts["bench"], facts["question_file"]):
        names = {str(file.record.values.get("question_file_name") or "") for file in group.files}
        asked = sorted(names - {""}) or [f"a question file of its own ({facts['question_file']})"]
    asked.append(options_text(shared_options(group)))
    parts = {"Model": [model], "Questions asked": asked}
    for heading, conditions_below in HEADINGS.items():
        parts[heading] = [words.pop(name) for name in conditions_below]
    recorded = [file.record.values.get("versions") for file in group.files]
    known = [versions for versions in recorded if isinstance(versions, dict)]
    software = {f"{name} {one[name]}" for one in known for name in SOFTWARE if name in one}
    parts["Software"][:0] = sorted(software)
    parts["Further"] = list(words.values())
    texts = {name: ", ".join(filter(None, texts)) for name, texts in parts.items()}
    texts["Device"] = texts["Device"] or "device not recorded"
    return {name: text for name, text in texts.items() if text}


def _model_title(group: Group) -> str:
    """Return the model's name on the hub, or that of its folder alone: those above it may name people."""
    record = group.files[0].record
    path = " ".join(str(record.values.get("model_path") or record.model_id or "").split())
    parts = PurePath(path).parts
    if not parts:
        return "unknown model"
    is_on_hub = len(parts) == 2 and parts[0] not in (".", "..", "~", "/")
    says_nothing = parts[-1] == "model"
    return path if is_on_hub else "/".join(parts[-2:] if says_nothing else parts[-1:])


def _short(value: str) -> str:
    """Return a value as a line; a long one, such as a system prompt, is cut and told by its hash."""
    line = " ".join(value.split())
    if len(line) <= LONGEST_VALUE:
        return line
    digits = hashlib.sha256(value.encode()).hexdigest()[:6]
    return f"{line[:LONGEST_VALUE]}... ({digits})"


def _is_of_benchmark(bench: str, digits: str) -> bool:
    """Whether a question file, told by its hash's first digits, may be the one that a name stands for."""
    if digits == UNKNOWN or bench not in BENCH_TITLES:
        return True
    file = DATA_FOLDER / "demo" / "question.jsonl"
    pinned = PINNED.get(bench)
    expected = pinned.sha256 if pinned else hashlib.sha256(file.read_bytes()).hexdigest()
    return expected.startswith(digits)
