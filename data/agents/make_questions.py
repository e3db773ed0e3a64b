"""Write the question files of agents' work: calls of functions, edits of code, and extractions, all by a seed.

Run: python data/agents/make_questions.py        (writes data/{agents,edits,extraction}/question.jsonl)
"""

# ruff: noqa: E501  # sentences of questions
from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1]
SEED = 2026
NUM_CONVERSATIONS, NUM_EDITS, NUM_EXTRACTIONS = 60, 40, 40

NAMES = (
    "Ada Brandt",
    "Luis Ortega",
    "Mei Tanaka",
    "Jonas Weber",
    "Amara Okafor",
    "Elif Kaya",
    "Noor Haddad",
    "Ivan Petrov",
)
CITIES = ("Lisbon", "Oslo", "Kyoto", "Nairobi", "Quito", "Leipzig", "Tampere", "Valencia")
THINGS = (
    "desk lamp",
    "water filter",
    "hiking boots",
    "USB cable",
    "coffee grinder",
    "rain jacket",
    "notebook",
    "bike lock",
)
TOPICS = (
    "budget review",
    "design meeting",
    "safety training",
    "product launch",
    "team lunch",
    "weekly report",
)
FILES = ("notes.md", "report.txt", "config.yaml", "results.csv", "todo.txt", "main.py")

Row = dict[str, Any]
Draw = Callable[[random.Random], Any]


def text(description: str) -> Row:
    return {"type": "string", "description": description}


def number(description: str, most: int) -> Row:
    return {"type": "integer", "description": description, "minimum": 0, "maximum": most}


def function(name: str, description: str, **properties: Row) -> Row:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


DATE, EMAIL = text("date as YYYY-MM-DD"), text("address of an e-mail")
# Of each domain: its functions, and turns: what the user says, the function that is called, its arguments and result.
DOMAINS: dict[str, tuple[list[Row], list[Draw]]] = {
    "travel": (
        [
            function(
                "search_trains",
                "Finds trains between two cities.",
                origin=text("city"),
                destination=text("city"),
                date=DATE,
            ),
            function(
                "book_train",
                "Books seats in a train.",
                train_id=text("id of the train"),
                passenger=text("full name"),
                seats=number("seats", 9),
            ),
            function(
                "get_weather",
                "Tells the weather of a city.",
                city=text("city"),
                days=number("days from today", 7),
            ),
        ],
        [
            lambda r: (
                f"I want to go from {(a := r.choice(CITIES[:4]))} to {(b := r.choice(CITIES[4:]))} on {(d := day(r))}. Which trains are there?",
                "search_trains",
                {"origin": a, "destination": b, "date": d},
                {
                    "trains": [
                        {
                            "train_id": f"T{r.randrange(100, 999)}",
                            "departure": hour(r),
                            "price": price(r),
                        }
                        for _ in range(3)
                    ]
                },
            ),
            lambda r: (
                f"Book {(n := r.randrange(1, 5))} seats in train {(t := f'T{r.randrange(100, 999)}')} for {(p := r.choice(NAMES))}, please.",
                "book_train",
                {"train_id": t, "passenger": p, "seats": n},
                {
                    "status": "booked",
                    "reference": f"R-{r.randrange(10000, 99999)}",
                    "total": price(r),
                },
            ),
            lambda r: (
                f"And how is the weather in {(c := r.choice(CITIES))} over the next {(n := r.randrange(2, 7))} days?",
                "get_weather",
                {"city": c, "days": n},
                {
                    "forecast": [
                        {
                            "day": i + 1,
                            "sky": r.choice(["sun", "rain", "clouds"]),
                            "celsius": r.randrange(4, 31),
                        }
                        for i in range(n)
                    ]
                },
            ),
        ],
    ),
    "shop": (
        [
            function(
                "find_product",
                "Finds products by words.",
                query=text("words"),
                max_price=number("highest price", 500),
            ),
            function(
                "add_to_cart",
                "Puts a product into the cart.",
                product_id=text("id of the product"),
                quantity=number("how many", 20),
            ),
            function("track_order", "Says where an order is.", order_id=text("id of the order")),
        ],
        [
            lambda r: (
                f"Please look for a {(t := r.choice(THINGS))} that costs at most {(m := r.randrange(20, 200))} euros.",
                "find_product",
                {"query": t, "max_price": m},
                {
                    "products": [
                        {"product_id": f"P{r.randrange(1000, 9999)}", "name": t, "price": price(r)}
                        for _ in range(2)
                    ]
                },
            ),
            lambda r: (
                f"Take {(n := r.randrange(1, 6))} of product {(p := f'P{r.randrange(1000, 9999)}')}.",
                "add_to_cart",
                {"product_id": p, "quantity": n},
                {"items_in_cart": n + 1, "total": price(r)},
            ),
            lambda r: (
                f"Where is my order {(o := f'O-{r.randrange(10**5, 10**6)}')}?",
                "track_order",
                {"order_id": o},
                {
                    "order_id": o,
                    "status": "on its way",
                    "city": r.choice(CITIES),
                    "arrives": day(r),
                },
            ),
        ],
    ),
    "office": (
        [
            function(
                "create_event",
                "Creates an event in the calendar.",
                title=text("title"),
                date=DATE,
                start=text("time as HH:MM"),
                minutes=number("length", 480),
            ),
            function(
                "send_email",
                "Sends an e-mail.",
                to=EMAIL,
                subject=text("subject"),
                body=text("text"),
            ),
            function("list_events", "Lists the events of a day.", date=DATE),
        ],
        [
            lambda r: (
                f"Put a {(t := r.choice(TOPICS))} into my calendar: {(d := day(r))} at {(h := hour(r))}, {(m := 15 * r.randrange(1, 9))} minutes.",
                "create_event",
                {"title": t, "date": d, "start": h, "minutes": m},
                {"event_id": f"E{r.randrange(1000, 9999)}", "conflicts": []},
            ),
            lambda r: (
                f"Write to {(e := mail(r.choice(NAMES)))} that the {(t := r.choice(TOPICS))} is on {(d := day(r))}.",
                "send_email",
                {"to": e, "subject": t.capitalize(), "body": f"The {t} is on {d}."},
                {"status": "sent", "to": e},
            ),
            lambda r: (
                f"What is in my calendar on {(d := day(r))}?",
                "list_events",
                {"date": d},
                {
                    "events": [
                        {"title": r.choice(TOPICS), "start": hour(r), "minutes": 30}
                        for _ in range(3)
                    ]
                },
            ),
        ],
    ),
    "files": (
        [
            function(
                "read_file",
                "Reads lines of a file.",
                path=text("path"),
                first_line=number("first line", 9999),
                num_lines=number("lines", 500),
            ),
            function(
                "search_files",
                "Searches files for words.",
                pattern=text("words"),
                folder=text("folder"),
            ),
            function("write_file", "Writes a file.", path=text("path"), content=text("all of it")),
        ],
        [
            lambda r: (
                f"Show me {(n := r.randrange(5, 40))} lines of {(f := 'docs/' + r.choice(FILES))}, from line {(b := r.randrange(1, 90))} on.",
                "read_file",
                {"path": f, "first_line": b, "num_lines": n},
                {
                    "path": f,
                    "lines": [
                        f"{b + i}: {r.choice(TOPICS)}, {r.choice(NAMES)}, {price(r)}"
                        for i in range(4)
                    ],
                },
            ),
            lambda r: (
                f"Which files in src mention {(t := r.choice(TOPICS))}?",
                "search_files",
                {"pattern": t, "folder": "src"},
                {
                    "matches": [
                        {"path": f"src/{r.choice(FILES)}", "line": r.randrange(1, 400)}
                        for _ in range(3)
                    ]
                },
            ),
            lambda r: (
                f'Save the sentence "{(s := f"{r.choice(NAMES)} leads the {r.choice(TOPICS)}.")}" as {(f := "docs/" + r.choice(FILES))}.',
                "write_file",
                {"path": f, "content": s},
                {"path": f, "bytes": len(s)},
            ),
        ],
    ),
}
EDITED = '''class {cls}:
    """Keeps the {noun}s of the {place}."""

    def __init__(self, limit={limit}):
        self.limit = limit
        self.{noun}s = []
        self.total = 0

    def add(self, {noun}, amount):
        if len(self.{noun}s) >= self.limit:
            raise ValueError("the {place} is full")
        self.{noun}s.append(({noun}, amount))
        self.total += amount

    def remove(self, {noun}):
        for index, (known, amount) in enumerate(self.{noun}s):
            if known == {noun}:
                del self.{noun}s[index]
                self.total -= amount
                return amount
        return 0

    def average(self):
        if not self.{noun}s:
            return 0.0
        return self.total / len(self.{noun}s)
'''


def day(source: random.Random) -> str:
    return f"2026-{source.randrange(1, 13):02d}-{source.randrange(1, 29):02d}"


def hour(source: random.Random) -> str:
    return f"{source.randrange(7, 20):02d}:{15 * source.randrange(4):02d}"


def price(source: random.Random) -> float:
    return source.randrange(500, 30000) / 100


def mail(name: str) -> str:
    return name.lower().replace(" ", ".") + "@example.org"


def conversations(source: random.Random) -> list[Row]:
    """Return trajectories of three to five calls, their results, and a sentence in the end."""
    rows = []
    for index in range(NUM_CONVERSATIONS):
        domain = list(DOMAINS)[index % len(DOMAINS)]
        tools, turns = DOMAINS[domain]
        system = f"You are an assistant for {domain}. Call a function for every wish."
        messages: list[Row] = [{"role": "system", "content": system}]
        for count in range(source.randrange(3, 6)):
            said, name, arguments, result = source.choice(turns)(source)
            call_id = f"call_{index}_{count}"
            called = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": call_id, "type": "function", "function": called}
            messages += [
                {"role": "user", "content": said},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call_id, "content": json.dumps(result)},
            ]
        messages += [
            {"role": "user", "content": "Thank you. Say in one sentence what you did last."},
            {"role": "assistant", "content": "I did what you asked for."},
        ]
        rows.append(
            {
                "id": index,
                "category": domain,
                "messages": messages,
                "tools": tools,
                "tool_choice": "required",
            }
        )
    return rows


def edits(source: random.Random) -> list[Row]:
    """Return wishes for an edit of a class, which is predicted to stay as it is."""
    rows = []
    for index in range(NUM_EDITS):
        noun, place = (
            source.choice(("parcel", "ticket", "sample", "record", "letter")),
            source.choice(("shelf", "queue", "archive", "depot")),
        )
        words = {
            "cls": f"{noun.title()}{place.title()}",
            "noun": noun,
            "place": place,
            "limit": source.randrange(5, 90),
        }
        code = EDITED.format(**words)
        kind, wish = source.choice(
            (
                ("rename", f"Rename the method average to mean_{noun}."),
                ("constant", f"Change the default limit to {source.randrange(100, 900)}."),
                ("message", f'Change the text of the error to "no room for another {noun}".'),
                ("document", "Add a docstring to every method that has none."),
            )
        )
        turn = f"{wish} Answer with the whole code and nothing else.\n\n```python\n{code}```"
        rows.append(
            {
                "question_id": index,
                "category": kind,
                "turns": [turn],
                "prediction": f"```python\n{code}```",
            }
        )
    return rows


def extractions(source: random.Random) -> list[Row]:
    """Return texts, and the schema of what is to be found in them."""
    rows = []
    for index in range(NUM_EXTRACTIONS):
        person, city, thing = source.choice(NAMES), source.choice(CITIES), source.choice(THINGS)
        count, paid, when = source.randrange(1, 9), price(source), day(source)
        if index % 2:
            kind = "order"
            said = f"On {when} {person} of {city} ordered {count} pieces of the article {thing} and paid {paid} euros. The answer goes to {mail(person)}."
            fields = {
                "customer": text("full name"),
                "email": EMAIL,
                "city": text("city"),
                "article": text("what"),
                "quantity": number("pieces", 99),
                "paid_euros": {"type": "number"},
                "date": DATE,
            }
        else:
            kind, topic, start = "event", source.choice(TOPICS), hour(source)
            said = f"{person} invites you to the {topic} in {city} on {when}. It begins at {start} and takes {15 * count} minutes; write to {mail(person)} if you cannot come."
            fields = {
                "title": text("what"),
                "host": text("full name"),
                "contact": EMAIL,
                "city": text("city"),
                "date": DATE,
                "start": text("time as HH:MM"),
                "duration_minutes": number("length", 480),
                "is_online": {"type": "boolean"},
            }
        schema = {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
        turn = f"Extract the {kind} as JSON with the fields {', '.join(fields)}.\n\n{said}"
        form = {"type": "json_schema", "json_schema": {"name": kind, "schema": schema}}
        rows.append(
            {"question_id": index, "category": kind, "turns": [turn], "response_format": form}
        )
    return rows


def main() -> None:
    for name, make in (("agents", conversations), ("edits", edits), ("extraction", extractions)):
        rows = make(random.Random(SEED))
        file = DATA / name / "question.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
