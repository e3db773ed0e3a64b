"""The record of a run: the sidecar beside an answer file, and which runs it says may be compared.

`CONDITIONS` is the one table of a sidecar's conditions: whether a resumed run must have it, whether
it tells groups or entries of a leaderboard apart, whether a rerun needs it. A new condition is a line
there, and a value where the record is made if no option has its name. Weights and commit, too, are told here.

Use:
    record = RunRecord.read("answers.jsonl")
    record.differing(other, Use.COMPARED)
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path, PurePath
from typing import Any

from pydantic import SkipValidation

from evaluation.answers.row import JsonObject
from model.commands.command_line import UserError
from model.commands.files import write_whole
from model.methods import METHODS, find_method
from model.options import resolved

UNKNOWN = "unknown"
# The sidecar's role of a second run of the baseline.
NOISE_FLOOR = "noise floor"
# The role of the first of several servers: the others are measured against it.
BASELINE = "baseline"
# The key of a sidecar whose answers came from a server, which does not say how it decodes.
SERVED = "is_served"
# The default of a condition that all our sidecars have.
NO_DEFAULT = object()


class Use(Flag):
    """The decisions that a condition takes part in."""

    RECORDED = auto()  # it is an option of a run, and copied from there
    RESUMED = auto()  # the parts of a resumed run have it in common
    # A ratio of two speeds needs it equal: a group of the leaderboard has one value.
    COMPARED = auto()
    # The same, but a group shows it in a column of its own: the model's or the questions'.
    WARNED = auto()
    # Files that differ in it are different entries, as with the method's own options.
    OPTION = auto()
    NEEDED = auto()  # a rerun needs it
    EQUAL = auto()  # two files that are rerun together have it in common


@dataclass(frozen=True, slots=True)
class Condition:
    """A key of the sidecar that says how answers were made."""

    key: str  # its name in the sidecar
    uses: Use  # what it decides
    default: Any = NO_DEFAULT  # what an older sidecar means that lacks it


_OPTION, _RERUN = Use.RECORDED | Use.RESUMED, Use.NEEDED | Use.EQUAL

CONDITIONS: tuple[Condition, ...] = (
    Condition("method", Use.RESUMED | Use.NEEDED),
    Condition("options", Use.RESUMED),
    Condition("model_id", Use.RESUMED),
    Condition("bench_name", _OPTION | _RERUN),
    Condition("model_path", _OPTION | Use.WARNED),
    Condition("model_fingerprint", Use.RESUMED | Use.WARNED | _RERUN),
    Condition("device", Use.RESUMED | Use.COMPARED),
    # Cores and instruction sets: processors of one name differ in them. Older sidecars lack it.
    Condition("machine", Use.RESUMED | Use.COMPARED, default=None),
    Condition("dtype", Use.RESUMED | Use.COMPARED | _RERUN),
    # On a GPU: an older sidecar lacks it and had cuDNN's attention beside the others.
    Condition("sdpa_backends", Use.RESUMED | Use.COMPARED, default=None),
    Condition("threads", Use.RESUMED | Use.COMPARED),
    Condition("max_new_tokens", _OPTION | Use.COMPARED),
    Condition("temperature", _OPTION | Use.COMPARED | _RERUN),
    Condition("top_k", _OPTION | Use.COMPARED, default=0),
    Condition("top_p", _OPTION | Use.COMPARED, default=1.0),
    Condition("min_p", _OPTION | Use.COMPARED, default=0.0),
    Condition("repetition_penalty", _OPTION | Use.COMPARED | _RERUN, default=1.0),
    Condition("stop", _OPTION | Use.COMPARED | _RERUN, default=[]),
    Condition("system_prompt", _OPTION | Use.COMPARED | _RERUN, default=None),
    Condition("seed", _OPTION | Use.COMPARED, default=0),
    # Older sidecars have it: torch.compile was an option.
    Condition("compile", Use.RESUMED | Use.COMPARED, default=False),
    # None where it has no effect, as on a CPU; older sidecars lack it.
    Condition("graphs", Use.RESUMED | Use.COMPARED, default=None),
    Condition("kernels", _OPTION | Use.COMPARED, default="auto"),
    # Of a GGUF file: native or dequantised.
    Condition("weights", Use.RESUMED | Use.COMPARED, default=None),
    # Whether they were asked for and are not there: there is no compiler, or none fits the processor.
    Condition("lacks_kernels", Use.COMPARED, default=False),
    Condition("num_choices", _OPTION | Use.COMPARED, default=1),
    Condition("num_workers", Use.RESUMED | Use.COMPARED, default=None),
    Condition("batch_size", _OPTION | Use.COMPARED, default=1),
    Condition("conv_template", Use.RESUMED | Use.COMPARED | _RERUN, default=UNKNOWN),
    Condition("question_file_sha256", Use.RESUMED | Use.WARNED | _RERUN, default=UNKNOWN),
    # The cost curve by whose times a trace was replayed; None where a model answered.
    Condition("replayed", Use.RESUMED | Use.COMPARED, default=None),
    Condition("load_matrix", Use.RESUMED | Use.OPTION),
    Condition("category_map", _OPTION, default=[]),
    Condition("shuffle", _OPTION | Use.OPTION),
    # Parts of a benchmark are not runs of the whole, but several commands may fill one file.
    Condition("question_begin", Use.RECORDED | Use.OPTION),
    Condition("question_end", Use.RECORDED | Use.OPTION),
    Condition("num_questions", _OPTION | Use.OPTION, default=None),
    Condition("prompt_tokens", _OPTION | Use.OPTION, default=None),
    Condition("shard", Use.RESUMED | Use.OPTION),
    Condition("state_order", Use.RESUMED),
    Condition("warmup", _OPTION),
)
# Further keys of a sidecar: when, where and by which command it was made.
CIRCUMSTANCES = frozenset(
    (
        *("start_time", "end_time", "git_commit", "versions", "argv", "resumed"),
        *("kernel_names", "kernel_build", "engine", "method_title"),
        *("interleaved_with", "interleaved_run", "question_file_name", "held_bytes", "num_rows"),
        "keeps_memory",
    )
)


def conditions(use: Use) -> list[Condition]:
    """Return the conditions that have one of these uses, in the table's order."""
    return [condition for condition in CONDITIONS if condition.uses & use]


def keys(use: Use) -> list[str]:
    return [condition.key for condition in conditions(use)]


def not_resumed() -> frozenset[str]:
    """Return the keys that may differ between the parts of a resumed run.

    All others must be equal, those that the table does not know included.
    """
    known = (condition for condition in CONDITIONS if not condition.uses & Use.RESUMED)
    return CIRCUMSTANCES | {condition.key for condition in known}


class RunRecord(JsonObject):
    """The content of a sidecar; empty where an answer file has none."""

    method: SkipValidation[str | None] = None
    model_id: SkipValidation[str | None] = None
    bench_name: SkipValidation[str | None] = None
    role: SkipValidation[str | None] = None
    dtype: SkipValidation[str | None] = None
    git_commit: SkipValidation[str | None] = None
    shard: SkipValidation[str | None] = None  # I/N
    interleaved_run: SkipValidation[str | None] = None  # common to files that were answered in turn
    held_bytes: SkipValidation[int | None] = None  # by the drafter after the last question
    is_served: SkipValidation[bool] = (
        False  # whether a server answered, of whose device nothing is known
    )

    @classmethod
    def read(cls, path: str | Path) -> RunRecord:
        """Read an answer file's sidecar, empty if there is none; a `UserError` if it is no readable JSON object."""
        sidecar = sidecar_path(path)
        try:
            meta = json.loads(sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls.of({})
        except OSError as error:
            raise UserError(f"cannot read the sidecar {sidecar}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"the sidecar {sidecar} is not JSON ({error}); correct or remove it"
            ) from None
        if not isinstance(meta, dict):
            raise UserError(f"the sidecar {sidecar} is not a JSON object; correct or remove it")
        if not isinstance(meta.get("options", {}), dict):
            raise UserError(
                f"the sidecar {sidecar} is not valid: options must be a JSON object; correct or remove it"
            )
        return cls.of(meta)

    def write(self, path: str | Path) -> None:
        """Write the sidecar of an answer file; a `UserError` if it cannot be written."""
        write_whole(sidecar_path(path), json.dumps(self.values, indent=2) + "\n")

    def __bool__(self) -> bool:
        return bool(self.values)

    @property
    def is_foreign(self) -> bool:
        """Whether no inference command of this project wrote it."""
        return "method" not in self.values

    @property
    def options(self) -> dict[str, Any]:
        return self.values.get("options") or {}

    @property
    def engine(self) -> dict[str, str]:
        """Program, precision and features as another program says them; `lacks`: what its build is without."""
        return self.values.get("engine") or {}

    @property
    def question_file(self) -> str:
        """The first digits of the question file's hash."""
        return str(self.values.get("question_file_sha256", UNKNOWN))[:12]

    @property
    def max_new_tokens(self) -> int | None:
        """The limit of new tokens a turn, None if it is not known."""
        limit = self.values.get("max_new_tokens")
        return limit if isinstance(limit, int) else None

    @property
    def is_greedy(self) -> bool | None:
        """Whether the largest logit was taken, not a sample; None if it is not known."""
        temperature = self.values.get("temperature")
        return temperature == 0 if isinstance(temperature, int | float) else None

    @property
    def threads(self) -> int | None:
        """The CPU threads, None if they are not known."""
        threads = self.values.get("threads")
        return threads if isinstance(threads, int) and threads > 0 else None

    @property
    def keeps_memory(self) -> bool:
        """Whether the method remembers earlier questions; an older sidecar says so by an option alone."""
        return bool(self.values.get("keeps_memory", self.options.get("start") == "hot"))

    def ran_in_turn_with(self, other: RunRecord) -> bool:
        """Whether two files were answered question by question in turn, on one loaded model."""
        run = self.interleaved_run
        return run is not None and run == other.interleaved_run

    @property
    def model(self) -> str:
        """The model as groups call it: the last two parts of its path, and its fingerprint."""
        model_path = self.values.get("model_path") or self.model_id
        # Two parts tell models apart; the folders above are one machine's.
        model = "/".join(PurePath(str(model_path)).parts[-2:]) if model_path else UNKNOWN
        model = " ".join(model.split())  # a line, whatever it is
        fingerprint = self.values.get("model_fingerprint")
        return f"{model}@{fingerprint}" if fingerprint else model

    def compared(self) -> tuple[str, ...]:
        """Return the values of the `COMPARED` conditions, as texts."""
        return tuple(str(self._value(condition)) for condition in conditions(Use.COMPARED))

    def further_options(self) -> dict[str, Any]:
        """Return the options that tell runs apart beside the method's."""
        found = {key: self.values.get(key) for key in keys(Use.OPTION)}
        return {key: value for key, value in found.items() if value is not None}

    def differing(self, other: RunRecord, use: Use) -> Iterator[tuple[str, Any, Any]]:
        """Yield the keys of this use in which two records differ, with both values.

        A key that either record lacks has its default there; without a known one it is not compared.
        """
        for condition in conditions(use):
            mine, theirs = (record._value(condition) for record in (self, other))
            if UNKNOWN not in (mine, theirs) and mine != theirs:
                yield condition.key, mine, theirs

    def unlike(self, other: RunRecord, but: frozenset[str]) -> tuple[str, Any, Any] | None:
        """Return the first key, by name, in which two records are not of one run, with both values.

        Keys in `but` may differ. A key that either record lacks has its default there, or None.
        """
        mine, theirs = self.with_defaults(), other.with_defaults()
        for key in sorted((set(mine) | set(theirs)) - but):
            if mine.get(key) != theirs.get(key):
                return key, mine.get(key), theirs.get(key)
        return None

    def with_defaults(self) -> dict[str, Any]:
        """Return the values, with the meaning of an older sidecar's missing keys filled in."""
        values = dict(self.values)
        for condition in CONDITIONS:
            if values.get(condition.key) is None and condition.default is not NO_DEFAULT:
                values[condition.key] = condition.default
        with suppress(ValueError):  # a method of another version
            # A method named by its class is not imported: the file may be a stranger's.
            if self.method is not None and self.method in METHODS:
                config_class = find_method(self.method).config_class
                values["options"] = resolved(config_class, self.options)
        return values

    def _value(self, condition: Condition) -> Any:
        default = condition.default if self.values else UNKNOWN
        return self.values.get(condition.key, UNKNOWN if default is NO_DEFAULT else default)


def sidecar_path(path: str | Path, ending: str = ".meta.json") -> Path:
    """Return where an answer file's sidecar lies: `ANSWERS.jsonl` has `ANSWERS.meta.json`.

    Of the ending ".state" is the folder of what a method keeps across the questions. A `UserError` if `ANSWERS` is
    there too: its sidecar would have the same name.
    """
    path = Path(path)
    name = path.name.removesuffix(".jsonl")
    namesake = path.with_name(name if name != path.name else f"{name}.jsonl")
    if namesake.is_file():
        raise UserError(
            f"answer file {path}: {namesake} exists, and both would use {name}{ending}; "
            "give another file, or rename one of them"
        )
    return path.with_name(name + ending)


def recorded_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that its record copies."""
    return {key: options[key] for key in keys(Use.RECORDED)}


def model_fingerprint(model_path: str, hf_config: Any) -> str:
    """Return 12 digits that tell weights apart: the hub's commit, or a hash of a folder's files or a GGUF file.

    Of large files only size, first and last megabyte are read: enough to tell checkpoints apart
    without reading gigabytes.
    """
    if hub_commit := getattr(hf_config, "_commit_hash", None):
        return hub_commit[:12]
    digest = hashlib.sha256()
    path = Path(model_path)
    suffixes = (".safetensors", ".bin", ".pt", ".pth")
    in_folder = (file for file in sorted(path.glob("*")) if file.suffix in suffixes)
    for file in [path] if path.is_file() else in_folder:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(2**20))
            content.seek(max(0, size - 2**20))
            digest.update(content.read())
    return digest.hexdigest()[:12]


def check_weights(
    model_path: str, hf_config: Any, fingerprint: str, what: str, advice: str
) -> None:
    """Refuse a model whose weights are not those of an earlier run.

    The `UserError` says "... `what` of FINGERPRINT; `advice`", such as "the answers are" and "give that model".
    """
    found = model_fingerprint(model_path, hf_config)
    if found != fingerprint:
        raise UserError(
            f"model_path {model_path}: got weights {found}; {what} of {fingerprint}; {advice}"
        )


def git_commit() -> str | None:
    """Return this checkout's commit, with "-dirty" if tracked files differ; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
