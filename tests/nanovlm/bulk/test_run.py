"""`caption_images`, the Python interface of captioning many images, and its progress report."""

import logging

from nanovlm.bulk import BulkOptions, OutputOptions, caption_images
from nanovlm.bulk.run import Progress
from nanovlm.data.jsonl import read_jsonl
from support.cli import IMAGE_NAMES, FakeTerminal, set_stream


def test_a_folder_is_captioned_from_python(image_folder, captions_of):
    folder, captioner = image_folder, captions_of.captioner
    output = OutputOptions(folder / "metadata.jsonl", prefix="foo ")
    (folder / "bad.png").write_text("hello")
    report = caption_images(captioner, [folder], BulkOptions(max_new_tokens=6), output)
    texts = {row["file_name"]: row["text"] for row in read_jsonl(folder / "metadata.jsonl")}
    assert texts == {name: f"foo {captions_of(str(folder / name))[0].strip()}" for name in IMAGE_NAMES}
    assert (report.captioned, report.already_done, report.failed) == (5, 0, 1)
    assert report.seconds > 0 and 0 < report.utilization <= 1 and report.per_minute > 0
    assert [row["file_name"] for row in read_jsonl(report.failures)] == ["bad.png"]


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(caplog):
    caplog.set_level(logging.INFO)
    clock = [0.0]
    with Progress(200, clock=lambda: clock[0]) as progress:
        for _ in range(200):
            clock[0] += 1
            progress.update(failed=0)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 6 and lines[0] == "30/200 images, 60 per minute, 3 minutes left"


def test_progress_is_a_bar_on_a_terminal(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    terminal = set_stream("stderr", FakeTerminal(), monkeypatch)
    monkeypatch.delenv("TERM", raising=False)
    clock = [0.0]
    with Progress(4, clock=lambda: clock[0]) as progress:
        for failed in (0, 0, 1, 1):
            clock[0] += 60
            progress.update(failed)
        progress.bar.refresh()
    assert "4/4" in terminal.getvalue() and "1 failed" in terminal.getvalue() and not caplog.records
