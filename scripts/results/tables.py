"""The tables of pages, each made from stored files alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

from evaluation.answers.answer_file import load_tokenizer
from evaluation.inference.command import AUTO
from evaluation.leaderboard import leaderboard_of, text_of
from evaluation.reporting.leaderboard_tables import batch_tables
from evaluation.reporting.notes import alarms
from evaluation.reporting.tables import bounds_text, figure_text, markdown_table
from evaluation.reporting.titles import (
    counted_title,
    engine_text,
    entry_titles,
    options_text,
    variant_title,
)
from evaluation.scoring.comparable import group_answers, neighbours
from evaluation.scoring.figures import CODE, OVERALL
from evaluation.scoring.groups import Entry, Group, Measured
from model.commands.command_line import UserError
from model.commands.model_options import DEMO_MODEL, KNOWN_MODELS, MODELS_FOLDER
from model.methods import METHODS, drafter_class, words_of
from model.options import IN_WHOLE_NUMBERS, chosen
from scripts.results.pack import groups_of

# The folder of a comparison of methods with the options that each has by default.
DEFAULTS = "defaults"
# An option that names a tree, of another size each.
TREE = "tree_version"
INTERVALS = "Intervals of all methods of a column hold together in 95% of comparisons (Bonferroni)."
MODEL_TITLES = {
    "demo/model": "Demo model, 7M",
    **{f"{MODELS_FOLDER.name}/{name}": known.title for name, known in KNOWN_MODELS.items()},
}


def summary(packs: Sequence[Path]) -> str:
    """Return methods and their commands against groups: tokens a second, speed-up, mean accepted tokens."""
    groups = _groups(packs)
    columns = [
        {title: f"{_rate(group, row)}, MAT {_mat(row)}" for title, row in _by_title(group).items()}
        for group in groups
    ]
    rows = {title: row for group in groups for title, row in _by_title(group).items()}
    commands = {title: f"`{_command(row.entry)}`" for title, row in rows.items()}
    titles = ["command", *map(_column, groups)]
    return _captioned(groups, _matrix(titles, [commands, *columns], num_text_columns=2))


def tasks(packs: Sequence[Path]) -> str:
    """Return speed-ups by task, and of decoding alone, for each method of each group.

    All are by the exact ruler, with intervals over that many questions.
    """
    groups = _groups(packs)
    every = dict.fromkeys(task for group in groups for task in group.tasks if task != CODE)
    header = ["model", "method", *(counted_title(task, groups) for task in every)]
    body = [
        [
            _column(group),
            title,
            *(_speedup(group, row, task=task) for task in every),
            _speedup(group, row, "decode_speedup"),
        ]
        for group in groups
        for title, row in _by_title(group).items()
        if row.entry is not group.baseline
    ]
    return markdown_table([*header, "decoding"], body, num_text_columns=2)


def rulers(packs: Sequence[Path]) -> str:
    """Return overall speed-ups of the demo model's methods by every ruler, from the same answers.

    Raises:
        UserError: for another model, whose tokenizer is not here.
    """
    groups, tokenizer = _groups(packs), load_tokenizer(str(DEMO_MODEL))
    header = ["model", "method"]
    header += ["exact", "decoding alone", "by counted tokens", "Spec-Bench's script"]
    body = []
    for group in groups:
        if Path(group.conditions[0].partition("@")[0]) != Path(*DEMO_MODEL.parts[-2:]):
            raise UserError(f"rulers: got {group.conditions[0]}; allowed: the demo model")
        (counted,) = group_answers([replace(file, tokenizer=tokenizer) for file in group.files])
        by_script = {
            row.entry.label: row.figures.figure(OVERALL, "speedup") for row in counted.rows
        }
        for title, row in _by_title(group).items():
            if row.entry is not group.baseline:
                names = ("exact_speedup", "decode_speedup", "speedup")
                values = [row.figures.figure(OVERALL, name) for name in names]
                values.append(by_script[row.entry.label])
                cells = [figure_text(value, unit="x") for value in values]
                body.append([_column(group), title, *cells])
    return markdown_table(header, body, num_text_columns=2)


def programs(packs: Sequence[Path]) -> str:
    """Return each method's tokens a second, with prompts and without, and both over another program's best method.

    Raises:
        UserError: if a group has only this project's methods.
    """
    groups = _groups(packs)
    body = [
        [_column(group), title, _rate(group, row), _rate(group, row, "decode")]
        for group in map(_over_another_program, groups)
        for title, row in _by_title(group).items()
    ]
    header = ["model", "method", "end to end", "decoding"]
    return _captioned(groups, markdown_table(header, body, num_text_columns=2))


def report(packs: Sequence[Path]) -> str:
    """Return the leaderboard's tables and notes of each group."""
    return "\n\n".join(
        text_of(leaderboard_of(groups)).replace(folder, "")
        for groups, folder in map(groups_of, packs)
    )


def batches(packs: Sequence[Path]) -> str:
    """Return tokens a second of each method by batch size, beside the baseline's of that size and one by one."""
    found = batch_tables(_groups(packs))
    return "\n\n".join(part for table in found for part in (table.caption, table.markdown))


def nodes(packs: Sequence[Path]) -> str:
    """Return methods against drafted nodes: tokens a step, speed-ups, memory, each size's fastest two.

    A pack has a folder for each size, which is named by its nodes, or `defaults`; with several kinds of text, these
    folders are in one for each kind. A method is one row: of its options only those that are words tell rows apart,
    and sizes and trees do not.

    Raises:
        UserError: if a folder has another name, or several comparisons.
    """
    return "\n\n".join(_by_size(path) for path in packs)


def tokens(packs: Sequence[Path]) -> str:
    """Return the ten methods that accept most on average, tokens a step at each pack's fewest nodes: no clock.

    Raises:
        UserError: as `nodes`.
    """
    lines: list[str] = []
    columns: dict[str, dict[str, str]] = {}
    for pack in packs:
        sizes = _sizes(pack)
        least = next(iter(sizes)).rpartition(", ")[2]
        for size, group in sizes.items():
            if size.rpartition(", ")[2] == least:
                columns[title := f"{_column(group)}, {size}"] = {
                    _line(row.entry, sizes): _mat(row) for row in group.rows
                }
                lines.append(f"- {title}: {_conditions(group)}.")
    cells = [*columns.values()]
    common = [name for name in cells[0] if all(name in column for column in cells)]
    best = sorted(common, key=lambda name: -sum(float(column[name]) for column in cells))[:10]
    table = _matrix([*columns], [{name: column[name] for name in best} for column in cells])
    return "\n".join((*lines, "", table))


TABLES: Mapping[str, Callable[[Sequence[Path]], str]] = {
    "summary": summary,
    "tasks": tasks,
    "rulers": rulers,
    "programs": programs,
    "report": report,
    "batches": batches,
    "nodes": nodes,
    "tokens": tokens,
}


def _command(entry: Entry) -> str:
    """Return a method with its options as `evaluation.compare --methods` takes it: "recycling-auto"."""
    if entry.method not in METHODS:
        return entry.method
    drafter, name = drafter_class(entry.method), entry.method
    known = {item.name for item in fields(drafter.config_class)}
    given = {option: value for option, value in entry.options.items() if option in known}
    further = chosen(drafter.config_class(**given))
    automatic = dict(drafter.auto_options)
    if automatic and automatic.items() <= further.items():
        name += AUTO
        further = {option: value for option, value in further.items() if option not in automatic}
    flags = (f"--{option.replace('_', '-')} {value}" for option, value in further.items())
    return " ".join((name, *flags))


def _matrix(
    titles: Sequence[str], columns: Sequence[Mapping[str, str]], num_text_columns: int = 1
) -> str:
    """Return columns of cells by method as a table."""
    names = dict.fromkeys(name for cells in columns for name in cells)
    body = [[name, *(cells.get(name, "-") for cells in columns)] for name in names]
    return markdown_table(["method", *titles], body, num_text_columns)


def _by_size(pack: Path) -> str:
    sizes = _sizes(pack)
    first, *others = sizes
    titles = [f"{_column(sizes[first])}, {first}", *others]
    captions = "\n".join(f"- {line}" for line in _captions(list(sizes.values()), titles))
    columns = {
        size: {_line(row.entry, sizes): _work(group, row) for row in group.rows}
        for size, group in sizes.items()
    }
    held = {_line(row.entry, sizes): _held(row) for group in sizes.values() for row in group.rows}
    if any(text != "-" for text in held.values()):
        columns["MiB held"] = held
    caption = "Tokens a step, and the speed-up over vanilla; MiB that the drafter holds after the last question:"
    table = _matrix([*columns], [*columns.values()])
    return "\n\n".join((captions, f"{caption}\n\n{table}", _fastest(sizes)))


def _sizes(pack: Path) -> dict[str, Group]:
    """Return a pack's groups by the titles of their folders: by kind of text, the fewest nodes first."""
    found: dict[tuple[tuple[str, ...], float], Group] = {}
    groups, root = groups_of(pack)
    for group in groups:
        *texts, folder = group.files[0].path.parent.relative_to(root).parts or ("",)
        if folder != DEFAULTS and not folder.isdecimal():
            raise UserError(
                f"{pack}: got a folder {folder}; allowed: one a number of nodes, and {DEFAULTS}"
            )
        place = (tuple(texts), math.inf if folder == DEFAULTS else int(folder))
        if place in found:
            raise UserError(f"{pack}: got several comparisons in {folder}; allowed: one a folder")
        found[place] = group
    return {
        ", ".join((*texts, DEFAULTS if size == math.inf else f"{size} nodes")): found[texts, size]
        for texts, size in sorted(found)
    }


def _line(entry: Entry, sizes: Mapping[str, Group]) -> str:
    """Return a method's title with those of its options that are words and not the same in all groups."""
    others = [row.entry for group in sizes.values() for row in group.rows]
    said = words_of(entry.method).variants
    words = {
        name: value
        for name, value in entry.options.items()
        if isinstance(value, str) and name != TREE and f"{name}={value}" not in said
        if any(one.method == entry.method and one.options.get(name) != value for one in others)
    }
    return ", ".join(filter(None, (variant_title(entry), options_text(words, entry.method))))


def _fastest(sizes: Mapping[str, Group]) -> str:
    """Return the table of the fastest method of each size over the next one, with the verdict."""
    body = []
    for size, group in sizes.items():
        for row, other in islice(neighbours(group), 1):
            names = [_line(entry, sizes) for entry in (row.entry, other)]
            verdict = group.pair_verdict(row, other).value
            body.append([size, *names, verdict, _speedup(group, row)])
    header = ["nodes", "fastest", "next", "verdict", "speed-up over the next"]
    return f"The fastest method over the next one:\n\n{markdown_table(header, body, 4)}"


def _groups(packs: Sequence[Path]) -> list[Group]:
    return [group for path in packs for group in groups_of(path)[0]]


def _over_another_program(group: Group) -> Group:
    """Return a group measured against the fastest of its methods that another program has."""
    others = [row.entry for row in group.rows if row.entry.files[0].record.is_served]
    if not others:
        raise UserError(f"{_column(group)}: has no answers of another program, such as llama.cpp")
    files = [file for row in group.rows for file in row.entry.files]
    (found,) = group_answers(files, base=others[0].method)
    return found


def _by_title(group: Group) -> dict[str, Measured]:
    titles = entry_titles(group)
    return {titles[row.entry.label].long: row for row in group.rows}


def _column(group: Group) -> str:
    facts = group.facts
    model = facts["model"].partition("@")[0]
    weights = f", {IN_WHOLE_NUMBERS}" * (facts.get("weights") == IN_WHOLE_NUMBERS)
    plural = "s" * (facts["threads"] != "1")
    threads = f", {facts['threads']} thread{plural}" * (facts["threads"] != "None")  # of a curve
    return f"{MODEL_TITLES.get(model, model)}{weights}, {facts['dtype']}{threads}"


def _captioned(groups: Sequence[Group], table: str) -> str:
    """Return a table below the lines that say what its columns are of."""
    return "\n".join((*(f"- {line}" for line in _captions(groups)), "", table))


def _captions(groups: Sequence[Group], titles: Sequence[str] = ()) -> list[str]:
    """Return a line for all columns of the same conditions, with the noise of each."""
    alike: dict[str, list[tuple[str, Group]]] = {}
    for title, group in zip(titles or map(_column, groups), groups, strict=True):
        alike.setdefault(_conditions(group), []).append((title, group))
    lines = []
    for conditions, of_them in alike.items():
        floors = [group.floor_interval("exact_speedup") for _, group in of_them]
        known = ", ".join(bounds_text(floor) for floor in floors if floor.is_known)
        noise = f" Noise (one run of vanilla over another): {known}." if known else ""
        columns = "; ".join(title for title, _ in of_them)
        lines.append(f"{columns}: {conditions}.{noise}")
    lines.append(INTERVALS)
    if not titles:
        return [*lines, *(f"**{alarm}.**" for alarm in alarms(groups))]
    of_columns = ((title, alarms([group])) for title, group in zip(titles, groups, strict=True))
    return [*lines, *(f"**{title}: {alarm}.**" for title, found in of_columns for alarm in found)]


def _conditions(group: Group) -> str:
    facts = group.facts
    counts = group.rows[0].figures.mean.drop(index=OVERALL)["questions"].sum()
    num_runs = max(row.figures.num_runs for row in group.rows)
    runs = f" x {num_runs} runs" if num_runs > 1 else ""
    titles = entry_titles(group)
    differing = ", ".join(
        f"{titles[row.entry.label].long} {row.equality}"
        for row in group.rows
        if row.equality.num_differing
    )
    engines = "".join(
        f". {titles[row.entry.label].long}: {engine}"
        for row in group.rows
        if (engine := engine_text(row.entry))
    )
    costs = facts["replayed"]
    machine = "" if facts["machine"] == "None" else f" ({facts['machine']})"
    device = f"{facts['device']}{machine}" if costs == "None" else options_text({"replayed": costs})
    return (
        f"{counts:.0f} questions of {facts['bench']}{runs}, at most {facts['max_new_tokens']} new tokens, "
        f"{device}, commit {facts['commit']}. Answers that differ from vanilla's: {differing or 'none'}"
        f"{engines}"
    )


def _rate(group: Group, row: Measured, name: str = "exact") -> str:
    """Return tokens a second and the speed-up; `name`: "exact" with prompts, "decode" without."""
    rate = row.figures.figure(OVERALL, f"{name}_tokens_per_second")
    return f"{rate:.1f} tokens/s, {_speedup(group, row, f'{name}_speedup')}"


def _work(group: Group, row: Measured) -> str:
    """Return tokens a step and the speed-up; of the baseline, tokens a second."""
    if row.entry is group.baseline:
        rate = row.figures.figure(OVERALL, "exact_tokens_per_second")
        return f"{_mat(row)} ({rate:.1f} tokens/s)"
    return f"{_mat(row)}, {_speedup(group, row)}"


def _held(row: Measured) -> str:
    held = row.entry.files[-1].record.held_bytes
    return "-" if held is None else f"{held / 2**20:.1f}"


def _mat(row: Measured) -> str:
    return figure_text(row.figures.figure(OVERALL, "exact_mean_accepted_tokens"))


def _speedup(group: Group, row: Measured, name: str = "exact_speedup", task: str = OVERALL) -> str:
    """Return the speed-up over the baseline with its interval, and whether answers are others."""
    text = figure_text(row.figures.figure(task, name), unit="x")
    interval = row.figures.interval(task, name)
    if row.entry is not group.baseline and interval.is_known:
        text += f" {bounds_text(interval)}"
    return text + ", not lossless" * row.equality.is_broken
