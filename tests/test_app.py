"""The app: its error paths without a browser, and the whole of it in a real Chromium."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from browser import open_page
from streamlit.testing.v1 import AppTest
from transformers import AutoTokenizer

import resinspect as ri
from resinspect.errors import CaptureError

TEXT = "It was <b>so</b> $x$ and $y$ **again** :smile: `n`"


@pytest.fixture
def app(pytestconfig, monkeypatch, tiny_checkpoint):
    """The page with a tiny checkpoint offered first, after ``prepare`` was applied to it."""
    folder = pytestconfig.rootpath / "app"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "argv", ["main.py", str(tiny_checkpoint)])

    def run(*prepare):
        test = AppTest.from_file(str(folder / "routing.py"), default_timeout=120).run()
        for step in prepare:
            step(test)
            test.run()
        assert not test.exception
        return test

    return run


def typed(text):
    return lambda test: test.text_area(key="text").set_value(text)


def other_folder(folder):
    def step(test):
        test.selectbox[0].select(test.selectbox[0].options[-1]).run()
        test.text_input[0].set_value(str(folder))

    return step


def shown(test):
    return "\n".join(block.value for block in test.markdown)


def damaged(tiny_checkpoint, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder


def untokenized(tiny_checkpoint, tmp_path):
    folder = tmp_path / "untokenized"
    shutil.copytree(tiny_checkpoint, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


def test_a_checkpoint_without_tokenizer_takes_ids(app, tiny_checkpoint, tmp_path):
    """A model that the app can load and never run, or words taken for ids."""
    folder = untokenized(tiny_checkpoint, tmp_path)
    test = app(other_folder(folder), typed("3 14 words"))
    assert "type token ids instead of text" in test.error[0].value
    test = app(other_folder(folder), typed("3, 14 15"))
    assert not test.error
    assert "Mean over 3 tokens" in shown(test)


def test_first_load_shows_both_maps(app):
    """A page that waits for something before it shows anything, or a map without its fidelity."""
    test = app()
    assert not test.error
    assert shown(test).count("exact]") == 2
    assert "Mean over" in shown(test)
    assert "loss of the next token" in shown(test)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (other_folder("/no/such_folder"), r"\/no\/such\_folder"),
        (typed("word " * 200), "context is 64"),
    ],
    ids=["folder", "text"],
)
def test_a_mistake_is_one_sentence(app, step, message):
    """A traceback, an endless spinner, or a stale map under a message."""
    test = app(step)
    assert len(test.error) == 1
    assert message in test.error[0].value
    assert "exact" not in shown(test)


@pytest.mark.parametrize("make", [damaged, untokenized])
def test_a_bad_checkpoint_is_one_sentence(app, make, tiny_checkpoint, tmp_path):
    """A checkpoint that is cut off, or has no tokenizer, and takes the page down."""
    test = app(other_folder(make(tiny_checkpoint, tmp_path)))
    assert len(test.error) == 1


def test_an_unknown_model_is_the_sentence_that_capture_says(app, tiny_checkpoint, tmp_path, monkeypatch):
    """A traceback or an endless spinner for a model of no known family; or a sentence other than the library's."""
    folder = tmp_path / "unknown"
    shutil.copytree(tiny_checkpoint, folder)
    monkeypatch.setattr("resinspect.families.FAMILIES", {})
    with pytest.raises(CaptureError, match=r"no known family.*'layers' holds 2 .*Name its sublayers") as error:
        ri.capture(ri.load(folder)[0], [[1, 2]])
    test = app(other_folder(folder))
    assert len(test.error) == 1
    said = test.error[0].value.replace("\\", "").replace("\u2060", "")
    assert said == str(error.value)
    assert "exact" not in shown(test)


def test_what_loading_warns_of_is_shown(app, tiny_checkpoint, tmp_path):
    """A warning that only a terminal shows, or a path in quotes, as file managers copy it, that is not found."""
    folder = tmp_path / "renamed"
    shutil.copytree(tiny_checkpoint, folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"ResidualLM"', '"OtherLM"'))
    test = app(other_folder(f'"{folder}"'))
    assert not test.error
    assert "config\\.json names OtherLM\\, but its weights make a ResidualLM" in test.warning[0].value
    assert not app().warning


def test_a_bundled_name_can_be_typed(app):
    """The name of a bundled checkpoint taken for a folder that is not there."""
    test = app(other_folder("pre_ln"))
    assert not test.error
    assert "exact" in shown(test)


@pytest.mark.parametrize("text", ["", " \n "])
def test_empty_text_asks_for_a_sentence(app, text):
    """A capture of nothing."""
    test = app(typed(text))
    assert not test.error
    assert "Type a sentence" in test.info[0].value


def test_one_token_and_the_last_one(app):
    """A slider from 0 to 0, which Streamlit refuses, and a loss of the last token, which has none."""
    test = app(typed("A"))
    assert "Mean over 1 token**" in shown(test)
    assert "no next token to predict" in shown(test)


def test_a_shorter_text_starts_at_its_first_token(app):
    """A token number of the earlier text that the new one does not have."""
    test = app(lambda test: test.slider(key="token").set_value(20), typed("A short one"))
    assert not test.error
    assert "**Token 0**" in shown(test)


def test_after_a_mistake_the_maps_come_back(app):
    """A page that lost its token behind the message and breaks."""
    good = app().text_area(key="text").value
    test = app(lambda test: test.slider(key="token").set_value(3), typed(""), typed(good))
    assert "**Token 0**" in shown(test)


def test_a_retrained_checkpoint_is_loaded_again(app, tiny_checkpoint, tmp_path):
    """The map of weights that were replaced on disk."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    test = app(other_folder(folder))
    assert not test.error
    (folder / "model.safetensors").write_bytes(b"")
    test.run()
    assert len(test.error) == 1


@pytest.fixture(scope="module")
def address(pytestconfig, tiny_checkpoint, tmp_path_factory):
    """The app, started as its users do, from another folder."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    main = pytestconfig.rootpath / "app" / "main.py"
    command = [sys.executable, "-m", "streamlit", "run", str(main), f"--server.port={port}", "--server.headless=true"]
    log = tmp_path_factory.mktemp("app") / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--", str(tiny_checkpoint)], stdout=out, stderr=out, cwd=log.parent)
        try:
            _wait(f"http://localhost:{port}/_stcore/health", process, log)
            yield f"http://localhost:{port}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait(url, process, log):
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"the app did not start: {log.read_text()}")


@pytest.fixture
def page(address):
    """The page with its first maps drawn; in the end nothing went wrong on it and nothing left this machine."""
    with open_page(allowed=(address, address.replace("http", "ws"))) as (page, wrong):
        page.goto(address)
        _maps(page)
        yield page
        assert not wrong


def _maps(page):
    """Wait for two maps, the average first."""
    page.locator(".gtitle").nth(1).wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    return page.locator(".gtitle").all_text_contents()


@pytest.fixture
def pieces(page, tiny_checkpoint):
    """The texts of the tokens of ``TEXT``, which the page shows by then."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint, local_files_only=True)
    texts = [tokenizer.decode([i]) for i in tokenizer(TEXT)["input_ids"]]
    page.get_by_role("textbox", name="Text").fill(TEXT)
    page.get_by_role("button", name="Run").click()
    page.get_by_text(f"Mean over {len(texts)} tokens", exact=True).wait_for()
    return texts


def _rows(page):
    """What the hover of the last map says of each cell: it changes with the token."""
    return page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].at(-1).data[1].text.flat().join()")


@pytest.mark.browser
def test_maps_of_a_text_and_its_tokens(page, pieces):
    """Token text read as markup, a strip that shows other tokens, or a map that stays when the token moves."""
    strip = page.get_by_test_id("stButtonGroup").get_by_role("radio")
    labels = [label.replace("\n", " ") for label in strip.all_inner_texts()]
    assert labels == [f"{i} {ri.visible_text(piece).replace(' ', '␣')}" for i, piece in enumerate(pieces)]
    assert page.locator(".stMarkdownBadge").filter(has_text="exact").count() == 2
    first, rows = _maps(page), _rows(page)
    assert first[0].endswith(f"mean over {len(pieces)} tokens")
    assert first[1].endswith(f"token 0 '{pieces[0]}'")
    strip.nth(3).click()
    page.get_by_text("Token 3", exact=True).wait_for()
    page.wait_for_function("title => document.querySelectorAll('.gtitle')[1].textContent !== title", arg=first[1])
    assert _maps(page) == [first[0], first[1].split(", token")[0] + f", token 3 '{pieces[3]}'"]
    assert _rows(page) != rows


@pytest.mark.browser
@pytest.mark.usefixtures("pieces")
def test_moving_by_buttons_keys_and_slider(page):
    """Ways to move that disagree, or a letter typed into the text that moves the token."""
    page.get_by_role("button", name="Next").click()
    page.get_by_text("Token 1", exact=True).wait_for()
    page.keyboard.press("n")
    page.get_by_text("Token 2", exact=True).wait_for()
    page.keyboard.press("p")
    page.get_by_text("Token 1", exact=True).wait_for()
    page.get_by_role("slider").press("ArrowRight")
    page.get_by_text("Token 2", exact=True).wait_for()
    strip = page.get_by_test_id("stButtonGroup").get_by_role("radio")
    assert [strip.nth(i).get_attribute("aria-checked") for i in range(4)] == ["false", "false", "true", "false"]
    page.get_by_role("textbox", name="Text").press_sequentially("nnp")
    page.wait_for_timeout(1000)
    assert page.get_by_text("Token 2", exact=True).count() == 1


@pytest.mark.browser
def test_a_bad_folder_in_the_browser(page):
    """A traceback or an endless spinner, and a path read as markup."""
    page.get_by_role("combobox").click()
    page.get_by_role("option", name="Another folder").click()
    page.get_by_role("textbox", name="Folder").fill("/no/<b>such</b>/$x$_and_:smile:")
    page.get_by_role("textbox", name="Folder").press("Enter")
    alert = page.get_by_test_id("stAlert").filter(has_text="such")
    alert.wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    assert "/no/<b>such</b>/$x$_and_:smile:" in alert.inner_text().replace("\u2060", "")
    assert page.get_by_test_id("stException").count() == 0
    assert page.get_by_test_id("stSpinner").count() == 0
    assert page.locator(".js-plotly-plot").count() == 0


@pytest.mark.browser
def test_every_bundled_checkpoint_can_be_chosen(page):
    """A checkpoint that ships but does not open in the app."""
    for name in ri.bundled():
        page.get_by_role("combobox").click()
        page.get_by_role("option", name=name, exact=True).click()
        page.get_by_text(f"Model {name}.").first.wait_for()
        assert page.get_by_test_id("stAlert").count() == 0
