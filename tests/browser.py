"""A real Chromium for the tests marked ``browser``."""

import os
import shutil
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


def find_chromium():
    found = os.environ.get("RESINSPECT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.fail("no Chromium found: install one, or name it in RESINSPECT_CHROMIUM")
    return found


@contextmanager
def open_page(allowed):
    """A page, and what goes wrong on it: console errors, and requests to anywhere but ``allowed``."""
    from playwright.sync_api import sync_playwright

    wrong = []
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-quic", *QUIET]
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=options)
        page = browser.new_page(viewport={"width": 1280, "height": 1400})
        page.set_default_timeout(60_000)
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda r: wrong.append(r.url) if not r.url.startswith((*allowed, "data:", "blob:")) else 0)
        yield page, wrong
        browser.close()
