"""The routes of the server: OpenAI's API at /v1, health and the page."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from nanovlm.embedded import SAMPLE
from nanovlm.serving.errors import APIError, internal_error
from nanovlm.serving.options import ServerOptions
from nanovlm.serving.security import BrowserSecurityMiddleware, require_api_key
from nanovlm.serving.service import ChatService

STATIC = Path(__file__).parent / "static"
PAGE_FILES = {
    "/": STATIC / "page.html",
    "/page.css": STATIC / "page.css",
    "/page.js": STATIC / "page.js",
    "/sample.png": SAMPLE,
}
GET = ["GET", "HEAD"]


def make_app(service: ChatService, options: ServerOptions, description: str = "") -> FastAPI:
    """The server as an ASGI app; description is what /v1/models and the page say about the model."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    app = FastAPI(title="nanoVLM", lifespan=lifespan, openapi_url=None)
    if options.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(BrowserSecurityMiddleware, options=options)
    app.include_router(api_routes(service, description), dependencies=[Depends(require_api_key(options.api_key))])
    app.add_api_route("/health", health_route(service), methods=GET)
    for path, file in PAGE_FILES.items():
        app.add_api_route(path, file_route(file), methods=GET)
    add_exception_handlers(app)
    return app


def api_routes(service: ChatService, description: str) -> APIRouter:
    """The routes that need the key."""
    router = APIRouter()
    model = {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "nanovlm",
        "description": description,
        "max_model_len": service.captioner.processor.cfg.lm_max_position_embeddings,  # vLLM's
    }

    async def create(request: Request) -> Response:
        return await service.complete(request)

    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    def retrieve_model(name: str) -> dict[str, Any]:
        if name != service.name:
            message = f"no model {name!r} here, only {service.name!r}"
            raise APIError(404, message, "model_not_found", "model")
        return model

    for prefix in ("/v1", ""):  # some clients leave it out, as llama.cpp's server allows
        router.add_api_route(f"{prefix}/chat/completions", create, methods=["POST"])
        router.add_api_route(f"{prefix}/models", list_models, methods=GET)
        router.add_api_route(f"{prefix}/models/{{name:path}}", retrieve_model, methods=GET)
    return router


def health_route(service: ChatService) -> Callable[[], JSONResponse]:
    def health() -> JSONResponse:
        status = "stopped" if not service.engine.alive else "draining" if service.admission.draining else "ok"
        counts = {"running": service.engine.batch.running, "waiting": service.num_waiting}
        return JSONResponse({"status": status, "model": service.name, **counts}, 200 if status == "ok" else 503)

    return health


def file_route(file: Path) -> Callable[[], FileResponse]:
    """A route that sends one file; a parameter of the route would be the client's to choose."""

    def send_file() -> FileResponse:
        return FileResponse(file, headers={"Cache-Control": "no-cache"})

    return send_file


def add_exception_handlers(app: FastAPI) -> None:
    """Give every error OpenAI's shape."""

    async def send_error(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            message, headers = f"{request.method} {request.url.path}: {error.detail}", dict(error.headers or {})
            error = APIError(error.status_code, message, headers=headers)
        elif not isinstance(error, APIError):
            error = internal_error()  # starlette raises the other one again, and uvicorn logs it
        return JSONResponse(error.body(), error.status, error.headers)

    for kind in (APIError, HTTPException, Exception):
        app.add_exception_handler(kind, send_error)
