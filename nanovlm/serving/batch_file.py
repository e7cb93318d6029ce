"""Files of OpenAI's batch API: requests, one a line, are answered in this process, and results written as they end.

A request is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}, a result
{"id": ..., "custom_id": ..., "response": {"status_code": ..., "request_id": ..., "body": ...}, "error": null}.
"""

import asyncio
import errno
import json
import uuid
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from models.checkpoint import atomic_write
from nanovlm.console import progress_bar
from nanovlm.data.jsonl import read_jsonl, repair_jsonl
from nanovlm.errors import DataError, OutputError, UsageError
from nanovlm.serving.app import POST_ROUTES
from nanovlm.serving.service import ChatService

RETRY_S = 0.2
JSON = {"content-type": "application/json"}
TIMEOUT_S = 7 * 24 * 3600.0  # a request waits for those before it, however long that takes


def unanswered(requests: Path, results: Path) -> set[int]:
    """The lines, counted from 0, of the requests that have no result with status 200; other results are removed.

    UsageError for a file that cannot be read or written, DataError for a line that is no request, OutputError for a
    full disk.
    """
    lines = _read_requests(requests)
    done = _finished(results)
    return {number for custom_id, number in lines.items() if custom_id not in done}


def _read_requests(path: Path) -> dict[str, int]:
    """The line of each request by its custom_id; the requests themselves stay in the file, as they may hold images."""
    numbers: dict[str, int] = {}
    if path.exists() and not path.is_file():
        raise UsageError(f"--batch-file {path} is not a regular file; it is read twice, so write the requests to one")
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    custom_id = _parse(line, f"{path}, line {number + 1}")["custom_id"]
                    if custom_id in numbers:
                        raise DataError(f"{path}, line {number + 1}: custom_id {custom_id!r} is not new; change it")
                    numbers[custom_id] = number
    except OSError as error:
        raise UsageError(f"--batch-file {path}: {error.strerror}") from None
    if not numbers:
        raise UsageError(f"--batch-file {path} holds no request; write one a line")
    return numbers


def _parse(line: bytes, name: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise DataError(f"{name} is not JSON: {error}; correct it") from None
    routes = [f"/v1{path}" for path in POST_ROUTES]
    wanted = {"custom_id": str, "url": str, "body": dict}
    if not isinstance(request, dict) or any(not isinstance(request.get(key), kind) for key, kind in wanted.items()):
        raise DataError(f"{name} must be an object with custom_id, url and body, as OpenAI's batches have")
    if request.get("method", "POST") != "POST" or request["url"] not in routes:
        raise DataError(f"{name}: only POST to {', '.join(routes)} is answered; change method and url")
    return request


def _finished(path: Path) -> set[str]:
    """The custom_ids of results with status 200. Others are removed: they are tried again."""
    try:
        path.touch()
        repair_jsonl(path)
        rows = read_jsonl(path)
        kept = [row for row in rows if row["response"]["status_code"] == 200]
        if len(kept) < len(rows):
            with atomic_write(path) as new:
                new.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        return {row["custom_id"] for row in kept}
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _full_disk(path, error) from None
        raise UsageError(f"--out {path}: {error.strerror}; name a file that can be written") from None
    except (KeyError, TypeError):
        raise UsageError(f"--out {path} holds other rows than results of a batch; name another file") from None


def _full_disk(results: Path, error: OSError) -> OutputError:
    return OutputError(f"--out {results}: {error.strerror}; free some space and run the same command again")


async def answer_batch(service: ChatService, app: FastAPI, requests: Path, todo: set[int], results: Path) -> int:
    """Answer the requests in these lines; how many have failed. The service's limit on time must be TIMEOUT_S.

    OutputError if a result cannot be written.
    """
    n_failed, places = 0, asyncio.Semaphore(service.limits.max_num_seqs)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None)
    service.start()

    async def answer(request: dict[str, Any]) -> None:
        nonlocal n_failed
        try:
            body = json.dumps(request["body"] | {"stream": False}).encode()  # NaN is for the server to refuse
            while True:
                response = await client.post(request["url"], content=body, headers=JSON)
                if response.status_code != 429:
                    break
                await asyncio.sleep(RETRY_S)  # requests for several answers need several places
        finally:
            places.release()
        n_failed += response.status_code != 200
        found = {"status_code": response.status_code, "request_id": uuid.uuid4().hex, "body": response.json()}
        row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request["custom_id"], "response": found}
        try:
            with open(results, "ab") as file:
                file.write(json.dumps(row | {"error": None}).encode() + b"\n")
        except OSError as error:
            raise _full_disk(results, error) from None
        bar.update()

    try:
        with open(requests, "rb") as file, progress_bar(len(todo), "request") as bar:
            async with client, asyncio.TaskGroup() as tasks:
                for number, line in enumerate(file):
                    if number in todo:
                        await places.acquire()
                        tasks.create_task(answer(_parse(line, f"{requests}, line {number + 1}")))
                        del line
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        service.close()
    return n_failed
