"""The README's examples run as they stand."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    useful, noise = names["state"].at.lam["log_ridge"][:5].mean(), names["state"].at.lam["log_ridge"][5:].mean()
    assert useful < noise - 1  # as the comment says
    assert "relative error" in capsys.readouterr().out


def test_the_files_that_it_links_to_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
