"""The packaged corpus: rows that come with installed Python packages, so that a run needs no data set.

Worked examples that lm-eval ships inside its wheel (the chain-of-thought few-shots of MMLU, BBH and GSM8K),
and two text sources of the running interpreter: modules of the standard library and the topics of the
language reference (`pydoc_data.topics`). Selection and order depend on nothing but their content; the
standard library differs between patch versions of Python 3.11, so the code and documentation rows are those
of the interpreter in use.

Classes: MMLU's four groups (stem, humanities, social_sciences, other), reasoning (BBH and GSM8K), code,
documentation.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks.contracts import InputError
from tasks.sources import split
from tasks.sources.rows import Corpus, Question, Row

CLASSES = ("stem", "humanities", "social_sciences", "other", "reasoning", "code", "documentation")
LONG_QUESTION = 560  # characters, about 128 tokens
LONGEST_QUESTION = 1000  # characters, about 224 tokens
PASSAGE = 1000  # characters of a passage of code or documentation, at least; about 300 tokens
RUNNING_TEXT = 60  # letters and digits from which a paragraph counts as text of its own
PASSAGES_PER_FILE = 8  # so that no large module is most of its class

# Modules written in Python, present in every build of CPython 3.11, without large tables.
# fmt: off
MODULES = (
    "argparse", "ast", "base64", "bdb", "calendar", "cgi", "cmd", "code", "codecs", "compileall",
    "configparser", "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis", "doctest",
    "enum", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "getpass", "gettext",
    "glob", "graphlib", "gzip", "hashlib", "heapq", "imaplib", "inspect", "ipaddress", "keyword",
    "linecache", "locale", "lzma", "mailbox", "mimetypes", "modulefinder", "netrc", "ntpath", "numbers",
    "operator", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "pkgutil", "platform",
    "plistlib", "poplib", "posixpath", "pprint", "profile", "pstats", "pyclbr", "queue", "quopri",
    "random", "reprlib", "runpy", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib",
    "socket", "socketserver", "ssl", "statistics", "string", "stringprep", "subprocess", "symtable",
    "sysconfig", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace",
    "traceback", "tracemalloc", "types", "typing", "uuid", "warnings", "wave", "weakref", "webbrowser",
    "zipapp", "zipfile",
)
# fmt: on

_OPTIONS = re.compile(r"(.*)\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(.*)", re.DOTALL)
_ANSWER = re.compile(r"[Tt]he answer is \(([A-D])\)")
_THINK = "Let's think step by step."


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows, deduplicated by normalised text; 1,500 or so, read in about a second.

    Raises InputError when lm-eval's or Python's files are not where they belong.
    """
    seen: set[str] = set()
    kept = []
    for row in _all_rows():
        key = split.normalised(row.prompt)
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return tuple(kept)


def texts(role: str) -> list[tuple[str, str]]:
    """(id, text) of all rows with this role; the classes take turns, so that any prefix holds every class."""
    if role not in split.ROLES:
        raise ValueError(f"role is '{role}', expected one of {split.ROLES}")
    return [(row.id, row.text) for row in by_turns(row for row in rows() if row.role == role)]


def corpus() -> Corpus:
    """The rows of every role but upcycling; held-out text is code and documentation."""
    role = {name: by_turns(row for row in rows() if row.role == name) for name in split.ROLES}
    return Corpus(
        requests=role["requests"],
        calibration=role["calibration"],
        text=[row for row in role["benchmark"] if row.response is None],
        questions=[row for row in role["benchmark"] if row.question],
    )


def by_turns(chosen: Iterable[Row]) -> list[Row]:
    """Shuffle by hash within each class, one passage of every file before the second of any, then take turns.

    A class that runs out drops out; the order is a pure function of the ids.
    """
    queues: dict[str, list[Row]] = {}
    for row in chosen:
        queues.setdefault(row.class_name, []).append(row)
    ordered = []
    for name in sorted(queues, key=CLASSES.index):
        turn_of: dict[str, int] = {}
        places = []
        for row in sorted(queues[name], key=lambda row: split.fraction(f"order {row.id}")):
            origin = row.id.partition(":")[0]
            turn_of[origin] = turn_of.get(origin, -1) + 1
            places.append((turn_of[origin], len(places), row))
        ordered.append([row for _, _, row in sorted(places, key=lambda place: place[:2])])
    longest = max((len(queue) for queue in ordered), default=0)
    return [queue[turn] for turn in range(longest) for queue in ordered if turn < len(queue)]


def _all_rows() -> Iterator[Row]:
    folder = _package_folder("lm_eval") / "tasks"
    yield from _mmlu(folder / "mmlu" / "flan_cot_fewshot")
    for path in sorted((folder / "bbh" / "cot_fewshot").glob("[a-z]*.yaml")):
        for number, sample in enumerate(_samples(path)):
            prompt = f"Q: {sample['input'].strip()}\nA: {_THINK}"
            target = sample["target"].strip().removeprefix(_THINK).strip()
            yield Row(f"bbh/{path.stem}/{number}", "reasoning", "worked", prompt, target)
    for number, sample in enumerate(_samples(folder / "gsm8k" / "gsm8k-cot.yaml")):
        prompt = f"Q: {sample['question'].strip()}\nA:"
        yield Row(f"gsm8k/{number}", "reasoning", "worked", prompt, sample["target"].strip())
    yield from _documentation()
    yield from _code()


def _mmlu(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("mmlu_*.yaml")):
        subject = path.stem.removeprefix("mmlu_")
        group = _read_yaml(path)["tag"].removeprefix("mmlu_flan_cot_fewshot_")
        for number, sample in enumerate(_samples(path)):
            text, target = sample["question"].strip(), sample["target"].strip()
            options, answer = _OPTIONS.fullmatch(text), _ANSWER.search(target)
            question = (
                None  # one question has five choices: a request like others, never a benchmark question
            )
            if options and answer and "(E)" not in text:
                stem, a, b, c, d = (part.strip() for part in options.groups())
                question = Question(subject, stem, (a, b, c, d), "ABCD".index(answer[1]))
            source = "mmlu" if question and len(text) < LONG_QUESTION else "mmlu-long"
            if len(text) >= LONGEST_QUESTION:
                source = "mmlu-longest"
            response = target.removeprefix(_THINK).strip()
            yield Row(
                f"mmlu/{subject}/{number}", group, source, f"Q: {text}\nA: {_THINK}", response, question
            )


def _documentation() -> Iterator[Row]:
    """Passages of the language reference, whose topics quote each other."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise InputError(
            "this Python has no pydoc_data.topics, which the documentation class is read from: "
            "install the full standard library, or use another requests source"
        ) from None
    seen: set[str] = set()
    for name, text in sorted(topics.items()):
        for number, passage in enumerate(_passages(text.split("\n\n"), seen)):
            yield Row(f"documentation/{name}:{number}", "documentation", "documentation", passage, None)


def _code() -> Iterator[Row]:
    """Passages of standard library modules, cut at blank lines between statements."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for name in MODULES:
        path = folder / f"{name}.py"
        try:
            source = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(
                f"this Python's standard library has no {path.name}, which the code class is read from: "
                "install the full standard library, or use another requests source"
            ) from None
        for number, passage in enumerate(_passages(re.split(r"\n\n+", source), seen)):
            yield Row(f"code/{name}:{number}", "code", "code", passage, None)


def _passages(paragraphs: Iterable[str], seen: set[str]) -> list[str]:
    """Join paragraphs to passages of at least PASSAGE characters; a shorter rest is left out.

    At most PASSAGES_PER_FILE evenly spread ones are kept. A running paragraph that an earlier file had (a
    licence, a quoted section) is left out: `seen` holds the normalised ones.
    """
    passages, buffer = [], []
    for paragraph in paragraphs:
        key = split.normalised(paragraph)
        if len(key) >= RUNNING_TEXT:
            if key in seen:
                continue
            seen.add(key)
        buffer.append(paragraph)
        joined = "\n\n".join(buffer).strip("\n")
        if len(joined) >= PASSAGE:
            passages.append(joined)
            buffer = []
    if len(passages) <= PASSAGES_PER_FILE:
        return passages
    return [passages[index * len(passages) // PASSAGES_PER_FILE] for index in range(PASSAGES_PER_FILE)]


def _package_folder(package: str) -> Path:
    """Where a package is installed; found without importing it (lm_eval takes seconds)."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise InputError(f"package {package} is not installed: run `make setup`")
    return Path(next(iter(found.submodule_search_locations)))


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one where libyaml is there


class _Loader(_SafeLoader):
    """Reads lm-eval's task files; their `!function` tags name code that is not needed here."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _read_yaml(path: Path) -> dict:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise InputError(
            f"lm-eval's {path.name} is missing: install the version that requirements.lock pins"
        ) from None


def _samples(path: Path) -> list[dict[str, str]]:
    return _read_yaml(path)["fewshot_config"]["samples"]
