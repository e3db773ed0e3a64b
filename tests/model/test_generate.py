"""The command that continues a text: the library's tokens on standard output, and errors before weights load.

Run: pytest tests/model/test_generate.py
"""

from __future__ import annotations

import pytest
import torch

from model import SpeculativeDecoder, generate
from model.commands import loading
from model.commands.command_line import UserError
from model.methods import BUILT_IN
from tests.model.api.test_decoder import DEMO

PROMPT = "USER: Tell me about the sea. ASSISTANT:"
WORDS = ("--model-path", str(DEMO), "--threads", "1", "--max-new-tokens", "12")


@pytest.fixture(scope="module")
def plain() -> SpeculativeDecoder:
    """Plain decoding by the demo model."""
    return SpeculativeDecoder.from_pretrained(DEMO, dtype=torch.float32, method="vanilla")


@pytest.mark.parametrize("options", ["", "--method pld --num-pred-tokens 3"])
def test_the_text_alone_is_on_stdout(
    options: str, plain: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.run([*WORDS, "--prompt", PROMPT, *options.split()]) == 0
    said = capsys.readouterr()
    assert said.out == plain.generate(PROMPT, max_new_tokens=12).text + "\n"
    assert ": 12 tokens in " in said.err and (not options or "[pld: " in said.err)


def test_draws_are_those_of_the_seed(
    plain: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--method vanilla --temperature 1 --seed 1"
    assert generate.run([*WORDS, "--prompt", PROMPT, *options.split()]) == 0
    expected = plain.generate(PROMPT, max_new_tokens=12, temperature=1, seed=1).text
    assert capsys.readouterr().out == expected + "\n"
    assert expected != plain.generate(PROMPT, max_new_tokens=12).text


@pytest.mark.parametrize("method", BUILT_IN)
def test_options_of_no_method_have_the_name_of_one_of_the_command(method: str) -> None:
    with pytest.raises(SystemExit) as ended:
        generate.run(["--method", method, "--help"])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max-new-tokens 0", "max_new_tokens: got 0"),
        ("--method nope", "method: got 'nope'"),
        ("--method pld --num-pred-tokens 0", "num_pred_tokens: got 0"),
        ("--top-k 5", "top_k, top_p: need sampling"),
        ("--model-path /nowhere", "model_path: got '/nowhere'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_weights_load(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_target", None)
    with pytest.raises(UserError, match=said):
        generate.run(["--model-path", str(DEMO), "--prompt", "The sea", *words.split()])


def test_a_prompt_without_room_or_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_target", None)
    with pytest.raises(
        UserError, match=r"^prompt: got \d+ tokens; allowed: fewer than the model's"
    ):
        generate.run(["--model-path", str(DEMO), "--prompt", "sea " * 5000])
    with pytest.raises(UserError, match="prompt: got bytes that are not text"):
        generate.run(["--model-path", str(DEMO), "--prompt", "\udcff"])


def test_control_characters_of_a_model_do_not_reach_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "transformers.PreTrainedTokenizerFast.decode", lambda *_, **__: "a\x1b[31mb"
    )
    assert generate.run([*WORDS, "--prompt", PROMPT, "--method=vanilla"]) == 0
    assert "\x1b" not in capsys.readouterr().out
