"""``resinspect doctor`` as a user meets it: exit codes 0, 1 and 2, one line for each statement."""

import re
import sys

import pandas as pd
import pytest

from resinspect import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["resinspect", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_command_on_a_healthy_and_a_sick_model(run, tmp_path):
    """Exit codes that a script cannot trust, or a line folded in the middle."""
    code, out, err = run("doctor", "attnres", "--text", "Faith, hope, charity, these three.")
    assert (code, err) == (0, "")
    assert re.match(r"attnres · attnres · \d+ tokens of 1 prompt · 0 findings, \d notes?, \d+ ok, ", out)
    code, out, err = run("doctor", "faulty-attnres-untrained", "--csv", tmp_path / "report.csv")
    assert (code, err) == (1, "")
    assert re.search(r"^finding +uniform routing at all 16 reads of two or more slots: max .*not loaded\.$", out, re.M)
    table = pd.read_csv(tmp_path / "report.csv")
    assert len(table) == len(out.splitlines()) - 1
    assert table.loc[table["severity"] == "finding", "check"].tolist() == ["uniform routing"]


def test_command_on_a_trace(run, tiny_checkpoint, tmp_path):
    """A trace that needs its model, or prompts that are silently ignored."""
    assert run("capture", tiny_checkpoint, "--text", "A text of a few tokens.", "--out", tmp_path / "t")[0] == 0
    code, out, err = run("doctor", tmp_path / "t")
    assert (code, err) == (0, "")
    assert "parameters without effect: only a trace was given; this needs the model" in out
    code, _, err = run("doctor", tmp_path / "t", "--text", "another")
    assert (code, "is a trace, which has its own text" in err) == (2, True)


MISTAKES = {
    "no such model": (["doctor", "./nowhere"], "nowhere"),
    "no such file": (["doctor", "MODEL", "--prompts", "nofile"], "nofile cannot be read"),
    "two prompts": (["doctor", "MODEL", "--text", "a", "--ids", "3"], "exactly one of"),
    "no folder for the report": (["doctor", "MODEL", "--csv", "nowhere/r.csv"], "nowhere.* cannot be written"),
    "long prompt": (["doctor", "MODEL", "--text", "word " * 100], "context is 64; shorten it"),
    "bad method": (["doctor", "MODEL", "--method", "guess"], "choose one of auto"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(run, tiny_checkpoint, case):
    """A traceback, or a code that says healthy or sick where nothing could be examined."""
    arguments, expected = MISTAKES[case]
    code, _, err = run(*(tiny_checkpoint if a == "MODEL" else a for a in arguments))
    assert code == 2, err
    assert re.search(expected, err), err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
