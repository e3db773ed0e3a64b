"""Shared by all commands: options made from config dataclasses, errors as one line with exit code 2, and Ctrl-C.

Defaults, bounds and help texts of options come from the dataclasses (`model.options.option`). A delayed Ctrl-C
takes effect after the step (chat) or after the question (runs).
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import logging
import os
import select
import signal
import sys
import threading
import types
import typing
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from ..methods import BUILT_IN, Method, find_method

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The library's name: `model`, or `token_recycling` where it is installed.
LIBRARY = __name__.partition(".")[0]
# Packages whose log messages a command shows its user: builds, measurements, kernels.
NOTING = ("budget", "kernels", "machine")
# They reorder the text around them, so that it reads as something else (Unicode TR 36).
BIDI_CONTROLS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# In a checkout, the folder that holds `data/`; meaningless in an installed package.
CHECKOUT = Path(__file__).resolve().parents[2]
METAVARS: dict[Any, str] = {int: "N", float: "X", str: "NAME"}
# Exit code of a process ended by SIGPIPE.
BROKEN_PIPE = 128 + 13
# Message of the first Ctrl-C in a run of questions.
FINISHING = "interrupted: finishing this question; Ctrl-C again to stop at once"

Config = TypeVar("Config")


def command_of(name: str) -> str:
    """Return a command as its user calls it: `token-recycling NAME`, or `python -m model.NAME` in a checkout."""
    return f"python -m model.{name}" if LIBRARY == "model" else f"token-recycling {name}"


class UserError(Exception):
    """A user's mistake, in one line: what, got, allowed, what to do."""

    exit_code = 2


def check_text(text: str, what: str) -> None:
    """Raise a UserError that names `what` for words of the command line that are not text in its encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what}: got bytes that are not text in this locale; give UTF-8 (LC_ALL=C.UTF-8)"
        ) from error


def printable(text: str) -> str:
    r"""Return untrusted text with every character that could control a terminal escaped (\x1b).

    Line feeds and tabs stay. Lone surrogates, which no stream can encode, are escaped too.
    """

    def spelled(character: str) -> str:
        is_control = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        is_escaped = is_control or character in BIDI_CONTROLS
        return ascii(character)[1:-1] if is_escaped else character

    return "".join(map(spelled, text))


@contextmanager
def user_errors(*more: type[Exception]) -> Iterator[None]:
    """Turn a `ValueError`, or an error of a `more` type, into a `UserError`."""
    kinds: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except kinds as error:
        raise UserError(str(error)) from error


class OptionParser(argparse.ArgumentParser):
    """An argument parser that takes `--tree-version` and `--tree_version` alike.

    Spec-Bench and TokenRecycling use both spellings. Abbreviations are refused: an unknown option is an error.
    """

    def __init__(self, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)  # type: ignore[arg-type]

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        given = sys.argv[1:] if args is None else list(args)
        for before, word in zip(("", *given), given, strict=False):
            if not word or (word.startswith("--") and word.endswith("=")):
                # Usually an unset shell variable.
                option = (word or before).rstrip("=") or "arguments"
                self.error(f"{option}: got an empty text; give a value, or leave the option out")
        return super().parse_known_args([_with_dashes(word) for word in given], namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and one line."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def add_options(
    group: argparse._ActionsContainer, config_class: type, names: Collection[str] | None = None
) -> None:
    """Add an option for every field of a config dataclass, or for the named ones.

    An option that is not given sets no attribute.
    """
    hints = typing.get_type_hints(config_class)
    for item in dataclasses.fields(config_class):
        if names is not None and item.name not in names:
            continue
        flags = ["--" + item.name.replace("_", "-"), *item.metadata.get("aliases", ())]
        hint = hints[item.name]  # X, X | None or tuple[X, ...], of values of type X
        is_tuple = typing.get_origin(hint) is tuple
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        kind: Any = typing.get_args(hint)[0] if typing.get_origin(hint) else hint
        text = item.metadata["help"].replace("%", "%%")
        if item.default not in (None, (), "") and kind is not bool:
            text += f" (default: {str(item.default).removeprefix(f'{CHECKOUT}/')})"
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            is_switch = item.default is False
            options["action"] = "store_true" if is_switch else argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["choices"] = item.metadata.get("choices") or None
            usual = None if options["choices"] else METAVARS[kind]
            options["metavar"] = item.metadata.get("metavar") or usual
            options["nargs"] = "+" if is_tuple else None
        group.add_argument(*flags, **options)


def config_of(config_class: type[Config], given: Mapping[str, Any]) -> Config:
    """Return a config made from the given options; raises UserError if a value is not allowed."""
    names = [item.name for item in dataclasses.fields(config_class) if item.name in given]  # type: ignore[arg-type]
    with user_errors():
        return config_class(**{name: given[name] for name in names})


def parse_with_method(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[dict[str, Any], Method | None, dict[str, Any]]:
    """Parse a command line, to whose options --method is added, and the options of the method that it names.

    Returns:
        The options that are given; the method, None without; and all its options, of those given and its defaults.

    Raises:
        UserError: if there is no method of that name, or one of its options is not allowed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    # Read before any other option, as it decides which there are.
    of_method = OptionParser(add_help=False)
    for each in (of_method, parser):
        each.add_argument(
            "--method",
            metavar="NAME",
            help=f"{', '.join(BUILT_IN)}, or package.module:DrafterClass (default: what pays on the "
            "device, hybrid on a CPU and recycling on a GPU); --method NAME --help lists its options",
        )
    known, _ = of_method.parse_known_args(words)  # type: ignore[no-untyped-call]
    if not known.method:
        return vars(parser.parse_args(words)), None, {}
    with user_errors():
        method = find_method(known.method)
    add_options(parser.add_argument_group(f"options of {method.name}"), method.config_class)
    given = vars(parser.parse_args(words))
    return given, method, dataclasses.asdict(config_of(method.config_class, given))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _Notes(logging.Handler):
    """Writes what the library logs to stderr, a line each."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def show_notes() -> None:
    """From now on, show on stderr what the packages of `NOTING` log."""
    for package in NOTING:
        notes = logging.getLogger(f"{LIBRARY}.{package}")
        if not any(isinstance(handler, _Notes) for handler in notes.handlers):
            notes.addHandler(_Notes())
            notes.setLevel(logging.INFO)
    # Where there is nvcc and no GPU, it says so on import; what is built here needs neither.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def run_command(main: Callable[[Sequence[str] | None], int]) -> NoReturn:
    """Run a command's main function and exit with its code; a `UserError` is one line on stderr and
    its code.
    """
    show_notes()
    show_interrupts()
    # What a terminal's encoding lacks is shown as an escape: it must not end a command whose work is done.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main(None)
        if sys.stdout is not None:  # None if it was closed
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise  # another pipe
        _drop_output()
        code = BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _drop_output()
        print(f"error: cannot write: {error.strerror}; free some space", file=sys.stderr)
        code = UserError.exit_code
    except UserError as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _drop_output() -> None:
    """Discard pending output, so that Python's flush at exit cannot fail."""
    if sys.stdout is None:
        return
    with suppress(OSError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_left() -> bool:
    """Whether the reader of standard output has gone, as after `| head`."""
    if sys.stdout is None:
        return False
    asked = select.poll()
    asked.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in asked.poll(0))


def hide_interrupts(package: str) -> None:
    """Let Ctrl-C end `python -m PACKAGE.COMMAND` without a traceback until `show_interrupts`: imports take seconds.

    Nothing changes in a program that imports the package.
    """
    is_command = sys.argv[:1] == ["-m"]  # until its packages are imported
    handler = signal.getsignal(signal.SIGINT)  # ignored in the background
    names = [word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv]
    if is_command and package in names and handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def show_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, if it was not ignored from the beginning."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupt:
    """Within its block the first Ctrl-C is noted, with a line on stderr, and the second raises KeyboardInterrupt.

    So an answer stops between two steps, when the decoder's state is consistent, and a run between
    two questions. In other threads than the main one, which get no signals, nothing is noted.
    """

    def __init__(self, message: str = "") -> None:
        self.is_noted = False
        self._message = f"\n{message}\n".encode() if message else b""
        self._previous: Any = None
        self._is_ours = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._is_ours:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_noted:
            raise KeyboardInterrupt
        self.is_noted = True
        if self._message:
            os.write(2, self._message)  # not print: the signal may interrupt one
