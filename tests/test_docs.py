"""The documents: generated pages are up to date, links lead somewhere, and commands are run by someone."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from warmroute.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(page: Path) -> list[str]:
    """The lines of every ```sh block."""
    return [line for block in _FENCE.findall(page.read_text()) for line in block.splitlines() if line.strip()]


def test_the_configuration_reference_is_what_the_code_says() -> None:
    generator = runpy.run_path(str(ROOT / "docs" / "generate_configuration.py"))
    assert generator["TARGET"].read_text() == generator["reference"](), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    local = [target for target in _LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        waiting += [(page.parent / t).resolve() for t in _LINK.findall(page.read_text()) if "://" not in t]
    assert {page for page in PAGES if page.parent.name != "runbooks"} - reached <= {ROOT / "CHANGELOG.md"}


def test_every_command_of_the_readme_is_run_by_ci_or_by_a_test() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    tested = (ROOT / "tests" / "e2e" / "test_readme.py").read_text()
    for command in commands(ROOT / "README.md"):
        if command in ("make run", "make test"):
            assert f"{command} " in ci
        elif command.startswith("make "):
            assert command in ci
        else:
            kind = next(word for word in shlex.split(command) if word in COMMANDS or word.endswith(("curl", "server")))
            assert kind.rpartition("/")[2] in tested, f"no test runs: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_targets_that_make_knows(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [shlex.split(line) for line in commands(page) if line.startswith("make ")]
    for words in named:
        assert {word for word in words[1:] if "=" not in word} <= targets


def test_the_modules_page_names_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "modules.md").read_text()
    for path in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
