"""The page: whole without a network, deaf to markup in what it shows, and its tables sort.

The order of a sort is tested by running the page's script: in a JavaScript engine, and, where there
is a Chromium, by clicking in the real page.

Run: pytest tests/evaluation/reporting/test_html_page.py
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from evaluation.leaderboard import main
from evaluation.reporting.charts import COLORS, GREY
from evaluation.reporting.html_page import ASSETS, page_text
from evaluation.reporting.tables import Cell, Section, Table, figure_cell
from evaluation.reporting.titles import REFEREE_TITLES
from evaluation.scoring.figures import SPEC_BENCH_TASKS
from model.methods import BUILT_IN
from tests.evaluation.answers.answer_rows import make_row, write_answers
from tests.hang import HANG

HOSTILE = (
    "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">"
)
VOID = {"meta", "br", "img", "link", "input", "hr"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIOLATION = "<!-- refused by the policy -->"
CLICKS = """\
<script>
for (const [column, times] of %s)
  for (let time = 0; time < times; time++)
    document.querySelectorAll("th > button")[column].click();
</script>
</body>"""


class Page(HTMLParser):
    """What a page holds: elements with their attributes, texts, and the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "elements left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)
            if self._open[-1] in ("th", "td") and data.strip():
                self.rows[-1].append(data)

    def attributes(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The leaderboard's page of answers that carry markup wherever a text can."""
    folder = tmp_path_factory.mktemp("answers")
    hostile_name = HOSTILE.replace("/", "")
    counts = {"drafted": [[[9, 9]]], "accepted": [[[5, 1]]]}
    for method, accepted in (("vanilla", 1), (HOSTILE, 3)):
        rows = [
            make_row(number, category, [accepted] * 6, 6.0 / accepted, turns=[HOSTILE], **counts)
            for number, category in enumerate(("qa", "rag", HOSTILE), start=1)
        ]
        meta = {"model_path": f"a/{HOSTILE}", "device": HOSTILE, "method": method}
        meta |= {"git_commit": HOSTILE, "options": {HOSTILE: 1}, "bench_name": "spec_bench"}
        write_answers(folder / f"{hostile_name}-{accepted}.jsonl", rows, meta)
    out = folder / "page.html"
    assert main([str(folder), "--html", str(out), "--published-device", "3090"]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_prints_and_is_dark_where_readers_want_it(page: str) -> None:
    style = page.partition("<style>")[2].partition("</style>")[0]
    screen = style.partition("@media screen and (prefers-color-scheme: dark) {")[2].partition(
        "\n}"
    )[0]
    names = set(re.findall(r"--([a-z]+):", style.partition("}")[0]))
    assert names == set(re.findall(r"--([a-z]+):", screen)), "each colour has a dark one"
    assert "figure svg { display: block" in style and "background: #fff; }" in style
    printed = style.partition("@media print {")[2]
    assert "h1, h2, h3, dl { break-after: avoid; }" in printed
    assert "thead { display: table-row-group; }" in printed, "a repeated header would be empty"


def _in_the_dark(color: str, amount: float) -> tuple[float, float, float]:
    """A picture's colour after `invert(amount) hue-rotate(180deg)` (CSS Filter Effects 1), each part of 1."""
    red, green, blue = (amount + (1 - 2 * amount) * part for part in to_rgb(color))
    luma = 0.213 * red + 0.715 * green + 0.072 * blue
    red, green, blue = (min(1, max(0, 2 * luma - part)) for part in (red, green, blue))
    return red, green, blue


def _contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2."""
    lights = [
        sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), color, strict=True)
        )
        for color in (one, other)
    ]
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_pictures_are_dark_on_the_dark_page(page: str) -> None:
    screen = page.partition("@media screen and (prefers-color-scheme: dark) {")[2]
    rule = re.search(r"figure svg \{ filter: invert\((.*)\) hue-rotate\(180deg\); \}", screen)
    paper = re.search(r"--paper: (#\w+);", screen)
    assert rule and paper
    behind = to_rgb(paper[1])
    assert _in_the_dark("white", float(rule[1])) == pytest.approx(behind, abs=0.02)
    assert _contrast(_in_the_dark("black", float(rule[1])), behind) > 7, "texts"
    for color in (*COLORS, GREY):
        assert _contrast(_in_the_dark(color, float(rule[1])), behind) > 3, color


def _table_page() -> str:
    """A page with one table whose figures sort otherwise than their texts."""
    figures = ((1.5, "b"), (10.25, "a"), (float("nan"), "d"), (-2.0, "c"))
    rows = [[Cell(name), Cell(name.upper()), figure_cell(value)] for value, name in figures]
    table = Table("Figures", ["Method", "Model", "Speed"], rows, num_text_columns=2)
    return page_text("Title", "Introduction.", [Section("Measured", tables=[table])])


def test_markup_in_what_is_shown_stays_text(page: str) -> None:
    parsed = Page(page)
    assert parsed.count("script") == 1
    assert parsed.count("img") == 0
    assert not [
        name for _, attributes in parsed.elements for name in attributes if name[:2] == "on"
    ]
    script = (ASSETS / "page.js").read_text(encoding="utf-8")
    assert "".join(parsed.texts["script"]).strip() == script.strip()
    shown = [text for tag in ("th", "td", "dd", "h2", "text") for text in parsed.texts[tag]]
    assert len([text for text in shown if "<script>" in text]) >= 8


def test_the_page_fetches_nothing(page: str) -> None:
    parsed = Page(page)
    assert {parsed.count(tag) for tag in ("link", "iframe", "object", "embed", "base", "form")} == {
        0
    }
    assert parsed.attributes("src") == parsed.attributes("srcset") == []
    references = parsed.attributes("href") + parsed.attributes("xlink:href")
    assert references
    assert all(reference and reference.startswith(("#", "data:image/")) for reference in references)
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "@import" not in page
    policy = next(it for it in parsed.attributes("content") if it and "default-src" in it)
    script = "".join(parsed.texts["script"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'"
    )


def test_ids_are_unique_and_references_lead_to_them(page: str) -> None:
    parsed = Page(page)
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    links = parsed.attributes("href") + parsed.attributes("xlink:href")
    references = [link[1:] for link in links if link and link.startswith("#")]
    references += re.findall(r"url\(#([^)]*)\)", page)
    assert len(references) > 10
    assert set(references) <= set(ids)


def test_tables_and_pictures_are_there_and_named(page: str) -> None:
    parsed = Page(page)
    # Measured by both rulers, what drafts came to, and the 3090 as published.
    assert parsed.count("table") == 4
    assert parsed.count("svg") == parsed.count("figcaption") == 4
    assert "How many tokens a step brings" in parsed.texts["h3"]
    heads = [
        attributes for tag, attributes in parsed.elements if tag == "th" and "scope" in attributes
    ]
    columns = [attributes for attributes in heads if attributes["scope"] == "col"]
    assert parsed.count("button") == len(columns) > 10
    assert {attributes["aria-sort"] for attributes in columns} == {"none"}
    assert "width=device-width, initial-scale=1" in parsed.attributes("content")
    assert parsed.elements[0] == ("html", {"lang": "en"})


ORDERS = [
    (["1.5", "10.25", "", "-2.0"], True, False, [3, 0, 1, 2]),
    (["1.5", "10.25", "", "-2.0"], True, True, [1, 0, 3, 2]),
    (["b", "a", "B", ""], False, False, [1, 0, 2, 3]),
    (["10", "9", "1e-05"], True, False, [2, 1, 0]),
    (["1", "1", "0", "1"], True, True, [0, 1, 3, 2]),
]


@pytest.mark.parametrize(("values", "is_numeric", "is_descending", "places"), ORDERS)
def test_order_in_a_javascript_engine(
    values: list[str], is_numeric: bool, is_descending: bool, places: list[int]
) -> None:
    mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed")
    engine = mini_racer.MiniRacer()
    engine.eval("var document = {querySelectorAll: () => []};")  # no page here
    engine.eval((ASSETS / "page.js").read_text(encoding="utf-8"))
    call = f"order({json.dumps(values)}, {json.dumps(is_numeric)}, {json.dumps(is_descending)})"
    assert json.loads(engine.eval(f"JSON.stringify({call})")) == places


@pytest.mark.parametrize(
    ("column", "clicks", "methods", "sort"),
    [
        (2, 1, "abcd", "descending"),
        (2, 2, "cbad", "ascending"),
        (0, 1, "abcd", "ascending"),
        (1, 2, "dcba", "descending"),
    ],
)
def test_a_click_sorts_in_a_browser(
    browser: str, tmp_path: Path, column: int, clicks: int, methods: str, sort: str
) -> None:
    # A second script, the clicks, needs the policy out of the way.
    text = re.sub(r"<meta http-equiv=.*>", "", _table_page())
    text = text.replace("</body>", CLICKS % [[column, clicks]])
    parsed = Page(_in_browser(browser, tmp_path, text))
    assert [row[0] for row in parsed.rows[1:]] == [*methods]
    heads = [
        attributes
        for tag, attributes in parsed.elements
        if tag == "th" and "aria-sort" in attributes
    ]
    sorts = [attributes["aria-sort"] for attributes in heads]
    assert sorts == ["none"] * column + [sort] + ["none"] * (2 - column)


def test_the_policy_lets_only_the_pages_own_script_run(
    browser: str, tmp_path: Path, page: str
) -> None:
    assert VIOLATION not in _in_browser(browser, tmp_path, page)
    clicked = _in_browser(browser, tmp_path, _table_page().replace("</body>", CLICKS % [[2, 2]]))
    assert [row[0] for row in Page(clicked).rows[1:]] == [*"badc"]
    assert VIOLATION in clicked, "the control must be refused"


def test_escaping_alone_keeps_markup_from_running(browser: str, tmp_path: Path, page: str) -> None:
    no_policy = re.sub(r"<meta http-equiv=.*>", "", page)
    assert "<title>Speculative decoding leaderboard</title>" in _in_browser(
        browser, tmp_path, no_policy
    )
    injected = no_policy.replace("</body>", HOSTILE + "</body>")
    assert "<title>owned</title>" in _in_browser(browser, tmp_path, injected), (
        "the control must run"
    )


@pytest.fixture(scope="module")
def browser() -> str:
    """A Chromium; without one the test is skipped before its page is made."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    return found or pytest.skip(f"needs one of {', '.join(BROWSERS)}")


@pytest.fixture(scope="module")
def wide_page(browser: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of every method over three runs of Spec-Bench's tasks and code: its widest tables."""
    folder = tmp_path_factory.mktemp("wide")
    for run, method in itertools.product((1, 2, 3), (*BUILT_IN, *REFEREE_TITLES)):
        rows = [
            make_row(place, category, [2] * 6, 1 + 0.1 * run * place, cpu_time=[2.0])
            for place, category in enumerate((*SPEC_BENCH_TASKS[1:], "writing", "code") * 2)
        ]
        meta = {"method": method, "model_path": "lmsys/vicuna-7b-v1.3", "bench_name": "spec_bench"}
        write_answers(folder / str(run) / f"{method}.jsonl", rows, meta)
    out = folder / "page.html"
    folders = [str(folder / str(run)) for run in (1, 2, 3)]
    assert main([*folders, "--html", str(out), "--published-device", "A100"]) == 0
    return out.read_text(encoding="utf-8")


MEASURE = """\
<iframe id="page" style="border: 0; width: %dpx; height: 900px" srcdoc="%s"></iframe>
<script>
window.onload = () => {
  const page = document.getElementById("page").contentDocument;
  const right = (element) => element.getBoundingClientRect().right;
  const all = (selector) => Array.from(page.querySelectorAll(selector));
  const found = {
    page: page.documentElement.scrollWidth,
    hidden: all(".scroll").map((box) => box.scrollWidth - box.clientWidth),
    second: all("tbody tr").map((row) => right(row.cells[1])),
    titles: all("table").map((table) => table.tHead.rows[0].cells[1].textContent.trim()),
    pictures: all("figure svg").map(right),
    legend: all("#speedup-figure_1 text").map((text) => [text.textContent, right(text)]),
  };
  document.body.textContent = JSON.stringify(found);
};
</script>
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_cut_at_any_width(
    browser: str, tmp_path: Path, wide_page: str, width: int
) -> None:
    text = _in_browser(browser, tmp_path, MEASURE % (width, html.escape(wide_page)))
    found = json.loads(html.unescape(re.sub(r"<[^>]*>", "", text)))
    assert found["page"] <= width
    assert max(found["pictures"]) <= width
    names = {text.strip() for text, right in found["legend"] if right <= width}
    assert {"Hybrid", "Token Recycling", "Prompt lookup (PLD)", "SAM decoding"} <= names
    assert max(found["second"]) <= width, "the figure beside the method's name is out of view"
    assert found["titles"][0] == found["titles"][-1] == "Overall"
    if width == 1280:
        assert max(found["hidden"]) <= 0, "a column is behind a scroll bar"


def _in_browser(browser: str, folder: Path, text: str) -> str:
    """The page's document after its scripts have run in headless Chromium, and a refusal if any."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG)
    refused = "violates the following Content Security Policy" in done.stderr
    return done.stdout + (VIOLATION if refused else "")
