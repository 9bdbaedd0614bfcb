"""What README.md says of the repository is so: states of the methods, links, flags, the version to cite."""

import configparser
import re

import pytest

import launch
from core.config import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Written by `make results`, from measurements that a checkout may not have yet.
MEASURED = re.compile(r"docs/(results\.md|figures/.*)$")


def test_a_method_is_done_once_its_result_is_measured():
    states = "done|in progress|planned"
    rows = re.findall(rf"^\| `(\w+)` \| .+ \| `([\w/]+)` \| ({states}) \|$", README, re.MULTILINE)
    assert len(rows) == 15
    for name, folder, state in rows:
        there = (ROOT / folder / "experiment.py").is_file() and (ROOT / "configs" / f"{name}.py").is_file()
        measured = (ROOT / "results" / f"{name}.json").is_file()
        expected = ("done" if measured else "in progress") if there else "planned"
        assert state == expected, f"{name}: {state}, not {expected}"
    listed = {name for name, _, _ in rows}
    assert {path.stem for path in (ROOT / "configs").glob("[!_]*.py")} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            path = (page.parent / target).resolve()
            assert path.exists() or MEASURED.search(path.as_posix()), f"{page.name}: no {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_are_those_of_launch(page, capsys):
    assert launch.main(["--help"]) == 0
    flags = re.findall(r"^  --(\w+):", capsys.readouterr().out, re.MULTILINE)
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    for command in re.findall(r"(?:launch\.py|methodax) (--.*)", text):
        used = re.findall(r"(?<!\S)--(\w+)(?![\w-])", command)
        assert used and set(used) <= set(flags), command


def test_the_version_to_cite_is_this_one():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert f"version: {setup['metadata']['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
