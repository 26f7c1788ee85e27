# SPDX-License-Identifier: Apache-2.0
"""Files of reports: the same each time, whole in themselves, and errors that help."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from ipufit.errors import ConfigError, FileError
from ipufit.pictures import Bar, BarChart, Part, Report, Table
from ipufit.planning import PipelineSchedule
from tests.pictures.reading import Page

CHART = BarChart(
    "Cost < $5 & $6", "Half & half.", "FLOP", (Bar("a", (Part("x", 1, True),)),)
)
TABLE = Table("Choices", "", ("G", "bubble"), (("10", "37.5%"),))
REPORT = Report(
    "A plan <of> 4",
    ("It & its pictures.",),
    (PipelineSchedule(4, 10, True).timeline(), CHART, TABLE, CHART),
)


def saved(path, report=REPORT):
    report.save(path)
    return path.read_bytes()


@pytest.fixture
def needs_matplotlib():
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("needs_matplotlib")
@pytest.mark.parametrize("name", ["a.svg", "a.html"])
def test_the_bytes_are_the_same_each_time_whatever_was_set(name, tmp_path):
    import matplotlib

    first = saved(tmp_path / name)
    with matplotlib.rc_context({"font.size": 30, "text.color": "red"}):
        assert saved(tmp_path / name) == first
    code = (
        "import sys\n"
        "from tests.pictures.test_reports import REPORT\n"
        "REPORT.save(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
    assert (tmp_path / name).read_bytes() == first
    assert not re.search(rb"20\d\d-\d\d-\d\d", first)
    assert b"matplotlib.org" not in first


@pytest.mark.usefixtures("needs_matplotlib")
def test_an_svg_file_says_in_words_what_it_shows(tmp_path):
    root = ElementTree.fromstring(saved(tmp_path / "a.svg"))
    names = root.get("aria-labelledby").split()
    words = {one.get("id"): one.text for one in root if one.get("id") in names}
    assert root.get("role") == "img"
    assert words[names[0]] == "A plan <of> 4"
    assert "16 cycles" in words[names[1]]
    assert "Half & half." in words[names[1]]
    texts = "".join(root.itertext())
    assert texts.count("Cost < $5 & $6") == 2


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_needs_nothing_else(tmp_path):
    text = saved(tmp_path / "a.html").decode()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    addresses = re.findall(r'(?<!xmlns=")(?<!xmlns:xlink=")https?://[^"]+', text)
    assert addresses == []
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []


@pytest.mark.usefixtures("needs_matplotlib")
def test_names_in_a_page_are_used_once_and_lead_somewhere(tmp_path):
    text = saved(tmp_path / "a.html").decode()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    used = {address[1:] for address in page.addresses}
    used |= set(re.findall(r"url\(#([^)]+)\)", text))
    assert used
    assert used <= set(page.ids)
    assert [role for role, _ in page.labelled] == ["img"] * 3
    for _, names in page.labelled:
        assert set(names.split()) <= set(page.ids)


@pytest.mark.usefixtures("needs_matplotlib")
def test_patterns_in_a_page_have_the_colours_of_the_file(tmp_path):
    in_file, in_page = (
        set(re.findall(r'\bfill="([^"]*)"', saved(tmp_path / name).decode()))
        for name in ("a.svg", "a.html")
    )
    assert in_file == in_page
    assert any(colour.startswith("#") for colour in in_page)


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_is_read_on_light_and_on_dark(tmp_path):
    text = saved(tmp_path / "a.html").decode()
    style, _, body = text.partition("</style></head>")
    assert "prefers-color-scheme: dark" in style
    assert "currentColor" in body
    assert "#1f2328" not in body  # texts have the colour of the page
    assert "#ffffff" not in body  # so has the background


@pytest.mark.usefixtures("needs_matplotlib")
def test_a_page_has_all_contents_in_order(tmp_path):
    text = saved(tmp_path / "a.html").decode()
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Pipeline of 4 stages, 10 micro-batches in training",
        "Cost &lt; $5 &amp; $6",
        "Choices",
        "Cost &lt; $5 &amp; $6",
    ]
    assert "<p>It &amp; its pictures.</p>" in text
    assert Page(text).tables[2] == [["G", "bubble"], ["10", "37.5%"]]


def test_tables_need_no_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = saved(tmp_path / "a.html", Report("Plan", (), (TABLE,))).decode()
    assert Page(text).tables == [[["G", "bubble"], ["10", "37.5%"]]]


@pytest.mark.parametrize("name", ["a.svg", "a.html"])
def test_without_matplotlib_the_error_says_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install ipufit\[plot\]"):
        REPORT.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["plan.png", "plan"])
def test_another_ending_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"\.svg or \.html"):
        REPORT.save(tmp_path / name)


def test_no_picture_is_no_svg_file(tmp_path):
    with pytest.raises(ConfigError, match="has no picture"):
        Report("Plan", (), (TABLE,)).save(tmp_path / "a.svg")


def test_a_folder_that_is_not_there_is_an_error_with_the_path(tmp_path):
    path = tmp_path / "none" / "a.html"
    with pytest.raises(FileError, match="none"):
        Report("Plan", (), (TABLE,)).save(path)
