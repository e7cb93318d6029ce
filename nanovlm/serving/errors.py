"""The errors that clients see, and how every other error becomes one of them."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import ClientDisconnect

from models.errors import shortened
from nanovlm.errors import NanoVLMError

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = 499  # nginx's status; nobody reads it


class APIError(Exception):
    """An HTTP error for the client: a status and one sentence, in OpenAI's shape. param is the client's field name."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(shortened(message))
        self.status, self.code, self.param, self.headers = status, code, param, headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class EngineError(Exception):
    """The model failed on a request; the log has the traceback."""


class EngineStoppedError(EngineError):
    """The engine does not run."""


@contextmanager
def refusing(param: str, code: str | None = None) -> Iterator[None]:
    """What the value of the client's field causes inside becomes an APIError that names the field."""
    try:
        yield
    except NanoVLMError as error:
        raise APIError(400, str(error), code, param) from None


def as_api_error(error: BaseException) -> APIError:
    """What to tell the client. An unexpected exception is logged, and the client learns no more than that."""
    match error:
        case APIError():
            return error
        case ClientDisconnect():
            return APIError(CLIENT_DISCONNECTED, "the client disconnected")
        case asyncio.CancelledError():  # a second signal has ended the event loop
            return stopping()
        case EngineStoppedError():
            return APIError(503, "the model does not run any more; the server's log has the reason")
        case EngineError():  # the engine has logged it
            return APIError(500, f"{error}; the server's log has the reason")
        case NanoVLMError():
            return APIError(400, str(error))
    logger.error("a request failed", exc_info=error)
    return internal_error()


def stopping() -> APIError:
    return APIError(503, "the server is stopping; try again when it is back", headers={"Retry-After": "5"})


def internal_error() -> APIError:
    return APIError(500, "internal server error; the server's log has the reason")
