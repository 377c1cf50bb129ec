"""The documentation's site builds without a warning, shows every public name, and no link in it leads nowhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import pixfuse
import pixfuse.nn
import pixfuse.onnx

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """What a page can be linked at, what it links to and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {found[k] for k in ("id", "name") if found.get(k)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("img", "script") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") == "stylesheet":
            self.loads.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees")]
    done = subprocess.run([*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text()) for path in (folder / "html").rglob("*.html")}


def test_no_link_leads_nowhere(site: dict[Path, Page]) -> None:
    checked = 0
    for path, page in site.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if "://" in target or target.startswith("mailto:"):
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.exists(), f"{path.name}: {link}"
            if anchor and there in site and there.name not in ("search.html", "genindex.html"):
                assert anchor in site[there].anchors, f"{path.name}: {link}"
            checked += 1
    assert checked > 200


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for source in page.loads:
            assert "//" not in source, f"{path.name}: {source}"
            assert (path.parent / source.partition("?")[0]).exists(), f"{path.name}: {source}"


def test_every_public_name_has_its_place(site: dict[Path, Page]) -> None:
    anchors = set().union(*(page.anchors for page in site.values()))
    for module in (pixfuse, pixfuse.nn, pixfuse.onnx):
        for name in set(module.__all__) - {"compat"}:
            assert f"{module.__name__}.{name}" in anchors, name


def test_formulas_are_drawn_by_the_browser(site: dict[Path, Page]) -> None:
    for path in site:
        text = path.read_text()
        assert "\\frac" not in text, path
        if path.parent.name == "ops":
            assert "<math" in text, path
