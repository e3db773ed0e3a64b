"""The download command: nothing unchecked lands or is overwritten, errors say what to do.

Small files stand in for the real ones; the network is an HTTP server on 127.0.0.1.

Run: pytest tests/scripts/test_download_data.py
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from evaluation.questions.pinned_data import PINNED, PinnedFile, download_command
from evaluation.questions.questions import load_questions
from model.commands.command_line import UserError
from scripts import download_data
from scripts.download_data import DATA_DIR, NetworkError, main

REAL_DATA = Path(__file__).resolve().parents[2] / "../shared/data"
NUM_MT_BENCH = 80
Pins = dict[str, PinnedFile]
Capture = pytest.CaptureFixture[str]


def _rows(num_rows: int) -> bytes:
    lines = (json.dumps({"question_id": i, "turns": [f"Zähle bis {i}."]}) for i in range(num_rows))
    return "".join(f"{line}\n" for line in lines).encode()


SPEC_BENCH = _rows(100)
MT_BENCH = b"".join(SPEC_BENCH.splitlines(keepends=True)[:NUM_MT_BENCH])
MBPP = _rows(7)
PROBLEMS = [
    {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "canonical_solution": "    pass\n"}
    for i in range(3)
]
# Compressed bytes carry a time: fixed, so that the hash is.
HUMAN_EVAL_GZ = gzip.compress("".join(json.dumps(row) + "\n" for row in PROBLEMS).encode(), mtime=0)
HUMAN_EVAL = PINNED["humaneval"].convert(HUMAN_EVAL_GZ)
CONTENTS = {"spec_bench": SPEC_BENCH, "mt_bench": MT_BENCH, "mbpp": MBPP, "humaneval": HUMAN_EVAL}
PUBLISHED = {**CONTENTS, "humaneval": HUMAN_EVAL_GZ}


@pytest.fixture(autouse=True)
def small_pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    """Pin the stand-in files; port 9 (discard) makes every unplanned fetch fail at once."""
    pins = {
        name: dataclasses.replace(
            PINNED[name],
            url=f"http://127.0.0.1:9/{PINNED[name].published_name}",
            sha256=hashlib.sha256(content).hexdigest(),
        )
        for name, content in CONTENTS.items()
    }
    pins["humaneval"] = dataclasses.replace(
        pins["humaneval"],
        published_sha256=hashlib.sha256(HUMAN_EVAL_GZ).hexdigest(),
        convert=PINNED["humaneval"].convert,
    )
    monkeypatch.setattr(download_data, "PINNED", pins)
    monkeypatch.setenv("no_proxy", "*")
    return pins


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as ``--from`` takes it; mt_bench is cut from spec_bench, so it is not there."""
    folder = tmp_path / "source"
    for bench in ("spec_bench", "mbpp"):
        (folder / bench).mkdir(parents=True)
        (folder / bench / "question.jsonl").write_bytes(CONTENTS[bench])
    (folder / "humaneval").mkdir()
    (folder / "humaneval" / "HumanEval.jsonl.gz").write_bytes(HUMAN_EVAL_GZ)
    return folder


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """The target folder, not there yet."""
    return tmp_path / "data"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        bench = self.path.split("/")[-1]
        if bench not in PUBLISHED:
            self.send_error(404)
            return
        is_cut = self.path.startswith("/cut/")
        body = PUBLISHED[bench]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:50] if is_cut else body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the command's own stderr is under test."""


@pytest.fixture
def server() -> Iterator[str]:
    """Address of a server that has the files, cut off after 50 bytes under ``/cut/``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


def _serve_from(pins: Pins, base_url: str) -> None:
    for name, pinned in pins.items():
        pins[name] = dataclasses.replace(pinned, url=f"{base_url}/{pinned.parent or name}")


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _error_of(arguments: list[str], kind: type[UserError] = UserError) -> str:
    """Return what is wrong with a command."""
    with pytest.raises(UserError) as error:
        main(arguments)
    assert error.type is kind
    message = str(error.value)
    for part in (": got ", "; allowed: ", "; "):
        assert part in message
    return message


def test_fetches_over_http(server: str, small_pins: Pins, data_dir: Path, capsys: Capture) -> None:
    _serve_from(small_pins, server)
    assert main([*CONTENTS, "--data-dir", str(data_dir)]) == 0
    for bench, content in CONTENTS.items():
        assert (data_dir / bench / "question.jsonl").read_bytes() == content
    assert _files(data_dir) == [f"{bench}/question.jsonl" for bench in sorted(CONTENTS)]
    captured = capsys.readouterr()
    assert "CC-BY-4.0" in captured.out
    assert "spec_bench" in captured.err


def test_a_cut_download_is_a_network_failure_and_writes_nothing(
    server: str, small_pins: Pins, data_dir: Path
) -> None:
    _serve_from(small_pins, f"{server}/cut")
    error = _error_of(["mbpp", "--data-dir", str(data_dir)], NetworkError)
    assert "50 bytes read" in error
    assert not data_dir.exists()


@pytest.mark.parametrize("is_answering", [True, False])
def test_network_failure_names_the_offline_way(
    is_answering: bool, server: str, small_pins: Pins, data_dir: Path
) -> None:
    if is_answering:
        small_pins["mbpp"] = dataclasses.replace(small_pins["mbpp"], url=f"{server}/missing")
    error = _error_of(["mbpp", "--data-dir", str(data_dir)], NetworkError)
    assert "--from DIR" in error
    assert ("404" in error) == is_answering
    assert not data_dir.exists()


def test_hash_mismatch_writes_nothing(server: str, small_pins: Pins, data_dir: Path) -> None:
    _serve_from(small_pins, server)
    small_pins["mbpp"] = dataclasses.replace(small_pins["mbpp"], sha256="0" * 64)
    error = _error_of(["mbpp", "--data-dir", str(data_dir)])
    assert hashlib.sha256(MBPP).hexdigest() in error
    assert "0" * 64 in error
    assert "nothing was written" in error
    assert not data_dir.exists()


def test_from_folder_needs_no_network(source: Path, data_dir: Path) -> None:
    arguments = ["mbpp", "mt_bench", "mbpp", "--from", str(source), "--data-dir", str(data_dir)]
    assert main(arguments) == 0
    assert _files(data_dir) == ["mbpp/question.jsonl", "mt_bench/question.jsonl"]


def test_what_is_published_in_another_form_is_converted(source: Path, data_dir: Path) -> None:
    assert main(["humaneval", "--from", str(source), "--data-dir", str(data_dir)]) == 0
    lines = (data_dir / "humaneval/question.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["turns"] for line in lines] == [[row["prompt"]] for row in PROBLEMS]


def test_the_published_form_and_what_becomes_of_it_are_both_checked(
    source: Path, small_pins: Pins, data_dir: Path
) -> None:
    right = small_pins["humaneval"]
    small_pins["humaneval"] = dataclasses.replace(right, sha256="0" * 64)
    arguments = ["humaneval", "--from", str(source), "--data-dir", str(data_dir)]
    assert "what became of" in _error_of(arguments)
    small_pins["humaneval"] = right
    (source / "humaneval/HumanEval.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert "HumanEval.jsonl.gz is not the pinned humaneval file" in _error_of(arguments)
    assert not data_dir.exists()


def test_speed_bench_is_left_to_its_owners(data_dir: Path) -> None:
    error = _error_of(["speed_bench", "--data-dir", str(data_dir)])
    assert "--question-file" in error and "Model-Optimizer" in error
    assert not data_dir.exists()


def test_mt_bench_is_the_first_80_rows(source: Path, data_dir: Path) -> None:
    assert main(["mt_bench", "--from", str(source), "--data-dir", str(data_dir)]) == 0
    rows = (data_dir / "mt_bench/question.jsonl").read_bytes().splitlines()
    assert [json.loads(row)["question_id"] for row in rows] == list(range(NUM_MT_BENCH))


def test_mt_bench_checks_its_own_hash_too(source: Path, small_pins: Pins, data_dir: Path) -> None:
    small_pins["mt_bench"] = dataclasses.replace(small_pins["mt_bench"], num_rows=79)
    error = _error_of(["mt_bench", "--from", str(source), "--data-dir", str(data_dir)])
    assert "first 79 rows" in error
    assert not data_dir.exists()


def test_a_right_file_is_left_alone(source: Path, data_dir: Path, capsys: Capture) -> None:
    assert main(["mbpp", "--from", str(source), "--data-dir", str(data_dir)]) == 0
    before = (data_dir / "mbpp/question.jsonl").stat()
    # Without --from: the dead URL proves that a right file costs no fetch either.
    assert main(["mbpp", "--data-dir", str(data_dir)]) == 0
    after = (data_dir / "mbpp/question.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "left alone" in capsys.readouterr().out


def test_another_file_is_replaced_only_by_force(source: Path, data_dir: Path) -> None:
    target = data_dir / "mbpp/question.jsonl"
    target.parent.mkdir(parents=True)
    target.write_text("my own questions\n")
    arguments = ["mbpp", "--from", str(source), "--data-dir", str(data_dir)]
    assert "--force" in _error_of(arguments)
    assert target.read_text() == "my own questions\n"
    assert main([*arguments, "--force"]) == 0
    assert target.read_bytes() == MBPP


def test_force_keeps_the_old_file_when_the_new_one_is_wrong(source: Path, data_dir: Path) -> None:
    target = data_dir / "mbpp/question.jsonl"
    target.parent.mkdir(parents=True)
    target.write_text("my own questions\n")
    (source / "mbpp/question.jsonl").write_bytes(MBPP[:-1])
    arguments = ["mbpp", "--force", "--from", str(source), "--data-dir", str(data_dir)]
    _error_of(arguments)
    assert target.read_text() == "my own questions\n"


def test_a_failed_rename_leaves_no_temporary_file(
    source: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("os.replace", refuse)
    error = _error_of(["mbpp", "--from", str(source), "--data-dir", str(data_dir)])
    assert "read-only" in error
    assert _files(data_dir) == []


@pytest.mark.parametrize("benches", [["mbpp", "gsm9k"], []])
def test_unknown_name_lists_the_known_ones(
    benches: list[str], source: Path, data_dir: Path
) -> None:
    error = _error_of([*benches, "--from", str(source), "--data-dir", str(data_dir)])
    assert "allowed: spec_bench, mt_bench, mbpp, humaneval;" in error
    assert ("'gsm9k'" in error) == bool(benches)
    assert not data_dir.exists()


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_from_must_hold_the_file(missing: str, source: Path, data_dir: Path) -> None:
    from_dir = source / "nowhere"
    if missing == "file":
        from_dir.mkdir()
    error = _error_of(["mbpp", "--from", str(from_dir), "--data-dir", str(data_dir)])
    assert str(from_dir) in error
    assert not data_dir.exists()


def test_data_dir_must_be_a_folder(source: Path, data_dir: Path) -> None:
    data_dir.write_text("a file")
    error = _error_of(["mbpp", "--from", str(source), "--data-dir", str(data_dir)])
    assert "--data-dir" in error


def test_help_shows_examples_and_the_default_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "python -m scripts.download_data spec_bench mbpp" in text
    assert f"(default: {DATA_DIR.name}/ of the checkout)" in text


def test_download_command_is_known_for_pinned_files_only() -> None:
    assert download_command("mbpp") == "python -m scripts.download_data mbpp"
    assert download_command("demo") is None


def test_pins_name_a_commit_and_a_hash() -> None:
    for name, pinned in PINNED.items():
        assert pinned.name == name
        hashes = [pinned.sha256, *filter(None, [pinned.published_sha256])]
        assert all(re.fullmatch("[0-9a-f]{64}", found) for found in hashes)
        assert re.search("/[0-9a-f]{40}/", pinned.url)


def test_real_files_match_the_pins(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (REAL_DATA / "spec_bench/question.jsonl").is_file():
        pytest.skip("the real question files do not lie beside this checkout")
    monkeypatch.setattr(download_data, "PINNED", PINNED)
    here = {
        name: pinned
        for name, pinned in PINNED.items()
        if (REAL_DATA / (pinned.parent or name) / pinned.published_name).is_file()
    }
    arguments = [*here, "--from", str(REAL_DATA), "--data-dir", str(data_dir)]
    assert main(arguments) == 0
    for name, pinned in here.items():
        assert len(load_questions(data_dir / name / "question.jsonl")) == pinned.num_rows
