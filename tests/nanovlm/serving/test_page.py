"""The page, in headless Chromium: used with a mouse, a keyboard, a phone and a screen reader."""

import io
import os
import re
import shutil
from random import Random

import pytest
from PIL import Image

from models.decoding import SamplingParams
from nanovlm import SAMPLE
from nanovlm.chat_session import ChatSession
from nanovlm.serving.options import ServerOptions
from nanovlm.synthetic import draw, random_scene
from support.serving import QUESTIONS, RunningServer, data_url, until

pytestmark = pytest.mark.full
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'nanovlm[test-web]'")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]  # no connections to Google at the start
FLAGS += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # a camera that sees a moving shape


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
    """Opens the page of a server; console errors and requests to other servers are failures."""
    contexts, problems = [], []

    def open_page(server, **options):
        contexts.append(context := browser.new_context(**options))
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith((server.url, "blob:")) else problems.append(r.url))
        page.goto(server.url)
        return page

    open_page.problems = problems
    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def show_sample(page):
    page.get_by_role("button", name="Try the sample image").click()
    sync_api.expect(page.get_by_label("Your question")).to_be_focused()  # the image is loaded


def ask(page, question=""):
    """Ask, and return the whole answer."""
    n = page.locator(".answer").count()
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    answer = page.locator(".answer:not(.generating)").nth(n)
    answer.wait_for()
    return answer.text_content()


def test_image_is_chosen_and_asked_about_several_times(served, embedded, open_page):
    page, conversation = open_page(served), ChatSession(embedded, [SAMPLE])
    page.get_by_label("Choose an image").set_input_files(SAMPLE)
    sync_api.expect(page.get_by_alt_text("Your image, sample.png")).to_be_visible()
    sync_api.expect(page.get_by_label("Your question")).to_be_focused()
    answers = [ask(page), *(ask(page, question) for question in QUESTIONS[1:])]
    assert answers == ["".join(conversation.ask(question)) for question in QUESTIONS]
    assert page.locator(".question").all_text_contents() == QUESTIONS
    assert page.get_by_role("status").text_content() == answers[-1], "screen readers read the whole answer"
    page.get_by_role("button", name="Start over").click()
    assert page.locator("#conversation li").count() == page.locator("#images li").count() == 0
    show_sample(page)
    assert ask(page) == answers[0]


CARRY_FILE = """(kind) => fetch("/sample.png").then((r) => r.blob()).then((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], "carried.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
})"""


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_image_is_dropped_or_pasted(served, embedded, open_page, kind):
    page = open_page(served)
    page.evaluate(CARRY_FILE, kind)
    sync_api.expect(page.get_by_alt_text("Your image, carried.png")).to_be_visible()
    assert ask(page) == embedded.caption(SAMPLE)


def test_keyboard_suffices_and_focus_is_visible(embedded, open_page, slow):
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
            assert shown, f"the focus on {seen[-1]} is not visible"
        assert seen == ["file", "Try the sample image", "open-camera", "question"], "the others follow"
        page.get_by_role("button", name="Try the sample image").focus()
        page.keyboard.press("Enter")
        sync_api.expect(page.get_by_label("Your question")).to_be_focused()
        page.keyboard.type("Describe")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("it.")
        assert page.get_by_label("Your question").input_value() == "Describe\nit."
        page.get_by_label("Your question").fill(QUESTIONS[0])
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".generating")).to_have_text(re.compile(r"\w{3}"))
        page.keyboard.press("Escape")
        sync_api.expect(page.get_by_role("button", name="Ask")).to_be_visible()
        text = page.locator(".answer").text_content()
        assert embedded.caption(SAMPLE).startswith(text)
        until(lambda: server.idle)


def test_elements_have_names_and_errors_are_shown(served, open_page, tmp_path):
    page = open_page(served)
    for role in ("button", "textbox", "img"):
        for one in page.get_by_role(role).all():
            assert one.is_hidden() or re.search(r"\w", one.aria_snapshot().partition(role)[2])
    assert page.locator("html").get_attribute("lang") == "en" and page.get_by_role("heading", level=1).count() == 1
    (tmp_path / "words.png").write_text("no image")
    page.get_by_label("Choose an image").set_input_files(tmp_path / "words.png")
    sync_api.expect(page.get_by_role("alert")).to_have_text("The file words.png is not an image.")
    assert page.locator("#images li").count() == 0
    (tmp_path / "noise.png").write_bytes(bytes(range(256)))
    page.get_by_label("Choose an image").set_input_files(tmp_path / "noise.png")
    sync_api.expect(page.get_by_text("Browsers cannot show noise.png")).to_be_visible()
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("alert")).to_have_text(
        "Image 1: not an image of a known format, or a damaged one."
    )
    assert page.get_by_label("Your question").input_value() == "Describe this picture.", "it can be asked again"
    assert ["400" in one for one in open_page.problems] == [True]
    open_page.problems.clear()


def test_question_without_an_image_is_not_answered(served, open_page):
    page, before = open_page(served), served.metrics()["nanovlm_requests_total"]
    page.get_by_label("Your question").fill("What is in the picture?")
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("alert")).to_have_text("There is no image to ask about; choose one first.")
    assert page.locator(".answer").count() == 0 and served.metrics()["nanovlm_requests_total"] == before
    page.get_by_role("button", name="Try the sample image").click()
    sync_api.expect(page.get_by_role("alert")).to_be_empty()
    assert page.get_by_label("Your question").input_value() == "What is in the picture?", "it can be asked now"


def scene_file(seed, name):
    draw(random_scene(Random(seed)), 120, 90).save(file := io.BytesIO(), "png")
    return {"name": name, "mimeType": "image/png", "buffer": file.getvalue()}


def sent_messages(page):
    """The messages of every chat that the page sends from now on."""
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    return sent


def test_several_images_are_shown_and_sent_in_order(served, embedded, open_page):
    page, files = open_page(served), [scene_file(seed, f"{seed}.png") for seed in range(3)]
    sent = sent_messages(page)
    page.get_by_label("Choose an image").set_input_files(files)
    sync_api.expect(page.locator("#images img")).to_have_count(3)
    page.get_by_role("button", name="Remove 1.png").click()
    sync_api.expect(page.locator("#images img")).to_have_count(2)
    scenes = [Image.open(io.BytesIO(files[i]["buffer"])) for i in (0, 2)]
    assert ask(page, "What is it?") == embedded.caption(scenes, "What is it?", max_new_tokens=256)
    assert page.get_by_role("button", name="Remove 0.png").is_hidden(), "the answer is about it"
    page.locator("#file").set_input_files(files[1])  # "Add an image" opens the same dialog
    sync_api.expect(page.locator("#images img")).to_have_count(3)
    ask(page, "And now?")
    urls = [data_url(files[i]["buffer"]) for i in (0, 2, 1)]
    first, second = (one["messages"] for one in sent)
    parts = [
        [part.get("image_url", {}).get("url") for part in message["content"]] for message in (second[0], second[2])
    ]
    assert parts == [[*urls[:2], None], [urls[2], None]] and first == second[:1]


def test_answer_is_copied(served, open_page):
    page = open_page(served, permissions=["clipboard-read", "clipboard-write"])
    show_sample(page)
    text = ask(page)
    page.get_by_role("button", name="Copy").click()
    sync_api.expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == text
    page.evaluate("navigator.clipboard.writeText = undefined")  # as without https
    page.get_by_role("button", name="Cop").click()
    assert page.evaluate("navigator.clipboard.readText()") == text


def test_settings_are_sent_and_checked(served, embedded, open_page):
    page = open_page(served)
    sent = sent_messages(page)
    show_sample(page)
    assert page.get_by_label("Temperature").is_hidden(), "settings are folded"
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("5")
    page.get_by_label("Seed").fill("3")
    page.get_by_label("Longest answer").fill("7")
    sampling = SamplingParams(temperature=5, seed=3)
    assert ask(page) == embedded.caption(SAMPLE, max_new_tokens=7, sampling=sampling)
    settings = {name: value for name, value in sent[0].items() if name not in ("model", "messages", "stream")}
    assert settings == {"temperature": 5, "seed": 3, "max_tokens": 7}, "what is left empty is not sent"
    page.get_by_label("Top p").fill("2")
    page.get_by_text("Settings").click()
    page.get_by_label("Your question").fill("What?")
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_label("Top p")).to_be_focused()
    assert len(sent) == 1, "the fold opens at the wrong value instead"


def test_generation_is_stopped_by_the_button(embedded, open_page, slow):
    with RunningServer(embedded, batch=slow) as server:
        page = open_page(server)
        show_sample(page)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".generating")).to_have_text(re.compile(r"\w{3}"))
        page.get_by_role("button", name="Stop").click()
        sync_api.expect(page.get_by_role("button", name="Ask")).to_be_visible()
        until(lambda: server.idle)
        text = page.locator(".answer").text_content()
        assert text != embedded.caption(SAMPLE) and embedded.caption(SAMPLE).startswith(text)


# The color of a custom property in the page's color scheme.
COLOR = """(name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}"""


def test_page_asks_for_the_key_of_a_server_that_needs_one(embedded, open_page):
    with RunningServer(embedded, options=ServerOptions(api_key="secret")) as server:
        page = open_page(server)
        sync_api.expect(page.get_by_label("This server needs an API key")).to_be_focused()
        page.keyboard.type("wrong\n")
        sync_api.expect(page.get_by_role("alert")).to_have_text("This is not the server's API key.")
        page.get_by_label("This server needs an API key").fill("secret")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#key-form")).to_be_hidden()
        show_sample(page)
        assert ask(page) == embedded.caption(SAMPLE)
        page.reload()
        sync_api.expect(page.get_by_role("button", name="Try the sample image")).to_be_visible()
        assert page.locator("#key-form").is_hidden(), "the key is kept until the tab is closed"
    open_page.problems.clear()  # the 401 that makes the page ask


IS_SHOWN = "(e) => e.offsetParent && !e.classList.contains('unseen')"
SIZE = "(e) => [e.getBoundingClientRect().width, e.getBoundingClientRect().height]"
IS_CUT = """(e) => e.offsetParent && !e.matches('.unseen') && getComputedStyle(e).display !== 'inline'
  && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1"""
IS_ON_TOP = """(e) => { const box = e.getBoundingClientRect();
  return [box.top + 2, box.bottom - 2].every((y) => e.contains(document.elementFromPoint(box.left + 2, y))); }"""


def test_the_camera_is_asked_about_its_newest_frame_until_it_is_stopped(served, open_page):
    page, bodies = open_page(served, permissions=["camera"]), []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("completions") else None)
    page.get_by_role("button", name="Use the camera").click()
    until(lambda: page.evaluate("document.querySelector('video').videoWidth > 0"))
    ask(page, "What is it?")
    page.get_by_label("Ask again").check()
    ask_again = page.get_by_role("button", name="Ask", exact=True)
    page.get_by_label("Your question").fill("And now?")
    ask_again.click()
    until(lambda: page.wait_for_timeout(50) or len(bodies) >= 4)
    page.get_by_label("Ask again").uncheck()
    sync_api.expect(ask_again).to_be_visible()
    assert page.locator(".answer").count() == 1
    frames = [[part["type"] for part in body["messages"][0]["content"]] for body in bodies]
    assert frames == [["image_url", "text"]] * len(bodies), "each is a chat of its own"
    urls = {body["messages"][0]["content"][0]["image_url"]["url"] for body in bodies}
    assert len(urls) > 1 and all(url.startswith("data:image/jpeg;base64,") for url in urls)
    page.get_by_role("button", name="Start over").click()
    assert page.evaluate("chat.camera === null") and page.locator("video").is_hidden()


def test_settings_are_remembered_and_a_wait_shows_its_time(embedded, open_page, slow):
    with RunningServer(embedded, batch=slow) as server:
        page = open_page(server)
        page.locator("#settings summary").click()
        page.get_by_label("Longest answer").fill("3")
        page.reload()
        page.locator("#settings summary").click()
        assert page.get_by_label("Longest answer").input_value() == "3"
        show_sample(page)
        page.keyboard.press("Enter")
        sync_api.expect(page.locator(".generating")).to_have_attribute("data-stage", re.compile(r"Reading .*, \d+ s"))
        sync_api.expect(page.locator(".answer:not(.generating)")).to_have_text(re.compile(r"\w"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_page_fits_the_screen_and_has_enough_contrast(served, open_page, scheme, width):
    page = open_page(served, color_scheme=scheme, viewport={"width": width, "height": 700})
    show_sample(page)
    for question in ("", *QUESTIONS[1:]):
        ask(page, question)
    for settings in ("closed", "open"):
        if settings == "open":
            page.locator("#settings summary").click()
        for name in (".answer", ".answer + .plain"):  # the newest answer and its button
            sync_api.expect(page.locator(name).last).to_be_in_viewport(ratio=1)
            assert page.locator(name).last.evaluate(IS_ON_TOP), f"{name} is covered"
    sizes = page.evaluate(f"[...document.querySelectorAll('button, summary, input')].filter({IS_SHOWN}).map({SIZE})")
    assert len(sizes) > 8 and all(min(size) >= 24 for size in sizes)
    assert page.evaluate(f"[...document.querySelectorAll('h1, p, span, label')].filter({IS_CUT}).length") == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    background = luminance(page.evaluate(COLOR, "--background"))
    assert (background > 0.5) == (scheme == "light")
    for name, least in (("--text", 7), ("--text-muted", 4.5), ("--accent", 4.5), ("--error", 4.5), ("--border", 3)):
        assert contrast(luminance(page.evaluate(COLOR, name)), background) >= least, name
    image_border = page.locator("#images img").evaluate("(image) => getComputedStyle(image).boxShadow")
    assert contrast(luminance(image_border), background) >= 3, "an image of the page's own color ends somewhere"
    on = [luminance(page.evaluate(COLOR, name)) for name in ("--accent", "--on-accent")]
    assert contrast(*on) >= 4.5
    if folder := os.environ.get("NANOVLM_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{scheme}-{width}.png")


def luminance(color):
    """WCAG's relative luminance of a text that begins with rgb(r, g, b)."""
    parts = [int(part) / 255 for part in re.match(r"rgb\((\d+), (\d+), (\d+)\)", color).groups()]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
