"""The boundary of the command line: every error is one message, and its exit code says whose it is."""

import errno
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the extra data is not installed")

import fsla
from fsla import cli
from fsla.cli import errors
from fsla.cli.screen import literal
from launch import finish


def raised_in_fsla(error):
    """Return an error that code of a module of fsla has raised."""
    try:
        exec("def f(error): raise error", scope := {"__name__": "fsla.somewhere"})
        scope["f"](error)
    except BaseException as raised:
        return raised


def raised_elsewhere(error):
    """Return an error that code of this test has raised, as another library's code might."""
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (raised_in_fsla(ValueError("No rows.")), 2, "fsla: No rows."),
        (raised_elsewhere(PermissionError(errno.EACCES, "Permission denied", "a.csv")), 2, "a.csv must be usable"),
        (raised_elsewhere(OSError(errno.ENOSPC, "No space left", "a.csv")), 2, "Free some room"),
        (raised_elsewhere(MemoryError()), 2, "not enough memory"),
        (raised_elsewhere(torch.OutOfMemoryError("CUDA")), 2, "not enough memory"),
        (raised_in_fsla(fsla.DivergenceError("The run diverged.")), 2, "fsla: The run diverged."),
        (raised_elsewhere(ModuleNotFoundError("x", name="sklearn")), 2, "pip install 'fsla[data]'"),
        (raised_elsewhere(KeyboardInterrupt()), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_error_that_the_user_can_mend_is_one_line(error, code, text, capsys):
    assert errors.report(error) == code
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        RecursionError("maximum recursion depth exceeded"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("could not broadcast \x1b[2J"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_defect_ends_with_70_and_a_file_with_its_traceback(error, capsys):
    """A user who can do nothing about it needs something to send, and no screen full of code."""
    assert errors.report(raised_elsewhere(error)) == 70
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1
    path = Path(re.search(r"The traceback is in (\S+\.txt)\.", err)[1])
    text = path.read_text(encoding="utf-8")
    path.unlink()
    assert "raised_elsewhere" in text
    assert type(error).__name__ in text


def test_defect_without_a_place_for_its_traceback_shows_it(capsys, monkeypatch):
    def refuse(**options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(errors.tempfile, "mkstemp", refuse)
    assert errors.report(raised_elsewhere(KeyError("x"))) == 70
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "The traceback is in the lines above" in err


@pytest.mark.parametrize("argument", ["\x1b]0;title\x07", "--\x1b[2J", "clean\x1b[31m", "\x9b2J"])
def test_control_characters_of_arguments_do_not_reach_the_terminal(argument, monkeypatch, capfd):
    """A file may be named so, and a shell completes its name."""
    for arguments in ([argument], ["clean", argument], ["clean", "--demo", "--device", argument]):
        monkeypatch.setattr(sys, "argv", ["fsla", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 2
        assert not set("".join(capfd.readouterr())) & set("\x1b\x07\x9b")


def test_reader_that_closes_the_pipe_gets_no_traceback():
    """`fsla --help | true` is nobody's mistake."""
    done = finish("bash", "-c", f"{sys.executable} -m fsla --help | true; exit ${{PIPESTATUS[0]}}")
    assert "Traceback" not in done.stderr


def test_literal_escapes_every_control_character():
    text = "".join(map(chr, range(0x100))) + "\u202e\u2066\udc80"
    assert literal(text).isprintable()
    assert literal("müde ω 好") == "müde ω 好"


def test_main_words_errors_of_commands(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", lambda: {}["missing"])
    monkeypatch.setattr(cli, "add_commands", lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 70
    Path(re.search(r"in (\S+\.txt)\.", capsys.readouterr().err)[1]).unlink()
