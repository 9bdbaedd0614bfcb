"""The Python in README.md and docs/ works: each block marked `<!-- test -->` runs, in an empty folder."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^<!-- test -->\n+```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _snippets():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            yield pytest.param(page, line, match[1], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("page", "line", "code"), _snippets())
def test_snippet_runs(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The empty lines before make an error name the line of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"], ids=str)
def test_every_mark_has_its_block(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- test -->") == len(BLOCK.findall(text))
