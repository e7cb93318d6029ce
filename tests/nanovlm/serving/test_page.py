"""The page, in headless Chromium: what a person does with a mouse, a keyboard, a phone or a screen reader."""

import io
import os
import re
import shutil

import pytest
from PIL import Image

from nanovlm import SAMPLE
from nanovlm.chat_session import ChatSession
from support.serving import QUESTIONS, RunningServer, until

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'nanovlm[test-web]'")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]  # else it looks for Google at every start


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        names = ("chromium", "chromium-browser", "google-chrome", playwright.chromium.executable_path)
        found = next((path for path in map(shutil.which, names) if path), None)
        if found is None:
            pytest.skip("no Chromium here; playwright install chromium, or apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; whatever it logs or asks of other places is a failure."""
    contexts, wrong = [], []

    def open_page(server, **options):
        contexts.append(context := browser.new_context(**options))
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith((server.url, "blob:")) else wrong.append(r.url))
        page.goto(server.url)
        return page

    open_page.wrong = wrong
    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def ask(page, question=""):
    """Ask, and return the whole answer."""
    n = page.locator(".answer").count()
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer:not(.saying)").nth(n)
    answer.wait_for()
    return answer.text_content()


def test_a_picture_is_chosen_asked_about_and_asked_about_again(served, embedded, open_page):
    page, conversation = open_page(served), ChatSession(embedded, [SAMPLE])
    page.get_by_label("Choose a picture").set_input_files(SAMPLE)
    sync_api.expect(page.get_by_alt_text("Your picture, sample.png")).to_be_visible()
    sync_api.expect(page.get_by_label("Your question")).to_be_focused()
    said = [ask(page), *(ask(page, question) for question in QUESTIONS[1:])]
    assert said == ["".join(conversation.ask(question)) for question in QUESTIONS]
    assert page.locator(".question").all_text_contents() == QUESTIONS
    assert page.get_by_role("status").text_content() == said[-1], "a screen reader hears the answer whole"
    page.get_by_role("button", name="New picture").click()
    assert page.locator("#talk li").count() == 0
    page.get_by_role("button", name="Try the sample picture").click()
    sync_api.expect(page.get_by_label("Your question")).to_be_focused()
    assert ask(page) == said[0]


CARRY = """(kind) => fetch("/sample.png").then((r) => r.blob()).then((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], "carried.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
})"""


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_picture_is_dropped_or_pasted(served, embedded, open_page, kind):
    page = open_page(served)
    page.evaluate(CARRY, kind)
    sync_api.expect(page.get_by_alt_text("Your picture, carried.png")).to_be_visible()
    assert ask(page) == embedded.caption(SAMPLE)


def test_a_keyboard_is_enough_and_shows_where_it_is(embedded, open_page, slow):
    with RunningServer(embedded, batch=slow) as server:
        page, seen = open_page(server), []
        for _ in range(4):
            page.keyboard.press("Tab")
            focus = "document.activeElement"
            seen.append(page.evaluate(f"{focus}.id || {focus}.textContent"))
            shown = page.evaluate(
                "[...document.querySelectorAll('*')]"
                ".some((e) => getComputedStyle(e).outlineStyle !== 'none' && e.offsetWidth > 40)"
            )
            assert shown, f"the focus is on {seen[-1]}, but nobody sees it"
        assert seen == ["file", "Try the sample picture", "question", "send"]
        page.get_by_role("button", name="Try the sample picture").focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.get_by_label("Your question")).to_be_focused()
        page.keyboard.type("Describe")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("it.")
        assert page.get_by_label("Your question").input_value() == "Describe\nit."
        page.get_by_label("Your question").fill(QUESTIONS[0])
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".saying")).to_have_text(re.compile(r"\w{3}"))
        page.keyboard.press("Escape")
        sync_api.expect(page.get_by_role("button", name="Ask")).to_be_visible()
        said = page.locator(".answer").text_content()
        assert embedded.caption(SAMPLE).startswith(said)
        until(lambda: server.idle)


def test_everything_has_a_name_and_what_goes_wrong_is_said(served, open_page, tmp_path):
    page = open_page(served)
    for role in ("button", "textbox", "img"):
        for one in page.get_by_role(role).all():
            assert one.is_hidden() or re.search(r"\w", one.aria_snapshot().partition(role)[2])
    assert page.locator("html").get_attribute("lang") == "en" and page.get_by_role("heading", level=1).count() == 1
    page.get_by_role("button", name="Ask").click()
    sync_api.expect(page.get_by_role("alert")).to_have_text("Choose a picture, or ask something.")
    (tmp_path / "words.png").write_text("no picture")
    page.get_by_label("Choose a picture").set_input_files(tmp_path / "words.png")
    sync_api.expect(page.get_by_text("words.png is of a kind that browsers do not show")).to_be_visible()
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("alert")).to_contain_text("Picture 1: not a picture")
    assert page.get_by_label("Your question").input_value() == "Describe this picture.", "it can be asked again"
    assert ["400" in one for one in open_page.wrong] == [True]
    open_page.wrong.clear()


def test_a_picture_that_browsers_do_not_show_is_asked_about_all_the_same(served, embedded, open_page):
    page = open_page(served)
    Image.open(SAMPLE).convert("RGB").save(file := io.BytesIO(), "tiff")
    page.get_by_label("Choose a picture").set_input_files(
        {"name": "scan.tif", "mimeType": "image/tiff", "buffer": file.getvalue()}
    )
    assert ask(page) == embedded.caption(SAMPLE)
    sync_api.expect(page.get_by_text("scan.tif is of a kind that browsers do not show")).to_be_visible()


def test_without_a_picture_words_are_answered(served, embedded, open_page):
    assert ask(open_page(served), "Hello?") == embedded.caption(None, "Hello?", max_new_tokens=256)


def test_a_key_is_asked_for_where_one_is_needed(embedded, open_page):
    with RunningServer(embedded, api_key="secret") as server:
        page = open_page(server)
        sync_api.expect(page.get_by_label("This server wants an API key")).to_be_focused()
        page.keyboard.type("wrong\n")
        sync_api.expect(page.get_by_role("alert")).to_have_text("That is not this server's key.")
        page.get_by_label("This server wants an API key").fill("secret")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#key")).to_be_hidden()
        page.get_by_role("button", name="Try the sample picture").click()
        sync_api.expect(page.get_by_label("Your question")).to_be_focused()
        assert ask(page) == embedded.caption(SAMPLE)
    open_page.wrong.clear()  # the 401 that told of the key


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_fits_and_can_be_read(served, open_page, scheme, width):
    page = open_page(served, color_scheme=scheme, viewport={"width": width, "height": 700})
    page.get_by_role("button", name="Try the sample picture").click()
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colour = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()"
    paper = luminance(page.evaluate(colour, "--paper"))
    assert (paper > 0.5) == (scheme == "light")
    for name, least in (("--ink", 7), ("--faint", 4.5), ("--accent", 4.5), ("--wrong", 4.5), ("--edge", 3)):
        assert contrast(luminance(page.evaluate(colour, name)), paper) >= least, name
    on = [luminance(page.evaluate(colour, name)) for name in ("--accent", "--on-accent")]
    assert contrast(*on) >= 4.5
    if folder := os.environ.get("NANOVLM_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{scheme}-{width}.png")


def luminance(colour):
    """WCAG's relative luminance of #rgb or #rrggbb."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
