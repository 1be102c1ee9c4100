"""The command line as a user meets it: what it prints, what it writes, and how it refuses."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from test_loading import nano_state

import resinspect as ri
from resinspect import cli
from resinspect.families import FAMILIES

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
    assert out.count("damaged on") == 2


REFUSALS = {
    "missing folder": (["capture", "./nowhere", "--text", "a", "--out", "OUT"], "nowhere"),
    "mistyped name": (["capture", "atnres", "--text", "a", "--out", "OUT"], "did you mean attnres"),
    "empty name": (["capture", "", "--text", "a", "--out", "OUT"], "the model has no name"),
    "no prompt": (["capture", "MODEL", "--out", "OUT"], "exactly one of --text, --ids and --prompts"),
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
    "no token ids": (["map", "MODEL", "--ids", "3 x 4", "--out", "OUT.png"], "--ids holds 'x'"),
    "strange ids": (["capture", "MODEL", "--ids", "3 99999", "--out", "OUT"], "ids outside 0..2047"),
    "text and ids": (["map", "MODEL", "--ids", "3", "--text", "a", "--out", "OUT.png"], "exactly one of"),
    "markup in a name": (["map", "[/red]none", "--text", "a", "--out", "OUT.png"], r"no folder \[/red\]none"),
    "inspect nothing": (["inspect", "./nowhere"], "no folder nowhere"),
    "inspect a text": (["inspect", "FILE"], "blank.txt is a file; give the folder"),
    "inspect no model": (["inspect", "TAKEN"], "taken has no config.json"),
    "a file of text": (["capture", "PICKLE", "--ids", "3", "--out", "OUT"], "ckpt.pt is not a file of torch.save"),
    "families into nothing": (["families", "--write", "nofile.md"], "nofile.md cannot be read"),
    "families into any file": (["families", "--write", "BLANK"], "blank.txt does not hold the lines"),
    "port in use": (["app", "--port", "PORT"], "is in use; choose another"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_users_mistake_is_one_line_and_exit_code_2(run, tiny_checkpoint, tmp_path, case):
    """A traceback, a zero exit code, or an empty folder left behind."""
    taken, latin, blank = tmp_path / "taken", tmp_path / "latin.txt", tmp_path / "blank.txt"
    (tmp_path / "ckpt.pt").write_text("not tensors")
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
            "PICKLE": tmp_path / "ckpt.pt",
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


def test_token_ids_are_a_prompt_and_labels(run, tiny_checkpoint, tmp_path):
    """A model without a tokenizer of no use on the command line, or ids read as a text."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    code, _, _ = run("capture", folder, "--ids", "3, 14 15", "--out", tmp_path / "t")
    assert code == 0
    trace = ri.open_trace(tmp_path / "t")
    assert trace["token_id"].values.tolist() == [3, 14, 15]
    assert trace["text"].values.tolist() == ["3", "14", "15"]
    assert run("map", folder, "--ids", "3 14", "--out", tmp_path / "m.svg")[0] == 0
    code, _, err = run("capture", folder, "--text", "a", "--out", tmp_path / "u")
    assert code == 2
    assert "no tokenizer; give one, or token ids (--ids)" in err


def test_inspect_says_what_a_checkpoint_is(run, tiny_checkpoint, tmp_path, monkeypatch):
    """A name in brackets swallowed as markup, or a line cut off."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "[red]tiny")
    code, out, err = run("inspect", folder)
    assert code == 0
    assert re.search(r"^checkpoint +\[red\]tiny \(ResidualLM, model_type resinspect\)", out)
    assert re.search(r"^class of W +scalar per token; method replay, solve", out, re.M)
    assert re.search(r"^routing +connection.query", out, re.M)
    assert err == ""


def test_families_are_listed(run, monkeypatch):
    """A family left out, or a name cut at 80 columns."""
    monkeypatch.setattr(cli.out, "_width", 80)
    code, out, _ = run("families")
    assert code == 0
    for name in FAMILIES:
        assert re.search(rf"^ {name} ", out, re.M), name


def test_own_code_needs_its_flag(run, tiny_checkpoint, tmp_path):
    """A flag that one of the commands lacks, or that does not reach the loader."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "own")
    config = (folder / "config.json").read_text().replace('"model_type": "resinspect"', '"model_type": "own"')
    (folder / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoConfig": "absent.Config"},', 1))
    for command in (["map", "--out", tmp_path / "a.png"], ["capture", "--out", tmp_path / "t"], ["inspect"]):
        options = [*command[1:], *([] if command == ["inspect"] else ["--ids", "3"])]
        code, _, err = run(command[0], folder, *options)
        assert (code, "--trust-remote-code" in err) == (2, True)
        code, _, err = run(command[0], folder, *options, "--trust-remote-code")
        assert code == 2
        assert "absent.py" in err
        assert len(err.strip().splitlines()) == 1


def test_notes_on_loading_are_lines(run, tmp_path):
    """A Python warning with a file name, or a supposition that the user never hears of."""
    torch.save({"model": nano_state(bias=False), "model_args": {"n_head": 4}}, tmp_path / "ckpt.pt")
    code, _, err = run("map", tmp_path / "ckpt.pt", "--ids", "3 4 5", "--out", tmp_path / "a.svg")
    assert code == 0
    assert re.fullmatch(r"note: \S+/ckpt.pt: read as nanoGPT into GPT-2, .* zeros for 13 biases .*\.", err.strip())


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


def test_analyze_writes_every_table_and_prints_what_matters(run, tiny_checkpoint, tmp_path):
    """A measure computed and thrown away, or a folder that a refused second run has changed."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("In the beginning.\nThe second prompt, a little longer.\nThe third of them.\n")
    assert run("capture", tiny_checkpoint, "--prompts", prompts, "--out", tmp_path / "t")[0] == 0
    code, out, _ = run("analyze", tmp_path / "t", "--out", tmp_path / "tables")
    assert code == 0
    for word in ("dilution_index", "exponent", "staticness", "left out", "logit_lens", "exact"):
        assert word in out
    written = {path.stem for path in (tmp_path / "tables").iterdir()}
    assert {"contribution_share", "variance_of_routing", "left_out"} <= written
    code, _, error = run("analyze", tmp_path / "t", "--out", tmp_path / "tables")
    assert code == 2
    assert "is not empty" in error
    assert {path.stem for path in (tmp_path / "tables").iterdir()} == written
    assert run("analyze", tmp_path / "nowhere")[0] == 2


def test_analyze_writes_where_it_stands(run, tiny_checkpoint, tmp_path, monkeypatch):
    """An empty folder refused because it is the current one, or reached by a link; half the tables after a failure."""
    assert run("capture", tiny_checkpoint, "--text", "In the beginning.", "--out", tmp_path / "t")[0] == 0
    here, link = tmp_path / "here", tmp_path / "link"
    here.mkdir()
    monkeypatch.chdir(here)
    assert run("analyze", tmp_path / "t", "--out", ".")[0] == 0
    written = sorted(path.name for path in here.iterdir())
    assert "left_out.csv" in written
    assert all(name.endswith(".csv") for name in written)
    (tmp_path / "real").mkdir()
    link.symlink_to(tmp_path / "real")
    assert run("analyze", tmp_path / "t", "--out", link)[0] == 0
    assert sorted(path.name for path in link.iterdir()) == written
    code, _, error = run("analyze", tmp_path / "t", "--drop-first", 99, "--out", tmp_path / "new")
    assert code == 2
    assert "none is left" in error
    assert not (tmp_path / "new").exists()


def test_analyze_of_one_prompt_prints_no_empty_rows(run, tiny_checkpoint, tmp_path):
    """A table half of nan, or measures that vanish from it without a word."""
    assert run("capture", tiny_checkpoint, "--text", "In the beginning.", "--out", tmp_path / "t")[0] == 0
    code, out, _ = run("analyze", tmp_path / "t")
    assert code == 0
    assert "nan" not in out
    assert "they need more documents or tokens: variance_of_routing, staticness" in out
