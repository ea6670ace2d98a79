"""The command as a whole: help, version, exit statuses, and the words it prints."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

import openmsa
from openmsa.cli import text
from openmsa.cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "example:" in shown
    assert f"openmsa {command}" in shown.split("example:")[1]


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command, summary in COMMANDS.items():
        assert command in shown
        assert summary.split(",")[0] in " ".join(shown.split())
    assert "openmsa run" in shown.split("example:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_summary_is_the_subcommand_s_own(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list in ``main`` stands in for modules it does not import; this holds it to them."""
    main(["--help"])
    listed = " ".join(capsys.readouterr().out.split())
    main([command, "--no-such-option"])
    capsys.readouterr()
    from openmsa.cli.main import _parser

    assert " ".join(_parser([command]).format_help().split()) == listed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"openmsa {openmsa.__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["--fly"], ["info", "--fly"], ["run", "--case", "x"]]
)
def test_usage_errors_are_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: openmsa" in capsys.readouterr().err


def test_a_refusal_is_1_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--workload", "nowhere", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("openmsa run: workload: expected a built-in name (cp16_192k)")
    assert error.count("\n") == 1


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("openmsa.cli.info.collect", interrupt)
    assert main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys; from openmsa.cli.main import main;"
        "assert main(['--help']) == 0; assert main(['--version']) == 0;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    command = [sys.executable, "-m", "openmsa", "info"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read().decode()
        assert process.wait() == 1
    assert error == ""


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.seconds(0), "0.00 s"),
        (text.seconds(12.345), "12.3 s"),
        (text.seconds(0.99999), "1.00 s"),
        (text.seconds(0.0421), "42.1 ms"),
        (text.seconds(3.2e-7), "0.32 us"),
        (text.seconds(1234), "1234 s"),
        (text.size(None), "-"),
        (text.size(2**20), "1.00 MiB"),
        (text.size(1.5 * 2**30), "1.50 GiB"),
        (text.flops(4.7e11), "470 GFLOP"),
        (text.flops(9.999e11), "1.00 TFLOP"),
        (text.flops_per_second(1.23e14), "123 TFLOP/s"),
    ],
)
def test_numbers_have_units(shown: str, expected: str) -> None:
    assert shown == expected


def test_tables_align() -> None:
    shown = text.table(["a", "long"], [["word", "1"], ["b", "234"]])
    assert shown.splitlines() == ["a     long", "word     1", "b      234"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_a_bar_on_a_terminal() -> None:
    stream = _Terminal()
    progress = text.Progress(4, stream)
    progress.start("forward")
    progress.add(1)
    progress.add(9)
    progress.close()
    drawn = stream.getvalue().split("\r")
    assert "[#######                     ]  25%" in drawn[2]
    assert "forward" in drawn[2]
    assert "100%" in drawn[3]
    assert drawn[-1] == "\x1b[K"
    assert "\n" not in stream.getvalue()


def test_progress_prints_lines_elsewhere() -> None:
    stream = io.StringIO()
    progress = text.Progress(0, stream)
    progress.start("forward")
    progress.add(1)
    progress.start("backward")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines] == ["forward", "backward"]
    assert "\r" not in stream.getvalue()
