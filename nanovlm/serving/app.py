"""The routes, and a page that asks them by hand."""

from collections.abc import Collection
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from nanovlm import SAMPLE
from nanovlm.serving.protocol import Problem
from nanovlm.serving.security import Guard
from nanovlm.serving.service import ChatService

HERE = Path(__file__).parent
PAGE = {"/": HERE / "static" / "page.html", "/page.css": HERE / "static" / "page.css", "/page.js": HERE / "static" / "page.js", "/sample.png": SAMPLE}


def make_app(desk: ChatService, hosts: Collection[str] | None = None, api_key: str | None = None, note: str = "") -> FastAPI:
    """The server; hosts and api_key as in Guard, note is told about the model."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        desk.engine.start()
        yield
        desk.engine.close()
        desk.threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="nanoVLM", lifespan=lifespan, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts, api_key=api_key)
    model = {"id": desk.name, "object": "model", "created": 0, "owned_by": "nanovlm", "description": note}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await desk.answer(request)

    @app.get("/v1/models")
    async def models() -> dict:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict:
        if name != desk.name:
            raise Problem(404, f"no model {name!r} here, only {desk.name!r}", "model_not_found", "model")
        return model

    @app.get("/health")
    async def health() -> JSONResponse:
        status = "stopped" if not desk.engine.alive else "draining" if desk.draining else "ok"
        body = {"status": status, "model": desk.name, "running": desk.engine.running, "waiting": desk.waiting}
        return JSONResponse(body, 200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(desk.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    for path, file in PAGE.items():
        app.add_api_route(path, _sender(file))

    @app.exception_handler(Problem)
    async def tell(request: Request, problem: Problem) -> JSONResponse:
        return JSONResponse(problem.body(), problem.status, problem.headers)

    @app.exception_handler(HTTPException)
    async def tell_otherwise(request: Request, error: HTTPException) -> JSONResponse:
        problem = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(problem.body(), problem.status, error.headers)

    @app.exception_handler(Exception)
    async def tell_nothing_more(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(Problem(500, "the server failed; its log says why").body(), 500)

    return app


def _sender(file: Path):
    """A route that sends one file; it takes no parameters, for FastAPI would let clients choose them."""

    def send() -> FileResponse:
        return FileResponse(file, headers={"Cache-Control": "no-cache"})

    return send
