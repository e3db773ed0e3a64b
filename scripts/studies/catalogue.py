"""The studies: what each varies, and how it is run.

Templates are learned on every other question; drafters answer all, so that their memory is as in use,
and are then scored on the rest. Everything is greedy but the study of temperature, and independent of
the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count

from scripts.replay.command import answer_turns
from scripts.replay.recording import RecordedTurn
from scripts.replay.scores import figures
from scripts.replay.search_tree import RankPath
from scripts.studies.field import check_entrants, field
from scripts.studies.lab import Lab, Point, Study
from scripts.studies.texts import LITTLE_CATEGORIES, MUCH_CATEGORIES, made_up_questions

SUCCESSORS = (2, 4, 8, 16, 32)
BREADTHS = (1, 2, 3, 4, 8, 32)
BUDGETS = (1, 2, 4, 8, 16, 32, 64, 80, 128)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
HYBRID = "hybrid --budget fixed --num-nodes {}"
HELD_OUT = (
    "Templates are learned on every other question. All drafters answer all questions, and are scored on "
    "the rest."
)


def successors(lab: Lab) -> Study:
    """Vary k, the successors kept for a token, at equal nodes."""
    points = []
    for k in SUCCESSORS:
        tree = lab.template(f"k{k}", lab.learn(80, k))
        found = lab.measure_held_out(f"recycling --output-id-topk {k} {tree}")
        points.append(Point("recycling, learned tree of 80 nodes", k, found))
    return Study("How many successors k are worth keeping?", "k", points, HELD_OUT)


def shape(lab: Lab) -> Study:
    """Vary the breadth of a tree of 32 drafted nodes, and with it the depth."""
    points = []
    for breadth in BREADTHS:
        paths = regular_tree(breadth, 32)
        tree = lab.template(f"breadth{breadth}", paths)
        found = lab.measure(f"recycling --output-id-topk {max(8, breadth)} {tree}")
        points.append(Point("recycling, 32 drafted nodes", breadth, found))
    note = "Every node has as many children as the breadth says, level by level, until 32 are drafted: "
    depths = {b: max(map(len, regular_tree(b, 32))) for b in BREADTHS}
    note += (
        ", ".join(f"breadth {breadth} is {depth} deep" for breadth, depth in depths.items()) + "."
    )
    return Study("Broad or deep, at equal nodes?", "children of a node", points, note)


def trees(lab: Lab) -> Study:
    """Compare the paper's tree, a learned one and a dynamic one at equal nodes."""
    learned = lab.learn(80)
    points = [Point("static, the paper's", 80, lab.measure_held_out("recycling"))]
    for nodes in (16, 80):
        tree = lab.template(f"learned{nodes}", learned[:nodes])
        points.append(Point("static, learned", nodes, lab.measure_held_out(f"recycling {tree}")))
    for nodes in (16, 80):
        found = lab.measure_held_out(HYBRID.format(nodes))
        points.append(Point("dynamic (hybrid)", nodes, found))
    return Study("Static, learned or dynamic trees?", "drafted nodes", points, HELD_OUT)


def start(lab: Lab) -> Study:
    """Compare what a question may begin with: nothing, another category, all before it."""
    by_category: dict[str, list[RecordedTurn]] = {}
    for turn in lab.recording.turns:
        by_category.setdefault(turn.category, []).append(turn)
    names = list(by_category)
    points = []
    for title, words in (("recycling", "recycling"), ("hybrid, 16 nodes", HYBRID.format(16))):
        points.append(Point(title, "cold", lab.measure(f"{words} --start cold")))
        scores = []
        for index, name in enumerate(names):
            memory = lab.memory_after(words, by_category[names[index - 1]])
            scores += lab.run(words, by_category[name], memory)
        points.append(Point(title, "warm", figures(scores)))
        points.append(Point(title, "hot", lab.measure(words)))
    note = (
        "Cold: nothing is known before a question. Warm: every question begins with what the questions "
        "of the category before it in the file have taught. Hot: with all questions before it."
    )
    return Study("What is memory of other questions worth?", "start", points, note)


def policy(lab: Lab) -> Study:
    """Compare what is written back and how, with and without the prompt's rows."""
    options = {
        "original": "--policy original",
        "accepted last": "--policy accepted-last --no-harvest-prompt",
        "accepted only": "--policy accepted-only --no-harvest-prompt",
        "average": "--policy average --no-harvest-prompt",
        "accepted last, prompt harvested": "--policy accepted-last --harvest-prompt",
        "average, prompt harvested": "--policy average --harvest-prompt",
    }
    best = lab.template("best16", lab.ranked()[:16])
    points = [
        Point(tree, name, lab.measure_held_out(f"recycling {words} {given}"))
        for tree, words in (("the paper's tree", ""), ("its best 16 nodes", best))
        for name, given in options.items()
    ]
    note = (
        "Accepted last: a new row takes the place of an older one, rows of accepted nodes are written last. "
        "Accepted only: rejected nodes write none. Average: a new row counts half, what the row held the other "
        "half. Original: as the published code, in the order of the tree, without the warm-up passes whose rows it "
        "would keep. "
    )
    question = "Which rows win, and is the prompt worth reading?"
    return Study(question, "policy", points, note + HELD_OUT)


def temperature(lab: Lab) -> Study:
    """Vary the sampling temperature."""
    drafters = {
        "recycling": "recycling",
        "pld": "pld",
        "samd": "samd",
        "hybrid, 16 nodes": HYBRID.format(16),
    }
    points = [
        Point(name, value, figures(lab.sample(words, value)))
        for name, words in drafters.items()
        for value in TEMPERATURES
    ]
    note = (
        "One seed; at one temperature all drafters give the same text, at another a different one."
    )
    return Study("What does sampling cost?", "temperature", points, note, is_greedy=False)


def text(lab: Lab) -> Study:
    """Compare texts that repeat little with texts that repeat much."""
    sets = {
        kind: [
            turn
            for question in questions
            for turn in answer_turns(lab.recording, lab.model, lab.conversation, question)
        ]
        for kind, questions in made_up_questions().items()
    }
    for category in (*LITTLE_CATEGORIES, *MUCH_CATEGORIES):
        sets[category] = [turn for turn in lab.recording.turns if turn.category == category]
    little = ("shuffled words", "random identifiers", *LITTLE_CATEGORIES)
    much = ("code edits", *MUCH_CATEGORIES)
    drafters = {
        "recycling": "recycling",
        "pld": "pld",
        "samd": "samd",
        "hybrid, 16 nodes": HYBRID.format(16),
    }
    points = [
        Point(name, kind, lab.measure(words, sets[kind]))
        for name, words in drafters.items()
        for kind in (*little, *much)
        if sets[kind]
    ]
    note = "Every kind of text begins with empty memory; categories are those of the questions."
    return Study("How much does repetition in the text matter?", "text", points, note)


def learning(lab: Lab) -> Study:
    """Follow the mean over blocks of questions as memory grows."""
    drafters = {
        "recycling, hot": "recycling",
        "recycling, cold": "recycling --start cold",
        "hybrid, 16 nodes, hot": HYBRID.format(16),
    }
    turns = lab.recording.turns
    questions = list(dict.fromkeys(turn.question_id for turn in turns))
    size = max(1, len(questions) // 8)
    points = []
    for name, words in drafters.items():
        scores = lab.run(words)
        for begin in range(0, len(questions), size):
            block = set(questions[begin : begin + size])
            found = figures([each for each in scores if each.turn.question_id in block])
            points.append(Point(name, begin + len(block), found))
    note = (
        f"Means over {size} questions each, up to the one that is named. Questions come category by "
        "category: compare hot and cold at one place, not places with each other."
    )
    return Study("How fast does memory pay?", "questions seen", points, note)


def budget(lab: Lab) -> Study:
    """Vary the drafted nodes of a step."""
    learned, ranked = lab.learn(max(BUDGETS)), lab.ranked()
    newest = "--policy accepted-last"
    points = []
    for nodes in BUDGETS:
        tree = lab.template(f"budget{nodes}", learned[:nodes])
        paper = lab.template(f"ranked{nodes}", ranked[:nodes])
        for name, words in (
            ("recycling, the paper's tree, best nodes first", f"recycling {newest} {paper}"),
            ("recycling, the paper's tree, averages", f"recycling {paper}"),
            ("recycling, learned tree", f"recycling {newest} {tree}"),
            ("recycling, learned tree, averages", f"recycling {tree}"),
            ("pld", f"pld --num-pred-tokens {nodes}"),
            ("samd alone", f"samd --fallback none --num-pred-tokens {nodes}"),
            ("samd and recycling", f"samd --num-pred-tokens {nodes} {tree}"),
            ("hybrid", HYBRID.format(nodes)),
        ):
            points.append(Point(name, nodes, lab.measure_held_out(words)))
    points.sort(key=lambda point: point.series)
    note = (
        f"{HELD_OUT} The paper's tree has 80 nodes, however many more are allowed. Averages: half of a row "
        "stays what it was (`--policy average`, the default); without, `--policy accepted-last`."
    )
    return Study("How many nodes are worth drafting?", "drafted nodes", points, note)


def regular_tree(breadth: int, num_nodes: int) -> list[RankPath]:
    """Return the first nodes, level by level, of the tree whose nodes have `breadth` children."""
    paths: list[RankPath] = [()]
    for index in count():
        for rank in range(breadth):
            if len(paths) > num_nodes:
                return paths[1:]
            paths.append((*paths[index], rank))
    raise AssertionError("unreachable")


STUDIES: dict[str, Callable[[Lab], Study]] = {
    "successors": successors,
    "shape": shape,
    "trees": trees,
    "start": start,
    "policy": policy,
    "temperature": temperature,
    "text": text,
    "learning": learning,
    "budget": budget,
    "field": field,
}
# Checks of the studies that take files, before anything is loaded.
CHECKS: dict[str, Callable[[Mapping[str, str]], None]] = {"field": check_entrants}
# Tokens of a recorded row that a study reads, if others than the methods' own 8; sampling asks the model itself.
NUM_READ = {"successors": max(SUCCESSORS), "shape": max(BREADTHS), "temperature": 0, "field": 65}
