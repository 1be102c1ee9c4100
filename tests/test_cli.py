"""The command line as a user meets it: what it prints, what it writes, and how it refuses."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

import resinspect as ri
from resinspect import cli

PLAIN = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["resinspect", *map(str, arguments)])
        monkeypatch.setattr(cli.out, "_width", 200)
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_capture_stores_a_trace_and_says_how_good_it_is(run, tiny_checkpoint, tmp_path):
    """A trace without its verdict, or one that does not open."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("In the beginning.\n\nThe second prompt, a little longer.\nThird\n")
    code, out, _ = run("capture", tiny_checkpoint, "--prompts", prompts, "--out", tmp_path / "t", "--batch-size", 2)
    assert code == 0
    trace = ri.open_trace(tmp_path / "t")
    assert out.strip() == ri.describe(trace)
    assert re.search(r"tokens \d+ · readers 5 · sources 5 · method replay · fidelity worst .*, median .* · exact", out)
    assert trace["sample"].values.max() == 2
    assert "".join(trace["text"].values[trace["sample"].values == 0]) == "In the beginning."
    assert trace.attrs["model"] == "tiny"


@pytest.mark.parametrize("suffix", [".html", ".png", ".svg", ".pdf"])
def test_map_draws_from_a_model_and_from_a_trace(run, tiny_checkpoint, tmp_path, suffix):
    """A format that needs a browser, or two ways in that draw different maps."""
    text = "Faith, hope, charity."
    direct, stored = tmp_path / f"direct{suffix}", tmp_path / f"stored{suffix}"
    code, out, _ = run("map", tiny_checkpoint, "--text", text, "--out", direct)
    assert code == 0
    assert "exact" in out
    assert f"wrote {direct}" in out
    assert run("capture", tiny_checkpoint, "--text", text, "--out", tmp_path / "t")[0] == 0
    assert run("map", tmp_path / "t", "--out", stored)[0] == 0
    assert direct.read_bytes() == stored.read_bytes()
    assert run("map", tmp_path / "t", "--token", 1, "--out", stored)[0] == 0
    assert direct.read_bytes() != stored.read_bytes()


def test_models_lists_connections_and_checkpoints(run, monkeypatch):
    """A connection in the table that no one can find, a bundled folder left out, or a name cut at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("models")
    assert code == 0
    for name in ("pre_ln", "attnres", "hyper_connections", *ri.bundled()):
        assert re.search(rf"\b{name}\b", out)


REFUSALS = {
    "missing folder": (["capture", "./nowhere", "--text", "a", "--out", "OUT"], "nowhere"),
    "mistyped name": (["capture", "atnres", "--text", "a", "--out", "OUT"], "did you mean attnres"),
    "empty name": (["capture", "", "--text", "a", "--out", "OUT"], "the model has no name"),
    "no prompt": (["capture", "MODEL", "--out", "OUT"], "exactly one of --text and --prompts"),
    "both prompts": (["capture", "MODEL", "--text", "a", "--prompts", "FILE", "--out", "OUT"], "exactly one"),
    "empty prompt": (["capture", "MODEL", "--text", "", "--out", "OUT"], "prompt 0 is empty"),
    "long prompt": (["capture", "MODEL", "--text", "word " * 100, "--out", "OUT"], "context is 64; shorten it"),
    "prompts missing": (["capture", "MODEL", "--prompts", "nofile", "--out", "OUT"], "nofile cannot be read"),
    "not UTF-8": (
        ["capture", "MODEL", "--prompts", "LATIN", "--out", "OUT"],
        r"latin.txt is not UTF-8 \(byte 3\); save",
    ),
    "blank file": (["capture", "MODEL", "--prompts", "BLANK", "--out", "OUT"], "has no prompts"),
    "bad method": (["capture", "MODEL", "--text", "a", "--method", "guess", "--out", "OUT"], "choose one of auto"),
    "bad keep": (["capture", "MODEL", "--text", "a", "--keep", "grams", "--out", "OUT"], "keep has grams"),
    "out is taken": (["capture", "MODEL", "--text", "a", "--out", "TAKEN"], "taken"),
    "map of nothing": (["map", "./nowhere", "--text", "a", "--out", "OUT.png"], "nowhere"),
    "map of no trace": (["map", "TAKEN", "--out", "OUT.png"], "not a trace, so it is taken as a model"),
    "map suffix": (["map", "MODEL", "--text", "a", "--out", "OUT.jpeg"], "jpeg"),
    "map token": (["map", "MODEL", "--text", "a", "--token", "99", "--out", "OUT.png"], "99"),
    "recipe missing": (["train", "nofile.toml", "--out", "OUT"], "nofile.toml cannot be read"),
    "app of nothing": (["app", "./nowhere"], "no folder or bundled checkpoint ./nowhere"),
    "map limit": (["map", "MODEL", "--text", "a", "--limit", "-1", "--out", "OUT.png"], "limits"),
    "port in use": (["app", "--port", "PORT"], "is in use; choose another"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_users_mistake_is_one_line_and_exit_code_2(run, tiny_checkpoint, tmp_path, case):
    """A traceback, a zero exit code, or an empty folder left behind."""
    taken, latin, blank = tmp_path / "taken", tmp_path / "latin.txt", tmp_path / "blank.txt"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    latin.write_bytes("caf\xe9\n".encode("latin-1"))
    blank.write_text("\n \n")
    with socket.create_server(("localhost", 0)) as server:
        words = {
            "MODEL": tiny_checkpoint,
            "OUT": tmp_path / "out",
            "OUT.png": tmp_path / "out.png",
            "OUT.jpeg": tmp_path / "out.jpeg",
            "TAKEN": taken,
            "LATIN": latin,
            "FILE": blank,
            "BLANK": blank,
            "PORT": server.getsockname()[1],
        }
        before = sorted(tmp_path.rglob("*"))
        arguments, expected = REFUSALS[case]
        code, out, err = run(*(words.get(a, a) for a in arguments))
    assert code == 2, out + err
    assert re.search(expected, err), err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_summary_is_one_line_even_when_piped(tiny_checkpoint, tmp_path):
    """A line folded at 80 columns, or blank lines of a progress bar, in the way of a script."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes("one\u2028still one\x0cand still\r\ntwo\r\n".encode())
    command = [sys.executable, "-m", "resinspect.cli", "capture", str(tiny_checkpoint), "--prompts", str(prompts)]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run([*command, "--out", str(tmp_path / "t")], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    trace = ri.open_trace(tmp_path / "t")
    assert done.stdout == ri.describe(trace) + "\n"
    assert trace["sample"].values.max() == 1


def test_truncation_is_noted_once(run, tiny_checkpoint, tmp_path):
    """A cut prompt that the user never hears of, or a Python warning with a file name."""
    code, _, err = run("capture", tiny_checkpoint, "--text", "word " * 100, "--truncate", "--out", tmp_path / "t")
    assert code == 0
    assert re.fullmatch(r"note: prompt 0 was cut to its first 64 of \d+ tokens\.", err.strip())


def test_ctrl_c_leaves_a_clean_stop(tiny_checkpoint, tmp_path):
    """A traceback on Ctrl-C, or a trace that does not open afterwards."""
    prompts = tmp_path / "many.txt"
    prompts.write_text("a line of text that takes a moment\n" * 5000)
    command = [sys.executable, "-m", "resinspect.cli", "capture", str(tiny_checkpoint)]
    command += ["--prompts", str(prompts), "--batch-size", "4", "--out", str(tmp_path / "t")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=PLAIN,
        # A test run in the background of a shell inherits an ignored Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "t" / "manifest.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    with pytest.warns(UserWarning, match="incomplete"):
        assert ri.open_trace(tmp_path / "t").sizes["token"] > 0
