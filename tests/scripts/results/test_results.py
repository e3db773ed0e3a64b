"""Tables of the pages are what the stored answers say, and no page has figures of its own.

Run: pytest tests/scripts/results
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from model.commands.command_line import UserError
from scripts.results.__main__ import MARKED, ROOT, main, pages, with_tables
from scripts.results.pack import pack
from tests.evaluation.answers.answer_rows import make_row, write_answers
from tests.model.families.list_models import BEGIN, END

# What is stored, all together.
MOST_BYTES = 25 * 2**20
# A table by hand that takes its figures from stored files, which it names.
TAKEN = re.compile(r"<!-- figures of ([^>]+?) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
DECIMAL = re.compile(r"(?<![\w.-])\d+\.\d+x?(?![\w.])")
# A table of options has their defaults in a column of this name.
OF_OPTIONS = re.compile(r"^\|[^\n]*\| default \|")
# Tables of names and versions that a command writes, held by tests of its own.
LISTED = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
META = {
    **{"model_path": "data/demo/model", "dtype": "float32", "device": "cpu (x)", "threads": 2},
    **{"max_new_tokens": 16, "temperature": 0.0, "bench_name": "spec_bench"},
    **{"git_commit": "0123456789ab", "interleaved_run": "one", "batch_size": 1},
}


def _pack(tmp_path: Path, name: str, speeds: dict[str, float], **meta: Any) -> str:
    """Store answers of methods at so many tokens a second; return the pack's name."""
    folder = tmp_path / name
    for method, speed in speeds.items():
        rows = [
            make_row(number, "qa", [2] * 6, (12 + number % 3) / speed, token_ids=[[7] * 12])
            for number in range(8)
        ]
        write_answers(folder / f"{method}.jsonl", rows, META | {"method": method} | meta)
    pack(folder, tmp_path / f"{name}.tar.xz")
    return f"{name}.tar.xz"


def _page(kind: str, *names: str) -> str:
    return (
        f"before\n<!-- table: {kind} of {' '.join(names)} -->\nold\n<!-- end of table -->\nafter\n"
    )


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_what_its_files_say(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, ROOT) == text, "run python -m scripts.results tables"


def _is_in(figure: str, file: Path) -> bool:
    """Whether a stored file has a figure; a JSON has it with more digits."""
    value, text = figure.removesuffix("x"), file.read_text(encoding="utf-8")
    if file.suffix != ".json":
        return value in {found.removesuffix("x") for found in DECIMAL.findall(text)}
    digits = len(value.partition(".")[2])
    numbers = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)
    return value in {f"{float(number):.{digits}f}" for number in numbers}


def unsourced(text: str, folder: Path = ROOT) -> list[str]:
    """Return the figures of a page's tables that are in no stored file that the page names."""
    by_hand = LISTED.sub("", MARKED.sub("", text))
    found = []
    for taken in TAKEN.finditer(by_hand):
        files = [folder / name for name in taken[1].split()]
        for figure in DECIMAL.findall(taken[2]):
            if not any(_is_in(figure, file) for file in files):
                found.append(f"{figure} is not in {taken[1]}")
    for table in TABLE.findall(TAKEN.sub("", by_hand)):
        if not OF_OPTIONS.match(table):
            found += DECIMAL.findall(table)
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_table_has_a_figure_without_its_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unsourced(text), "make it with scripts.results, or name the file that has it"


def test_a_planted_figure_is_found(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"speed": 1.2345, "verdict": "7.02x of generate"}')
    (tmp_path / "page.md").write_text("| hybrid | 1.45x |\n")

    def planted(row: str, source: str = "", header: str = "| method | x |") -> list[str]:
        table = f"{header}\n|---|---|\n| hybrid | {row} |\n"
        mark, end = f"<!-- figures of {source} -->\n", "<!-- end of figures -->\n"
        return unsourced(f"before\n\n{mark + table + end if source else table}\nafter", tmp_path)

    assert planted("1.23x [1.10, 1.31]") == ["1.23x", "1.10", "1.31"]
    assert planted("1.23x, 7.02x", "run.json") == []
    assert planted("1.24x", "run.json") == ["1.24x is not in run.json"]
    assert planted("1.45x, 1.234", "run.json page.md") == []
    assert planted("1.4x, 0.45", "page.md") == ["1.4x is not in page.md", "0.45 is not in page.md"]
    assert planted("0.5", header="| option | default |") == []
    assert planted("Apache-2.0, torch 2.13.0, Qwen3.5, 12 of 24") == []
    made = "<!-- table: summary of a.tar.xz -->\n| a | 1.5 |\n<!-- end of table -->\n"
    assert unsourced(made) == [] and unsourced(made + "| a | 1.5 |\n") == ["1.5"]


def test_what_is_stored_is_small() -> None:
    assert sum(file.stat().st_size for file in ROOT.glob("docs/results/*")) <= MOST_BYTES


def test_a_summary_has_a_column_for_each_comparison(tmp_path: Path) -> None:
    one = _pack(tmp_path, "one", {"vanilla": 10, "hybrid": 15})
    other = _pack(tmp_path, "other", {"vanilla": 20, "pld": 30}, dtype="bfloat16")
    text = with_tables(_page("summary", one, other), tmp_path)
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    header, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    assert "Demo model, 7M, float32, 2 threads" in header and "bfloat16" in header
    assert [row.split("|")[1].strip() for row in rows] == [
        *("Hybrid", "Vanilla (autoregressive)", "Prompt lookup (PLD)")
    ]
    assert re.search(r"\| +1\d\.\d tokens/s, 1\.50x \[1\.50, 1\.50\], MAT 2\.00 \| +- \|", rows[0])
    assert "8 questions of spec_bench, at most 16 new tokens, cpu (x)" in text
    assert "Answers that differ from vanilla's: none" in text


@pytest.mark.parametrize("kind", ["tasks", "report"])
def test_other_tables_name_every_method(kind: str, tmp_path: Path) -> None:
    name = _pack(tmp_path, "one", {"vanilla": 10, "hybrid": 15, "pld": 12})
    text = with_tables(_page(kind, name), tmp_path)
    assert "| Hybrid" in text or "Hybrid " in text
    assert "1.50x" in text and "1.20x" in text


def test_other_programs_are_what_methods_are_over(tmp_path: Path) -> None:
    folder = tmp_path / "beside"
    for method, speed in {"vanilla": 10.0, "hybrid": 30.0, "llama.cpp": 20.0, "slow": 5.0}.items():
        rows = [
            make_row(number, "qa", [2] * 6, 12 / speed, token_ids=[[7] * 12]) for number in range(8)
        ]
        is_served: dict[str, Any] = {"is_served": True} if method in ("llama.cpp", "slow") else {}
        if method == "llama.cpp":
            said = {"program": "xllamacpp 1", "precision": "as in the file", "features": "AVX2"}
            is_served |= {"engine": said | {"lacks": ""}}
        write_answers(folder / f"{method}.jsonl", rows, META | {"method": method} | is_served)
    pack(folder, tmp_path / "beside.tar.xz")
    rows = with_tables(_page("programs", "beside.tar.xz"), tmp_path).splitlines()
    assert any(". llama.cpp: xllamacpp 1; as in the file; AVX2." in row for row in rows)
    cells = {
        row.split("|")[2].strip(): row.split("|")[3] for row in rows if row.startswith("| Demo")
    }
    assert "30.0 tokens/s, 1.50x [1.50, 1.50]" in cells["Hybrid"]
    assert "10.0 tokens/s, 0.50x" in cells["Vanilla (autoregressive)"]
    assert "20.0 tokens/s, 1.00x" in cells["llama.cpp"]
    ours = _pack(tmp_path, "ours", {"vanilla": 10.0, "hybrid": 20.0})
    with pytest.raises(UserError, match="has no answers of another program, such as llama"):
        with_tables(_page("programs", ours), tmp_path)


def test_batches_are_tables_over_sizes(tmp_path: Path) -> None:
    names = [
        _pack(tmp_path, f"size-{size}", {"vanilla": 10 * size, "pld": 12 * size}, batch_size=size)
        for size in (1, 4)
    ]
    text = with_tables(_page("batches", *names), tmp_path)
    assert "By batch size" in text and "4.80x" in text


def _size(
    folder: Path, size: str, participants: dict[str, tuple[str, dict[str, Any], float]]
) -> None:
    """Write the answers of a size: of each file method, options and speed; vanilla answers twice, at 10 and 11."""
    vanilla = ("vanilla", {}, 10.0)
    for name, (method, options, speed) in {
        "vanilla": vanilla,
        "again": ("vanilla", {}, 11.0),
        **participants,
    }.items():
        lengths = [1] * 12 if method == "vanilla" else [2] * 6
        rows = [
            make_row(number, "qa", lengths, (12 + number % 3) / speed, token_ids=[[7] * 12])
            for number in range(8)
        ]
        about = {"method": method, "options": options, "interleaved_run": size}
        if method == "hybrid":
            about["held_bytes"] = 3 * 2**19
        role = {"role": "noise floor"} if name == "again" else {}
        write_answers(folder / size / f"{name}.jsonl", rows, META | about | role)


def _field(tmp_path: Path) -> str:
    folder = tmp_path / "field"
    recycling = {"output_id_topk": 8, "policy": "original"}
    for size in ("16", "8"):
        tree = {"tree_version": f"tree-{size}.json"}
        _size(
            folder,
            size,
            {
                "hybrid": ("hybrid", {"num_nodes": int(size), "budget": "fixed"}, int(size) + 7),
                "recycling": ("recycling", {**recycling, **tree}, 12),
                "averages": ("recycling", {**recycling, **tree, "policy": "average"}, 14),
            },
        )
    _size(
        folder,
        "defaults",
        {
            "fixed": ("hybrid", {"num_nodes": 255, "budget": "fixed"}, 20),
            "auto": ("hybrid", {"num_nodes": 255, "budget": "auto"}, 22),
            "recycling": ("recycling", recycling | {"tree_version": "2.2.2"}, 8),
        },
    )
    pack(folder, tmp_path / "field.tar.xz")
    return "field.tar.xz"


def test_nodes_are_columns_and_a_method_is_one_row_at_all_sizes(tmp_path: Path) -> None:
    text = with_tables(_page("nodes", _field(tmp_path)), tmp_path)
    work, fastest = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        for table in TABLE.findall(text)
    )
    assert work[0] == ["method", "8 nodes", "16 nodes", "defaults", "MiB held"]
    fixed, auto = (
        f"Hybrid, {how} drafted tokens{end}"
        for how, end in (("a fixed number of", ""), ("as many", " as pay"))
    )
    ratios = {row[0]: [cell.partition(", ")[2] for cell in row[1:4]] for row in work[2:]}
    assert ratios == {
        fixed: [f"{ratio:.2f}x [{ratio:.2f}, {ratio:.2f}]" for ratio in (1.5, 2.3, 2.0)],
        auto: ["", "", "2.20x [2.20, 2.20]"],
        "Token Recycling, averaged rows (ours)": ["1.40x [1.40, 1.40]"] * 2 + [""],
        "Token Recycling, as published": [
            f"{ratio:.2f}x [{ratio:.2f}, {ratio:.2f}]" for ratio in (1.2, 1.2, 0.8)
        ],
        "Vanilla (autoregressive)": [""] * 3,
    }
    assert work[2][0] == fixed and work[2][1].startswith("2.00, ")
    plain = dict((row[0], row[1:]) for row in work)["Vanilla (autoregressive)"]
    assert re.fullmatch(r"\d\.\d\d \(\d+\.\d tokens/s\)", plain[0])
    held = {row[0]: row[4] for row in work[2:]}
    assert held == dict.fromkeys(ratios, "-") | {fixed: "1.5", auto: "1.5"}
    assert [row[:3] for row in fastest[2:]] == [
        ["8 nodes", fixed, "Token Recycling, averaged rows (ours)"],
        ["16 nodes", fixed, "Token Recycling, averaged rows (ours)"],
        ["defaults", auto, fixed],
    ]
    # 1.07 and 1.10 are within the noise, or on its edge: two runs of vanilla differ by 1.10.
    assert [row[3] for row in fastest[2:]] == ["not told apart", "faster", "not told apart"]
    assert "Demo model, 7M, float32, 2 threads, 8 nodes; 16 nodes; defaults: 8 questions" in text


def test_each_size_has_the_baseline_beside_it(tmp_path: Path) -> None:
    """A slow minute of one size is in its vanilla too, and in no other size's ratios."""
    _field(tmp_path)
    for file in (tmp_path / "field" / "16").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["choices"][0]["wall_time"] = [2 * it for it in row["choices"][0]["wall_time"]]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    before = with_tables(_page("nodes", "field.tar.xz"), tmp_path)
    pack(tmp_path / "field", tmp_path / "slow.tar.xz")
    after = with_tables(_page("nodes", "slow.tar.xz"), tmp_path)
    assert TABLE.findall(before)[1:] == TABLE.findall(after)[1:]
    assert TABLE.findall(before)[0] != TABLE.findall(after)[0]


def test_a_size_with_other_answers_says_so(tmp_path: Path) -> None:
    _field(tmp_path)
    file = tmp_path / "field" / "8" / "hybrid.jsonl"
    file.write_text(file.read_text().replace("[[7, ", "[[6, "))
    pack(tmp_path / "field", tmp_path / "other.tar.xz")
    text = with_tables(_page("nodes", "other.tar.xz"), tmp_path)
    assert "1.50x [1.50, 1.50], not lossless" in text
    assert "- **Demo model, 7M, float32, 2 threads, 8 nodes: Not lossless: Hybrid has other" in text


def test_kinds_of_text_are_columns_too(tmp_path: Path) -> None:
    _field(tmp_path)
    folder = tmp_path / "field"
    for text in ("maths", "code"):
        for size in ("8", "defaults"):
            shutil.copytree(folder / size, folder / text / size)
    for size in ("8", "16", "defaults"):
        shutil.rmtree(folder / size)
    pack(folder, tmp_path / "texts.tar.xz")
    text = with_tables(_page("nodes", "texts.tar.xz"), tmp_path)
    titles = [cell.strip() for cell in TABLE.findall(text)[0].splitlines()[0].split("|")[2:-2]]
    assert titles == ["code, 8 nodes", "code, defaults", "maths, 8 nodes", "maths, defaults"]
    assert "threads, code, 8 nodes; code, defaults; maths, 8 nodes; maths, defaults: 8" in text
    text = with_tables(_page("tokens", "texts.tar.xz"), tmp_path)
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in TABLE.findall(text)[0].splitlines()
    )
    assert header[1:] == [
        f"Demo model, 7M, float32, 2 threads, {kind}, 8 nodes" for kind in ("code", "maths")
    ]
    assert rows[0] == ["Hybrid, a fixed number of drafted tokens", "2.00", "2.00"]
    assert "Noise" not in text and "unsteady" not in text


def test_folders_that_are_no_sizes_are_refused(tmp_path: Path) -> None:
    _size(tmp_path / "many", "many", {})
    pack(tmp_path / "many", tmp_path / "many.tar.xz")
    with pytest.raises(UserError, match="got a folder many; allowed: one a number of nodes, and"):
        with_tables(_page("nodes", "many.tar.xz"), tmp_path)
    for threads in ("8", "08"):
        _size(tmp_path / "two", threads, {})
    pack(tmp_path / "two", tmp_path / "two.tar.xz")
    with pytest.raises(UserError, match=r"got several comparisons in 0?8; allowed: one a "):
        with_tables(_page("nodes", "two.tar.xz"), tmp_path)


def test_a_pack_holds_the_files_and_nothing_else_byte_for_byte(tmp_path: Path) -> None:
    name = _pack(tmp_path, "one", {"vanilla": 10, "pld": 12})
    (tmp_path / "one" / "note.txt").write_text("of no use")
    pack(tmp_path / "one", tmp_path / "again.tar.xz")
    assert (tmp_path / "again.tar.xz").read_bytes() == (tmp_path / name).read_bytes()
    assert main(["unpack", str(tmp_path / name), str(tmp_path / "out")]) == 0
    found = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert found == ["pld.jsonl", "pld.meta.json", "vanilla.jsonl", "vanilla.meta.json"]
    for file in (tmp_path / "out").iterdir():
        assert file.read_bytes() == (tmp_path / "one" / file.name).read_bytes()


@pytest.mark.parametrize("name", ["../out.jsonl", "/out.jsonl"])
def test_a_pack_writes_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar.xz", "w:xz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="is not a file below it"):
        main(["unpack", str(tmp_path / "bad.tar.xz"), str(tmp_path / "out")])


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="table: got 'speeds'; allowed: summary"):
        with_tables(_page("speeds", "one.tar.xz"), tmp_path)
    (tmp_path / "none.tar.xz").write_text("no pack")
    with pytest.raises(UserError, match="is not a pack of answer files"):
        with_tables(_page("summary", "none.tar.xz"), tmp_path)
    with pytest.raises(UserError, match="allowed: one with answer files"):
        main(["pack", str(tmp_path), str(tmp_path / "out.tar.xz")])
    with pytest.raises(UserError, match="allowed: a new one"):
        main(["unpack", str(tmp_path / "none.tar.xz"), str(tmp_path)])
