"""The page in headless Chromium, by mouse and keyboard, on a phone, a tablet and a desk, in light and dark."""

import base64
import io
import re
from random import Random

import pytest
from PIL import Image

from nanovlm import SAMPLE
from nanovlm.chat_session import ChatSession
from nanovlm.synthetic import draw, random_scene
from support import noise_image
from support.serving import QUESTIONS, RunningServer, until

pytestmark = pytest.mark.full
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install 'nanovlm[test-web]'")
expect = sync_api.expect


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; console errors and requests to other servers are failures. sent holds its chats."""
    contexts, problems = [], []

    def open_page(server, **options):
        contexts.append(context := browser.new_context(**options))
        context.set_default_timeout(20_000)
        page, open_page.sent = context.new_page(), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda r: r.url.startswith((server.url, "data:")) or problems.append(r.url))
        page.on("request", lambda r: open_page.sent.append(r.post_data_json) if r.method == "POST" else None)
        page.goto(server.url)
        return page

    open_page.problems = problems
    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def click(page, name):
    page.get_by_role("button", name=name, exact=True).last.click()


def show_sample(page):
    click(page, "Try the sample image")
    expect(page.get_by_label("Your question")).to_be_focused()  # the image is loaded


def ask(page, question=""):
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")
    return answers(page)


def answers(page):
    page.wait_for_timeout(50)
    expect(page.locator(".generating")).to_have_count(0)
    return page.locator(".answer").all_text_contents()


def show(page, *images):
    """Choose images, whose names are 0.png, 1.png, ..., and wait until they are shown."""
    sent = []
    for i, image in enumerate(images):
        image.save(file := io.BytesIO(), "png")
        sent.append({"name": f"{i}.png", "mimeType": "image/png", "buffer": file.getvalue()})
    n_before = page.locator("#images img").count()
    page.locator("#file").set_input_files(sent)
    expect(page.locator("#images img")).to_have_count(n_before + len(images))


def test_questions_are_asked_again_edited_and_forgotten(served, embedded, open_page):
    page, session = open_page(served), ChatSession(embedded, [SAMPLE])
    page.get_by_label("Choose an image").set_input_files(SAMPLE)
    expect(page.get_by_alt_text("Your image, sample.png")).to_be_visible()
    expected = ["".join(session.ask(question)) for question in QUESTIONS[:3]]
    assert [ask(page, question) for question in ("", *QUESTIONS[1:3])][-1] == expected
    assert page.get_by_role("status").text_content() == expected[-1], "screen readers read the whole answer"
    click(page, "Ask again")
    assert answers(page) == expected and open_page.sent[-1] == open_page.sent[-2]
    for name in ("Ask again", "Edit"):  # both would remove the third turn
        page.get_by_role("button", name=name).nth(1).click()
        expect(page.get_by_role("alert")).to_contain_text("this question, its answer and the turn after it")
        assert page.get_by_label("Your question").input_value() == QUESTIONS[1] and len(open_page.sent) == 4
        click(page, "Keep them") if name == "Ask again" else None
    session.history = session.history[:1]
    assert ask(page, QUESTIONS[3]) == [expected[0], "".join(session.ask(QUESTIONS[3]))], "what came after it is gone"
    page.get_by_label("Temperature").fill("1.5")
    ask(page, QUESTIONS[2])
    click(page, "Start over")
    assert page.locator("#conversation li, #images li").count() == 0
    show_sample(page)
    assert ask(page) == expected[:1] and [body["temperature"] for body in open_page.sent[-2:]] == [1.5, 0]


def test_photos_are_scaled_before_they_are_sent(served, open_page, tmp_path):
    page, exif = open_page(served), Image.Exif()
    photo = Image.effect_noise((4000, 3000), 90).convert("RGB")
    exif[0x0112] = 6  # the orientation: turned by 90 degrees
    photos = [tmp_path / f"{i}.jpg" for i in range(4)]
    for path in photos:
        photo.save(path, quality=95, exif=exif)
    assert sum(path.stat().st_size for path in photos) * 4 / 3 > 20 * 2**20, "too large for a request"
    page.locator("#file").set_input_files(photos)
    expect(page.locator("#images img")).to_have_count(4)
    ask(page)
    *images, _ = open_page.sent[0]["messages"][0]["content"]
    sent = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in images]
    assert [Image.open(io.BytesIO(data)).size for data in sent] == [(1536, 2048)] * 4


def test_images_are_sent_in_order_and_removed(served, embedded, open_page):
    page, scenes = open_page(served), [draw(random_scene(Random(seed)), 120, 90) for seed in range(3)]
    show(page, *scenes)
    click(page, "Remove 1.png")
    expected = embedded.caption([scenes[0], scenes[2]], "What is it?", max_new_tokens=256)
    assert ask(page, "What is it?") == [expected] and page.locator("#images img").count() == 2


CARRY_FILE = """(kind) => fetch("/sample.png").then((r) => r.blob()).then((blob) => {
  const data = new DataTransfer();
  data.items.add(new File([blob], "sample.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, bubbles: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.body.dispatchEvent(event);
})"""


@pytest.mark.parametrize("kind", ["drop", "paste", "camera"])
def test_image_is_dropped_pasted_or_photographed(served, embedded, open_page, kind):
    page = open_page(served, has_touch=kind == "camera", is_mobile=kind == "camera")
    if kind == "camera":
        with page.expect_file_chooser() as chooser:
            click(page, "Take a photo")
        assert page.locator("#camera-file").get_attribute("capture") == "environment"
        chooser.value.set_files(SAMPLE)
    else:
        page.evaluate(CARRY_FILE, kind)
    expect(page.get_by_alt_text("Your image, sample.png")).to_be_visible()
    assert ask(page) == [embedded.caption(SAMPLE)]


def test_keyboard_suffices_and_stops_an_answer(embedded, open_page, slow):
    with RunningServer(embedded, before_step=slow) as server:
        page = open_page(server)
        for name in ("start-over", "file", "sample", "question"):
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.id") == name
            outlined = "(e) => getComputedStyle(e).outlineStyle !== 'none' && e.offsetWidth > 40"
            assert page.evaluate(f"[...document.querySelectorAll('*')].some({outlined})"), "the focus is not visible"
        page.locator("#sample").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_label("Your question")).to_be_focused()
        page.keyboard.type("Describe")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("it.")
        assert page.get_by_label("Your question").input_value() == "Describe\nit."
        for stop in (lambda: page.keyboard.press("Escape"), lambda: click(page, "Stop")):
            page.get_by_label("Your question").fill(QUESTIONS[0])
            page.keyboard.press("Enter")
            expect(page.locator(".generating")).to_have_text(re.compile(r"\w{3}"))
            stop()
            (text, *_) = answers(page)
            assert text != embedded.caption(SAMPLE) and embedded.caption(SAMPLE).startswith(text)
            until(lambda: server.idle)


def test_problems_are_said_and_the_question_stays(served, open_page):
    page, alert = open_page(served), "There is no image to ask about; choose one first."
    ask(page, "What is in the picture?")
    expect(page.get_by_role("alert")).to_have_text(alert)
    for name, kind, data, words in (
        ("a.pdf", "application/pdf", b"%PDF", "A.pdf is not an image."),
        ("a.gif", "image/gif", b"", "A.gif is empty, or a folder."),
        ("a.png", "image/png", SAMPLE.read_bytes()[:20], "a.png is damaged."),
        ("a.heic", "image/heic", bytes(range(256)), "Browsers cannot show a.heic, but you can ask about it."),
    ):
        page.locator("#file").set_input_files({"name": name, "mimeType": kind, "buffer": data})
        expect(page.get_by_text(words)).to_be_visible()
    click(page, "Remove a.png")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("Image 1: not an image of a known format, or a damaged one.")
    assert page.get_by_label("Your question").input_value() == "What is in the picture?"
    page.get_by_label("Temperature").fill("9")
    page.get_by_label("Your question").press("Enter")
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert len(open_page.sent) == 1 and ["400" in one for one in open_page.problems] == [True]
    open_page.problems.clear()


@pytest.mark.parametrize("size", [(360, 740), (1280, 800)])
def test_a_chat_that_is_too_long_is_shortened_by_a_button(served, open_page, size):
    page = open_page(served, viewport=dict(zip(("width", "height"), size)))
    show(page, *(noise_image(400, 300, seed=i) for i in range(4)))
    while not page.get_by_role("alert").text_content():
        texts = ask(page, f"{QUESTIONS[0]} " * 20)
    assert page.get_by_role("alert").evaluate(IS_ON_TOP), "the error is covered"
    expect(page.get_by_role("alert")).to_contain_text("Prompt is too long")
    page.get_by_role("button", name="Edit").nth(1).click()
    assert len(ask(page, f"{QUESTIONS[0]} " * 200)) == len(texts), "turns that a failed question replaces come back"
    page.get_by_label("Your question").fill(QUESTIONS[1])
    page.get_by_role("button", name="Forget the first turn and ask again").click()
    assert len(answers(page)) == 1 and open_page.sent[-1]["messages"][-1]["content"][-1]["text"] == QUESTIONS[1]
    assert {problem[-15:] for problem in open_page.problems} == {"400 (Bad Request)"[-15:]}
    open_page.problems.clear()


def test_page_asks_for_the_key_of_a_server_that_needs_one(embedded, open_page):
    with RunningServer(embedded, api_key="secret") as server:
        page = open_page(server)
        for key, message in (("wrong", "Wrong or missing API key; send it as"), ("secret", "")):
            expect(page.get_by_label("This server needs an API key")).to_be_focused()
            page.get_by_label("This server needs an API key").fill(key)
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text(message)
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.get_by_label("Your question")).to_be_focused()  # the server has taken the key
        page.reload()
        show_sample(page)
        assert ask(page) == [embedded.caption(SAMPLE)], "the key is kept until the tab is closed"
    open_page.problems.clear()  # the 401 that makes the page ask


IS_SHOWN = "(e) => e.offsetParent && !e.classList.contains('unseen')"
SIZE = "(e) => [e.getBoundingClientRect().width, e.getBoundingClientRect().height]"
IS_CUT = """(e) => e.offsetParent && !e.matches('.unseen') && getComputedStyle(e).display !== 'inline'
  && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1"""
IS_ON_TOP = """(e) => { const box = e.getBoundingClientRect();
  const at = (y) => document.elementFromPoint(box.left + box.width / 2, y);
  return [box.top + 2, box.bottom - 2].every((y) => e.contains(at(y))); }"""
COLOR = """(name) => { const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color; }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_image_and_answers_are_seen_together_with_enough_contrast(served, open_page, scheme, width):
    page = open_page(served, color_scheme=scheme, viewport={"width": width, "height": 700})
    show_sample(page)
    show(page, noise_image(400, 300))
    for question in ("", *QUESTIONS[1:]):
        ask(page, question)
    for locator in (page.locator(".answer"), page.locator("li > .plain"), page.locator("#images img")):
        expect(locator.last).to_be_in_viewport(ratio=1)
        assert locator.last.evaluate(IS_ON_TOP), f"{locator} is covered"
    sizes = page.evaluate(f"[...document.querySelectorAll('button, input')].filter({IS_SHOWN}).map({SIZE})")
    assert len(sizes) > 8 and all(min(size) >= 24 for size in sizes)
    assert page.evaluate(f"[...document.querySelectorAll('h1, p, span, label')].filter({IS_CUT}).length") == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    color = lambda name: luminance(page.evaluate(COLOR, name))  # noqa: E731
    assert (color("--background") > 0.5) == (scheme == "light")
    for name, least in (("--text", 7), ("--text-muted", 4.5), ("--accent", 4.5), ("--error", 4.5), ("--border", 3)):
        assert contrast(color(name), color("--background")) >= least, name
    assert contrast(color("--accent"), color("--on-accent")) >= 4.5
    for role in ("button", "textbox", "img"):
        for one in page.get_by_role(role).all():
            assert one.is_hidden() or re.search(r"\w", one.aria_snapshot().partition(role)[2])


def luminance(color):
    """WCAG's relative luminance of a text that begins with rgb(r, g, b)."""
    parts = [int(part) / 255 for part in re.match(r"rgb\((\d+), (\d+), (\d+)\)", color).groups()]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
