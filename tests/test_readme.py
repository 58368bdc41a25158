"""The README's examples run as they stand."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    names = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    ridge = names["state"].at.lam["log_ridge"]
    assert ridge[:5].mean() < ridge[5:].mean() - 1  # as the comment says
    for block in blocks[1:]:
        exec(compile(block, "README.md", "exec"), names)
    assert "relative error" in capsys.readouterr().out
    assert names["weights"][:60].mean() < names["weights"][60:].mean() - 0.2


def test_the_files_that_it_links_to_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
