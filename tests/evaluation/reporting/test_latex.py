r"""The leaderboard's LaTeX: whole, escaped, and, where there is a pdflatex, compiled.

Run: pytest tests/evaluation/reporting/test_latex.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from evaluation.leaderboard import main
from evaluation.reporting.latex import escaped, latex_text
from evaluation.reporting.tables import Cell, Table, figure_cell
from tests.evaluation.answers.answer_rows import make_row, write_answers

HOSTILE = "a\\b{c}$d&e#f%g_h^i~j<k>l|m\"n[o]'p`q\n\u4e2d\u00e9\u00b1\t\x07"
DOCUMENT = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs}
\begin{document}
\input{table}
\end{document}
"""


def check_latex(text: str) -> None:
    """Fail unless braces and environments close, rows have their columns, and nothing is unescaped."""
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    body = "\n".join(lines)
    assert body.isascii()
    bare = re.sub(r"\\[\\{}$&#%_]", "", body)
    assert not set(bare) & set('~"`'), "a character that LaTeX reads otherwise"
    assert "%" not in bare and "#" not in bare
    depth = 0
    for character in bare:
        depth += (character == "{") - (character == "}")
        assert depth >= 0, "a brace closes none"
    assert depth == 0, "a brace is left open"
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{([^}]*)\}", body):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    tables = re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", body, re.DOTALL)
    assert tables
    for columns, rows in tables:
        found = [line for line in rows.splitlines() if line.endswith(r" \\")]
        assert len(found) >= 2
        for line in found:
            assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1, line


def _compile(folder: Path, text: str) -> str:
    """What pdflatex says of a document with these tables."""
    latex = shutil.which("pdflatex")
    if latex is None:
        pytest.skip("needs pdflatex")
    (folder / "table.tex").write_text(text, encoding="utf-8")
    (folder / "document.tex").write_text(DOCUMENT, encoding="utf-8")
    command = [latex, "-interaction=nonstopmode", "-halt-on-error", "document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def _hostile_table() -> Table:
    rows = [
        [Cell(HOSTILE), figure_cell(1.5, 0.25, "x", (1.25, 1.75))],
        [Cell("[b]"), figure_cell(2)],
    ]
    return Table(HOSTILE, [HOSTILE, "Speed-up over all"], rows, notes=[HOSTILE])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The leaderboard's LaTeX of two methods, the names of one full of what must be escaped."""
    folder = tmp_path_factory.mktemp("answers")
    for name, method, speed in (("a", "vanilla", 1.0), ("b", HOSTILE, 2.0)):
        lengths = [int(speed)] * (6 // int(speed))
        rows = [make_row(place, "qa", lengths, 6 / speed) for place in range(5)]
        meta = {"method": method, "model_path": f"a/{HOSTILE}", "device": HOSTILE}
        write_answers(folder / f"{name}.jsonl", rows, meta | {"bench_name": "spec_bench"})
    out = folder / "table.tex"
    assert main([str(folder), "--published", "--latex", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_what_latex_reads_otherwise_is_escaped() -> None:
    assert escaped("50% of $x_1$ & [a]") == r"50\% of \$x\_1\$ \& {[}a{]}"
    assert escaped("±1 \u4e2d") == r"$\pm$1 {[}U+4E2D{]}"
    check_latex(latex_text([_hostile_table()]))


@pytest.mark.parametrize(
    "broken",
    [
        (r"\begin{tabular}", r"\begin{tabbing}"),
        (r" \\" + "\n" + r"\bottomrule", r" & 1 \\" + "\n" + r"\bottomrule"),
        (r"\toprule", r"\toprule}"),
        (r"\toprule", r"\toprule 5 % off"),
    ],
)
def test_the_check_finds_what_is_wrong(broken: tuple[str, str], written: str) -> None:
    with pytest.raises(AssertionError):
        check_latex(written.replace(*broken, 1))


def test_the_leaderboard_is_whole(written: str) -> None:
    check_latex(written)
    assert written.startswith("% Needs \\usepackage{booktabs}")
    assert set(re.findall(r"\\usepackage\{([^}]*)\}", written)) == {"booktabs"}
    titles = written.partition("\\toprule\n")[2].partition(" \\\\\n\\midrule")[0].split(" & ")
    assert titles == [
        *("Models", r"\shortstack{Multi-turn \\ Conversation}", "Translation", "Summarization"),
        *(r"\shortstack{QA \\ (n=5)}", r"\shortstack{Math \\ Reasoning}", "RAG"),
        *(r"\shortstack{\#Mean \\ accepted \\ tokens}", "Overall", "Tokens/s"),
    ]
    row = r"Vanilla (autoregressive) & - & - & - & 1.00$\times$ & - & - & 1.00 & 1.00$\times$ & 1.00 \\"
    assert f"\n{row}\n" in written
    assert " & {[}2.00, 2.00{]} &  \\\\\n" in written
    assert "Why these differ from ours" in written


def test_tables_have_labels(written: str) -> None:
    places = range(1, written.count(r"\caption{") + 1)
    labels = re.findall(r"\\label\{(.*)\}", written)
    assert labels == [f"tab:speculative-decoding-{place}" for place in places]


def test_files_are_named_without_the_folders_of_a_machine(tmp_path: Path) -> None:
    folder = tmp_path / "my answers"
    for name in ("vanilla", "pld"):
        row = make_row(1, "qa", [2], 1.0) | {"model_id": name}
        write_answers(folder / f"{name}.jsonl", [row, row | {"question_id": name}])
    (folder / "empty.jsonl").touch()
    out = tmp_path / "table.tex"
    assert main([str(folder), "--latex", str(out)]) == 0
    written = out.read_text(encoding="utf-8")
    assert "Left out: empty.jsonl holds no answers" in written
    assert "missing in pld.jsonl" in written
    assert str(tmp_path).split("/")[-1] not in written


def test_it_compiles(tmp_path: Path, written: str) -> None:
    _compile(tmp_path, latex_text([_hostile_table()]))
    _compile(tmp_path, written)
