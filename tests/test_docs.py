"""The documentation is true: its programs run and print what the pages say, and every path, name and option exists.

A page's blocks of Python are one program, run from top to bottom in a process of its own. A comment before a block,
which readers do not see, says what is special about it:

    <!-- prints -->              the block before it prints this; numbers may differ by a quarter
    <!-- prints lines -->        it prints these lines among others, with about these numbers
    <!-- prints lines like -->   it prints these lines among others, with any numbers
    <!-- file: PATH -->          this is a new file, written into a copy of the repository
    <!-- not run: REASON -->     this is not part of the program
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forked_programs import start_program

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("cost", "search_spaces", "diffshard", "experiments", "tests")
MOST_LINES = {"README.md": 200}
TOLERANCE = 0.25
"""Relative difference up to which a printed number counts as the same: versions of JAX differ a little."""
SEPARATOR = "--- next block ---"

_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<text>.*?)```", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


class Block(NamedTuple):
    """A block of code on a page, and the comment before it."""

    language: str
    text: str
    mark: str


def blocks(page: Path) -> list[Block]:
    """All blocks of code on a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(m["language"], m["text"], m["mark"] or "") for m in _BLOCK.finditer(text)]


def programs() -> list[Path]:
    """The pages with a program."""
    return [page for page in PAGES if any(_runs(block) for block in blocks(page))]


def _runs(block: Block) -> bool:
    return block.language == "python" and not block.mark.startswith(("file:", "not run:"))


def _is_of_package(block: Block) -> bool:
    """Whether a block is a new file of one of our packages, and not a program of a user."""
    return block.mark.startswith("file:") and "/" in block.mark


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def copy_with_new_files(page: Path, directory: Path) -> list[Path]:
    """Copies what programs import into a directory, writes the new files of a page there, and returns their paths."""
    for folder in ("cost", "search_spaces", "diffshard", "tests"):
        shutil.copytree(ROOT / folder, directory / folder)  # compiled files as well: Python knows them by the times
    shutil.copy(ROOT / "pyproject.toml", directory)
    new = {Path(b.mark.removeprefix("file:").strip()): b.text for b in blocks(page) if b.mark.startswith("file:")}
    for path, text in new.items():
        assert not (directory / path).exists(), f"{path} would be overwritten"
        (directory / path).write_text(text, encoding="utf-8")
    return list(new)


def run(command: Sequence[str], directory: Path, path: Path) -> str:
    """Runs Python on 8 host devices, with packages from `path`; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def run_program(directory: Path) -> str:
    """Runs `program.py` of a directory as `run` does, with the packages of this checkout; returns what it prints."""
    out, err = directory / "program.out", directory / "program.err"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    process = start_program(directory / "program.py", folder=directory, environment=environment, stdout=out, stderr=err)
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0, f"{out.read_text()[-3000:]}\n{err.read_text()[-3000:]}"
    return out.read_text(encoding="utf-8")


def same_text(shown: str, printed: str) -> bool:
    """Whether two texts are equal up to spaces at the ends of lines and small differences of numbers."""
    shown, printed = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (shown, printed))
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    values = ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs)
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in values)


def missing_lines(shown: str, printed: str, *, with_numbers: bool) -> list[str]:
    """The lines of a text that were not printed; spaces and the seconds of a search are not compared."""
    found = [" ".join(line.split()) for line in printed.splitlines()]
    masked = {_NUMBER.sub("#", line) for line in found}
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    compared = [line for line in lines if line != "..." and not line.startswith("search ")]
    if with_numbers:
        return [line for line in compared if not any(same_text(line, other) for other in found)]
    return [line for line in compared if _NUMBER.sub("#", line) not in masked]


@pytest.mark.parametrize("page", programs(), ids=_name)
def test_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path):
    own = [block for block in blocks(page) if _runs(block) or block.mark.startswith("prints")]
    program = [block.text for block in own if _runs(block)]
    path = ROOT
    if any(block.mark.startswith("file:") for block in blocks(page)):
        path = tmp_path / "copy"
        path.mkdir()
        copy_with_new_files(page, path)
    (tmp_path / "program.py").write_text(f"print({SEPARATOR!r})\n".join(program), encoding="utf-8")
    text = run_program(tmp_path) if path == ROOT else run(["program.py"], tmp_path, path)
    printed = text.split(f"{SEPARATOR}\n")
    index = -1
    for block in own:
        if _runs(block):
            index += 1
        elif block.mark in {"prints lines", "prints lines like"}:
            assert missing_lines(block.text, printed[index], with_numbers=block.mark == "prints lines") == []
        else:
            assert same_text(block.text, printed[index]), f"the page shows\n{block.text}\nprinted was\n{printed[index]}"


@pytest.mark.parametrize("page", [p for p in PAGES if any(_is_of_package(b) for b in blocks(p))], ids=_name)
def test_a_new_file_of_a_page_passes_the_conformance_tests(page: Path, tmp_path: Path):
    copy_with_new_files(page, tmp_path)
    commands = re.findall(r"^python (-m pytest .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        text = run(command.split(), tmp_path, tmp_path)
        assert re.search(r"\b[1-9]\d* passed", text), text


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    new = {block.mark.removeprefix("file:").strip() for block in blocks(page) if block.mark.startswith("file:")}
    paths = set(re.findall(rf"(?<![\w./-])(?:{'|'.join((*FOLDERS, 'docs'))})/[\w./-]*", text)) - new
    assert [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_dotted_names_exist(page: Path):
    text = re.sub(r"^<!-- file:.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    new = {block.mark.removeprefix("file:").strip() for block in blocks(page) if block.mark.startswith("file:")}
    modules = {path.removesuffix(".py").replace("/", ".") for path in new}
    names = set(re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS[:4])})(?:\.\w+)+", text))
    names = {name for name in names if not name.endswith(".py") and not name.startswith(tuple(modules) or "-")}
    assert [name for name in names if not _exists(name)] == []


def _exists(name: str) -> bool:
    module, attributes = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            if not module:
                return False
    for attribute in attributes:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_exist(page: Path):
    """Targets of make, modules that are run, and options, which must be written somewhere in the program's folder."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = "\n".join(b.text for b in blocks(page) if b.language == "sh").replace("\\\n", " ").splitlines()
    for line in lines:
        command = line.split("#")[0]
        for target in re.findall(r"\bmake (\w+)", command):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        module = re.search(r"python -m (experiments(?:\.\w+)+)|(?:^|\s)(diffshard) (?:search|show|solve)\b", command)
        if module:
            folder = ROOT / ("experiments" if module[1] else "diffshard/command")
            source = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
            place = ROOT / (module[1] or "diffshard").replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), line
            assert [o for o in re.findall(r"\s(--[\w-]+)", command) if f'"{o}"' not in source] == [], line


def test_the_glossary_has_the_words_in_italics():
    page, glossary = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("how-it-works.md", "glossary.md"))
    words = re.findall(r"(?<!\*)\*([a-z ]+)\*(?!\*)", page)
    terms = ", ".join(re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)).split(", ")
    assert len(words) > 5
    assert {word.removesuffix("s") for word in words} <= set(terms)


@pytest.mark.parametrize(("name", "most"), MOST_LINES.items())
def test_pages_that_must_stay_short(name: str, most: int):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= most


def test_every_page_is_on_the_site():
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if f" {page}\n" not in contents] == []
