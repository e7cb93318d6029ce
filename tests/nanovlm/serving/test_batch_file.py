"""`nanovlm serve --batch-file`: results as the server gives them, resumed, and wrong files in one line."""

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest

from nanovlm import SAMPLE
from nanovlm.cli import main as cli
from nanovlm.errors import NanoVLMError
from nanovlm.serving.app import make_app
from nanovlm.serving.batch_file import answer_batch
from nanovlm.serving.options import Limits, ServerOptions
from nanovlm.serving.service import ChatService
from support.serving import QUESTIONS, SAMPLE_URL, user_message

pytestmark = pytest.mark.usefixtures("in_tmp_path")
FLAGS = ["--batch-file", "in.jsonl", "--out", "out.jsonl", "--device", "cpu", "--dtype", "float32"]


def request(custom_id, url="/v1/chat/completions", **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "any", "max_tokens": 24} | body}


def write(*requests):
    Path("in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))


def results():
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    found = {row["custom_id"]: row["response"] for row in rows}
    assert len(found) == len(rows) and all(row["error"] is None for row in rows)
    return found


def test_each_request_gets_the_servers_answer_and_failed_ones_are_tried_again(embedded, capsys):
    asked = [request(f"q{i}", messages=user_message(text, SAMPLE_URL)) for i, text in enumerate(QUESTIONS)]
    asked.append(request("two", messages=user_message(QUESTIONS[0], SAMPLE_URL), n=2, stream=True))
    broken = request("broken", messages=user_message("?", "data:image/png;base64,AAAA"))
    write(*asked, broken, request("text", "/v1/responses", input="The", max_output_tokens=3))
    assert cli.main(["serve", *FLAGS]) == 1
    assert "1 request failed; out.jsonl says why" in capsys.readouterr().err
    found = results()
    assert found["broken"]["status_code"] == 400 and "image 1" in found["broken"]["body"]["error"]["message"]
    for i, text in enumerate(QUESTIONS):
        assert found[f"q{i}"]["body"]["model"] == "nanovlm", "whatever name was asked for"
        (choice,) = found[f"q{i}"]["body"]["choices"]
        assert choice["message"]["content"] == embedded.caption(SAMPLE, text, max_new_tokens=24)
    assert len(found["two"]["body"]["choices"]) == 2 and found["text"]["body"]["object"] == "response"
    done = Path("out.jsonl").read_text().splitlines()
    write(*asked, request("broken", messages=user_message(QUESTIONS[1], SAMPLE_URL)))
    Path("out.jsonl").write_text("".join(f"{line}\n" for line in done) + '{"id": "batch_req_')  # as a kill leaves it
    assert cli.main(["serve", *FLAGS]) == 0
    assert results()["broken"]["body"]["choices"][0]["message"]["content"] == embedded.caption(SAMPLE, QUESTIONS[1])
    assert [line for line in done if '"broken"' not in line] == Path("out.jsonl").read_text().splitlines()[:-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "--batch-file in.jsonl holds no request"),
        ([{"custom_id": "a"}], "in.jsonl, line 1 must be an object with custom_id, url and body"),
        ([request("a", "/v1/embeddings")], "in.jsonl, line 1: only POST to /v1/chat/completions"),
        ([request("a"), request("a")], "in.jsonl, line 2: custom_id 'a' is not new"),
        (None, "--batch-file in.jsonl: No such file"),
    ],
)
def test_a_wrong_file_is_one_line(lines, message, capsys):
    if lines is not None:
        write(*lines)
    assert cli.main(["serve", *FLAGS]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err.splitlines()[-1] and not Path("out.jsonl").exists()


def test_a_request_that_the_server_refuses_stops_no_other(embedded):
    half_a_character = request("surrogate", messages=user_message("\ud800"))
    no_number = request("nan", messages=user_message("?"), temperature=float("nan"))
    write(half_a_character, no_number, request("right", messages=user_message(QUESTIONS[0], SAMPLE_URL)))
    assert cli.main(["serve", *FLAGS]) == 1
    assert {name: row["status_code"] for name, row in results().items()} == {"surrogate": 400, "nan": 400, "right": 200}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_a_failure(embedded):
    write(request("a", messages=user_message("?")))
    service = ChatService(embedded, "any", Limits())
    batch = answer_batch(service, make_app(service, ServerOptions()), Path("in.jsonl"), {0}, Path("/dev/full"))
    with pytest.raises(NanoVLMError, match="--out /dev/full: No space left.*; free some space and run") as raised:
        asyncio.run(batch)
    assert raised.value.exit_code == 1


def test_a_disk_that_is_full_at_the_start_is_a_failure(capsys, monkeypatch):
    def touch(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "touch", touch)
    write(request("a", messages=user_message("?")))
    assert cli.main(["serve", *FLAGS]) == 1
    assert "--out out.jsonl: No space left on device; free some space and run" in capsys.readouterr().err


def test_both_files_are_needed_and_results_of_something_else_are_kept(capsys):
    assert cli.main(["serve", "--batch-file", "in.jsonl"]) == 2
    assert "go together" in capsys.readouterr().err
    write(request("a", messages=user_message("?")))
    Path("out.jsonl").write_text('{"text": "mine"}\n')
    assert cli.main(["serve", *FLAGS]) == 2
    assert "holds other rows than results" in capsys.readouterr().err
    assert Path("out.jsonl").read_text() == '{"text": "mine"}\n'
