"""The rules of the tree, as tests: imports, packages, lengths, docstrings, leftovers."""

import ast
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controlplane", "gpuagent")
PRUNED = {
    ".git", ".venv", "node_modules", "dist", "__pycache__", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".hypothesis", ".import_linter_cache",
}  # fmt: skip
# Written in pieces, so that this file does not hold what it forbids.
FORBIDDEN_TEXT = {
    "a package registry's host": "|".join(
        ("registry" + r"\.npmjs", "pypi" + r"\.org", "python" + "hosted", r"deb\.deb" + "ian")
    ),
    "a path of one machine": "|".join(("/wo" + "rk/(main|shared|scratch)", "/ho" + "me/[a-z]+/")),
}
LEFTOVERS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "NotImplemented" + "Error")))


def python_files(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def modules() -> list[Path]:
    """Hand-written modules of both packages."""
    found = python_files(*PACKAGES)
    return [path for path in found if path.name != "__init__.py" and "migrations" not in path.parts]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines from ``def`` to the end, without the docstring) of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node):
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            yield node.name, lines


def text_files() -> Iterator[tuple[Path, str]]:
    for folder, names, files in os.walk(ROOT):
        names[:] = [n for n in names if n not in PRUNED and not n.startswith((".run", "."))]
        names[:] = [n for n in names if not n.endswith(".egg-info")]
        for file in files:
            if file == ".git":  # of a worktree: it names the repository's folder
                continue
            path = Path(folder, file)
            data = path.read_bytes()
            if b"\0" not in data[:4096]:
                yield path, data.decode(errors="replace")


def test_imports_point_one_way():
    """import-linter's contracts in pyproject.toml are kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stdout


def test_every_package_has_an_empty_init():
    """A folder with Python in it is a package, and importing a package runs nothing."""
    folders = {path.parent for path in python_files(*PACKAGES, "tests")}
    missing = [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()]
    assert missing == []
    full = [path for path in python_files(*PACKAGES, "tests") if path.name == "__init__.py"]
    assert [str(p.relative_to(ROOT)) for p in full if p.stat().st_size] == []


def test_functions_are_short():
    """Median at most 8 lines, nine of ten at most 30, none above 60."""
    lengths: list[int] = []
    too_long: list[str] = []
    for path in modules():
        for name, lines in functions(path):
            lengths.append(lines)
            if lines > 60:
                too_long.append(f"{path.relative_to(ROOT)}: {name} has {lines} lines")
    assert too_long == []
    assert statistics.median(lengths) <= 8
    assert statistics.quantiles(lengths, n=10)[8] <= 30


def test_every_module_says_what_it_is():
    """A module starts with a docstring."""
    silent = [p for p in modules() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert [str(path.relative_to(ROOT)) for path in silent] == []


@pytest.mark.parametrize("what", FORBIDDEN_TEXT)
def test_nothing_names(what):
    """Neither a registry's host nor somebody's folder is written down anywhere."""
    pattern = re.compile(FORBIDDEN_TEXT[what])
    found = [str(path.relative_to(ROOT)) for path, text in text_files() if pattern.search(text)]
    assert found == []


def test_nothing_is_left_half_done():
    """No marker of unfinished work in either package."""
    marked = [p for p in modules() if LEFTOVERS.search(p.read_text())]
    assert [str(path.relative_to(ROOT)) for path in marked] == []


def test_no_test_is_switched_off_silently():
    """A test may skip only where a service is absent from a user's machine, never on CI."""
    switched_off = re.compile(r"mark\.(skip|xfail)\b|\bxfail\(")
    found = [p for p in python_files("tests") if switched_off.search(p.read_text())]
    assert [str(path.relative_to(ROOT)) for path in found if path != Path(__file__)] == []
