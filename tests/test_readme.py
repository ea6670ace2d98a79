"""The README keeps its promises: its example runs, its table is the dispatch table's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from openmsa.dispatch.markdown import support_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_support_table_is_the_dispatch_table():
    found = re.search(
        r"<!-- support-table:begin.*?-->\n(.*?)\n<!-- support-table:end -->", README, re.S
    )
    assert found, "the README has lost its table markers"
    assert found[1].strip() == support_table()


def test_the_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "torch.Size([4452, 64, 128]) torch.Size([4, 4452, 16])" in printed
    assert "-> cpu" in printed


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *sorted(p.as_posix() for p in Path("docs").rglob("*.md"))],
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
