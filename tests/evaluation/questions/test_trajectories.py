"""Trajectories of OpenAI's messages: every assistant message is a turn after what was before it as it was.

Run: pytest tests/evaluation/questions/test_trajectories.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation import endpoint
from evaluation.convert import main as convert
from evaluation.questions.conversation import (
    ChatTemplateConversation,
    FastchatConversation,
    asked_ids,
    check_messages,
)
from evaluation.questions.questions import Question, load_questions
from model.commands.command_line import UserError
from model.commands.model_options import DEMO_MODEL
from tests.evaluation.conftest import read_rows, run, write_rows
from tests.evaluation.fake_server import fake_server

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "x"}'},
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is x?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "x is a letter."},
    {"role": "assistant", "content": "A letter."},
    {"role": "user", "content": "Thanks, not asked"},
]
# A template that shows all that messages have.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content[0].text }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.word }}){% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def question(tmp_path: Path) -> Question:
    rows = [{"id": "a", "messages": MESSAGES, "tools": TOOLS}]
    (found,) = load_questions(write_rows(tmp_path / "q.jsonl", rows))
    return found


@pytest.fixture
def conversation() -> ChatTemplateConversation:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = TEMPLATE
    return ChatTemplateConversation(tokenizer)


def test_each_turn_follows_the_true_messages_before_it(
    question: Question, conversation: ChatTemplateConversation
) -> None:
    assert (question.question_id, question.category) == ("a", "uncategorised")
    assert question.turns == ("What is x?", "x is a letter.")
    check_messages(conversation, [question])
    prompts = [conversation.message_prompt(question, turn) for turn in (0, 1)]
    assert prompts == [
        "[look_up]<system>Be brief.<user>What is x?<assistant>",
        "[look_up]<system>Be brief.<user>What is x?<assistant>(look_up x)<tool>x is a letter.<assistant>",
    ]
    # What the model said is not in the next prompt.
    assert asked_ids(conversation, question, 1, []) == conversation.ids(prompts[1])


@pytest.mark.parametrize(
    "function",
    [
        {"name": "look_up", "arguments": {"word": "x"}},
        {"name": "look_up", "arguments": json.dumps('{"word": "x"}')},
        {"name": "look_up", "arguments": '{"word": "x"}'},
    ],
)
@pytest.mark.parametrize("form", ["wrapped", "flat", "old"])
def test_calls_of_every_form_are_those_of_today(
    function: dict[str, Any], form: str, tmp_path: Path, conversation: ChatTemplateConversation
) -> None:
    call, answer = {"tool_calls": [{"id": "1", "function": function}]}, {"role": "tool"}
    if form == "flat":
        call = {"tool_calls": [function]}
    if form == "old":
        call, answer = {"function_call": function}, {"role": "function", "name": "look_up"}
    messages = [
        {"role": "assistant", "content": "How can I help?"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is x?"}],
        },
        {"role": "assistant", "content": None, **call},
        {**answer, "content": "x is a letter."},
        {"role": "assistant", "content": "A letter."},
    ]
    tools = TOOLS if form == "wrapped" else [{"type": "function", **TOOLS[0]["function"]}]
    rows = [{"id": "a", "messages": messages, "tools": tools}]
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", rows))
    check_messages(conversation, [question])
    prompts = [conversation.message_prompt(question, turn) for turn in range(len(question.turns))]
    begun = "[look_up]<assistant>How can I help?<user>What is x?<assistant>"
    assert prompts == [begun, f"{begun}(look_up x)<tool>x is a letter.<assistant>"]
    assert question.tools == tuple(TOOLS)
    assert json.loads(question.messages[2]["tool_calls"][0]["function"]["arguments"]) == {
        "word": "x"
    }


@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": None}, {}])
def test_calls_without_arguments_have_none(arguments: dict[str, Any], tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "end", **arguments}}
    messages = [MESSAGES[1], {"role": "assistant", "tool_calls": [call]}]
    (question,) = load_questions(
        write_rows(tmp_path / "q.jsonl", [{"id": 1, "messages": messages}])
    )
    assert question.messages[1]["tool_calls"][0]["function"] == {"name": "end", "arguments": "{}"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"tools": [{"type": "web_search"}]},
            r"line 1, tool 0: got .*allowed: a function with a name",
        ),
        (
            {"message": {"tool_calls": [{"id": "1"}]}},
            "line 1, message 1, call 0: got .*with a name",
        ),
        (
            {"message": {"tool_calls": "look_up"}},
            "line 1, message 1: tool_calls: got look_up; allowed",
        ),
        (
            {"message": {"content": [{"type": "image_url"}]}},
            "line 1, message 1: content: got .*image_url",
        ),
    ],
)
def test_what_no_template_can_show_is_named_with_its_place(
    row: dict[str, Any], says: str, tmp_path: Path
) -> None:
    messages = [MESSAGES[1], {"role": "assistant", "content": "A.", **row.pop("message", {})}]
    file = write_rows(tmp_path / "q.jsonl", [{"id": 1, "messages": messages, **row}])
    with pytest.raises(UserError, match=says):
        load_questions(file)


def test_a_template_that_leaves_calls_out_is_refused(
    question: Question, conversation: ChatTemplateConversation
) -> None:
    with pytest.raises(UserError, match="'a': the chat template says"):
        conversation._tokenizer.chat_template = "{{ raise_exception('no tools') }}"
        check_messages(conversation, [question])
    conversation._tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(
        UserError, match="the chat template leaves out look_up, a tool or a call of one"
    ):
        check_messages(conversation, [question])
    with pytest.raises(UserError, match=r"conv_template: got vicuna_v1\.1 with trajectories"):
        check_messages(FastchatConversation(conversation._tokenizer, "vicuna_v1.1"), [question])


def test_messages_without_an_answer_are_a_question_and_other_mistakes_one_line(
    tmp_path: Path,
) -> None:
    rows = [{"id": 1, "messages": MESSAGES[:2]}]
    (found,) = load_questions(write_rows(tmp_path / "q.jsonl", rows))
    assert (found.turns, found.system, found.messages) == (("What is x?",), "Be brief.", ())
    rows = [{"id": 1, "messages": MESSAGES}]
    with pytest.raises(UserError, match="system_prompt: got it with trajectories"):
        load_questions(write_rows(tmp_path / "q.jsonl", rows), system_prompt="Be long.")
    rows = [{"id": 1, "messages": "none"}]
    with pytest.raises(UserError, match="lacks the key 'question_id'"):
        load_questions(write_rows(tmp_path / "q.jsonl", rows))


def test_a_server_gets_the_true_messages_and_the_tools(question: Question, tmp_path: Path) -> None:
    with fake_server(answer=lambda said: f"after {len(said)}", tool_calls=[("a", "{}")]) as (
        url,
        it,
    ):
        words = ["--question-file", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "out")]
        assert endpoint.main(["--base-url", url, *words, "--warmup", "0"]) == 0
    assert [body["messages"] for body in it.requests] == [MESSAGES[:2], MESSAGES[:4]]
    assert all(body["tools"] == TOOLS for body in it.requests)


def test_trajectories_are_answered_and_acceptance_is_reported_by_turn(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = [
        "Find the file.",
        "list_files parser",
        "parser/read.py",
        "read_file read.py",
        "def f():",
    ]
    roles = [*("user", "assistant") * 2, "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)] + [
        {"role": "assistant", "content": "It is empty."}
    ]
    rows = [{"id": name, "category": "agent", "messages": messages} for name in "ab"]
    file = write_rows(tmp_path / "q.jsonl", rows)
    answers = tmp_path / "answers.jsonl"
    asked = ["--question-file", file, "--max-new-tokens", 8]
    assert run("pld", options, answers, *asked) == 0
    rows = read_rows(answers)
    assert [len(row["choices"][0]["turns"]) for row in rows] == [3, 3]
    conversation = ChatTemplateConversation(AutoTokenizer.from_pretrained(DEMO_MODEL))
    for row, question in zip(rows, load_questions(file), strict=True):
        lengths = [len(asked_ids(conversation, question, turn, [])) for turn in range(3)]
        assert row["choices"][0]["prompt_tokens"] == lengths
    capsys.readouterr()
    assert convert([str(answers)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [it["Turn"] for it in report["Acceptance by turn of the conversation"]] == [
        "1",
        "2",
        "3",
    ]
