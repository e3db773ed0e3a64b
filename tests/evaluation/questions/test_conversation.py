"""Prompts are Spec-Bench's to the letter, and answers are cut as it cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation.questions.conversation import (
    ChatTemplateConversation,
    Message,
    check_system,
    choose_conversation,
)
from evaluation.questions.questions import Question
from model.commands.command_line import UserError
from tests.evaluation.conftest import DEMO_MODEL

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)


class Letters:
    """A tokenizer whose tokens are letters, so that a prompt can be read."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> str:
        return str(messages)

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def prompt(template: str, history: Sequence[Message], user: str) -> str:
    """Return the prompt's text under a fastchat template."""
    tokenizer = Letters()
    conversation = choose_conversation(template, "any", tokenizer)
    return tokenizer.decode(conversation.prompt_ids(history, user))


@pytest.mark.parametrize(
    ("model_path", "name"),
    [
        ("lmsys/vicuna-7b-v1.3", "vicuna_v1.1"),
        ("lmsys/vicuna-33b-v1.3", "vicuna_v1.1"),
        ("models/Vicuna-13B-v1.5/", "vicuna_v1.1"),
        ("lmsys/longchat-7b-16k", "vicuna_v1.1"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2"),
        ("codellama/CodeLlama-7b-Instruct-hf", "llama-2"),
        ("meta-llama/Llama-2-7b-hf", "tokenizer"),
        ("meta-llama/Llama-3.1-8B-Instruct", "tokenizer"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "tokenizer"),
        ("vicuna/some-other-model", "tokenizer"),
        ("data/demo/model", "tokenizer"),
    ],
)
def test_auto_knows_a_model_by_its_own_name(model_path: str, name: str) -> None:
    assert choose_conversation("auto", model_path, Letters()).name == name


def test_a_template_that_is_given_wins_over_the_name() -> None:
    vicuna = "lmsys/vicuna-7b-v1.3"
    assert choose_conversation("tokenizer", vicuna, Letters()).name == "tokenizer"
    assert choose_conversation("llama-2", vicuna, Letters()).name == "llama-2"


def test_an_unknown_template_is_refused_with_the_likeliest_meant() -> None:
    with pytest.raises(UserError, match=r"'vicuna_v1\.2'.*did you mean vicuna_v1\.1"):
        choose_conversation("vicuna_v1.2", "any", Letters())


def test_vicuna_prompts_are_those_of_spec_bench() -> None:
    first = VICUNA_SYSTEM + "USER: Who is it? ASSISTANT:"
    second = first + " It is me.</s>USER: Really? ASSISTANT:"
    assert prompt("vicuna_v1.1", [], "Who is it?") == first
    history = [Message("Who is it?", "It is me.")]
    assert prompt("vicuna_v1.1", history, "Really?") == second


def test_llama_2_prompts_close_each_exchange() -> None:
    assert prompt("llama-2", [], "Who?") == "[INST] Who? [/INST]"
    text = prompt("llama-2", [Message("Who?", "Me.")], "Really?")
    assert text == "[INST] Who? [/INST] Me. </s><s>[INST] Really? [/INST]"


def test_raw_is_the_bare_question() -> None:
    assert prompt("raw", [], "Who?") == "Who?"


def test_the_example_exchange_of_a_template_is_left_out() -> None:
    assert prompt("one_shot", [], "Who?").count("### Human") == 1


def test_prompts_do_not_leak_from_one_question_to_the_next() -> None:
    conversation = choose_conversation("vicuna_v1.1", "any", Letters())
    alone = conversation.prompt_ids([], "Who?")
    conversation.prompt_ids([Message("a", "b")], "c")
    assert conversation.prompt_ids([], "Who?") == alone


def test_the_tokenizers_template_writes_each_special_token_once(demo_tokenizer: Any) -> None:
    conversation = choose_conversation("auto", "data/demo/model", demo_tokenizer)
    ids = conversation.prompt_ids([Message("Who?", "Me.")], "Really?")
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "Who?"), ("assistant", "Me."), ("user", "Really?"))
    ]
    text = demo_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert demo_tokenizer.decode(ids) == text
    assert ids.count(demo_tokenizer.bos_token_id) == 1
    assert ids.count(demo_tokenizer.eos_token_id) == 1


def test_special_tokens_and_outer_blanks_are_removed_from_answers(demo_tokenizer: Any) -> None:
    ids = demo_tokenizer(" It is me. ", add_special_tokens=False).input_ids
    for template in ("tokenizer", "vicuna_v1.1"):
        conversation = choose_conversation(template, "any", demo_tokenizer)
        assert conversation.text([*ids, demo_tokenizer.eos_token_id]) == "It is me."


def test_answers_are_cut_at_stop_strings() -> None:
    tokenizer = Letters()
    conversation = choose_conversation("zero_shot", "any", tokenizer)
    said = tokenizer("It is me. \n### Human: And I").input_ids
    assert conversation.text(said) == "It is me."
    plain = choose_conversation("vicuna_v1.1", "any", tokenizer)
    assert plain.text(said) == "It is me. \n### Human: And I"


def test_a_stop_string_that_comes_first_cuts_nothing() -> None:
    tokenizer = Letters()
    conversation = choose_conversation("zero_shot", "any", tokenizer)
    assert conversation.text(tokenizer("\n### Me").input_ids) == "### Me"


def test_the_stop_tokens_of_a_template_end_answers() -> None:
    assert 151645 in choose_conversation("qwen-7b-chat", "any", Letters()).stop_ids
    assert not choose_conversation("vicuna_v1.1", "any", Letters()).stop_ids


@pytest.mark.parametrize(
    ("template", "text", "says"),
    [
        ("chatgpt", None, "chatgpt, .*Invalid style"),
        ("tokenizer", "{% if %}", "tokenizer, .*Expected an expression"),
        ("auto", "{{ raise_exception('no system') }}", "tokenizer, .*no system"),
    ],
)
def test_a_template_that_makes_no_prompt_is_refused(
    template: str, text: str | None, says: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = text or tokenizer.chat_template
    with pytest.raises(UserError, match=f"conv_template: {says}.*; give another one"):
        choose_conversation(template, "any", tokenizer)


ASKED = Question(1, "qa", ("Who?",), "Be brief.")


def test_a_system_prompt_stands_where_the_template_has_its_place(demo_tokenizer: Any) -> None:
    for template in ("tokenizer", "vicuna_v1.1", "llama-2"):
        conversation = choose_conversation(template, "any", demo_tokenizer)
        check_system(conversation, [ASKED], "any")
        plain, given = (conversation.prompt([], "Who?", system) for system in (None, "Be brief."))
        assert "Be brief." in given and given.index("Be brief.") < given.index("Who?")
        assert "Be brief." not in plain, "the next prompt has the template's own again"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for one in messages %}{{ raise_exception('no system role') }}{% endfor %}", "no sys"),
        ("{{ messages[-1]['content'] }}", "leaves it out"),
    ],
)
def test_a_template_without_a_system_role_is_refused_where_one_is_asked_for(
    template: str, says: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = template
    conversation = ChatTemplateConversation(tokenizer)
    check_system(conversation, [Question(1, "qa", ("Who?",))], "any")
    with pytest.raises(UserError, match=f"system_prompt: tokenizer, .*{says}.*--conv-template"):
        check_system(conversation, [ASKED], "any")
