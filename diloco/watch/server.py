"""The web server behind the page: read only, on loopback unless told otherwise, with a token elsewhere."""

import asyncio
import hmac
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.watch.prometheus import metrics_text
from diloco.watch.run_view import RunView, state_now

PAGE = Path(__file__).with_name("page")
FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "drawing.js": "text/javascript",
    "uplot-1.6.32.iife.min.js": "text/javascript",
    "uplot-1.6.32.min.css": "text/css",
}
UPDATE_SECONDS = 1.0
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]"]
MISSING = (
    "the page of `diloco watch` needs {}, which is not installed; pip install fastapi uvicorn (or 'diloco[web]'), or "
    "give --text or --json"
)


def build_app(view: RunView, token: str | None) -> Any:
    """The FastAPI application of a run's page. With a token every request needs it.

    Raises ConfigError if FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI
        from fastapi.responses import FileResponse, PlainTextResponse, StreamingResponse
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import Response
    except ImportError as error:
        raise ConfigError(MISSING.format(error.name)) from None
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and not is_known(request, token):
            return PlainTextResponse("the token is missing or wrong: open the URL that diloco watch printed\n", 403)
        response = await call_next(request)
        response.headers.update(HEADERS)
        if token is not None and "token" in request.query_params:
            response.set_cookie("diloco_watch", token, httponly=True, samesite="strict")
        return response

    async def page() -> Response:
        return FileResponse(PAGE / "index.html", media_type="text/html")

    async def file(name: str) -> Response:
        if name not in FILES:
            return PlainTextResponse("no such file\n", 404)
        return FileResponse(PAGE / name, media_type=FILES[name])

    async def events() -> Response:
        return StreamingResponse(stream(view), media_type="text/event-stream")

    async def state() -> Response:
        await asyncio.to_thread(view.read)
        return Response(json.dumps(state_now(view), allow_nan=False), media_type="application/json")

    async def metrics() -> Response:
        await asyncio.to_thread(view.read)
        return PlainTextResponse(metrics_text(view))

    app.middleware("http")(guard)
    if token is None:  # Against pages elsewhere whose names resolve to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    routes = {"/": page, "/page/{name}": file, "/events": events, "/state": state, "/metrics": metrics}
    for path, handler in routes.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    return app


def is_known(request: Any, token: str) -> bool:
    """Whether the request brings the token: in its query, its cookie, or as a bearer."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = (request.query_params.get("token", ""), request.cookies.get("diloco_watch", ""), bearer)
    return any(hmac.compare_digest(each.encode(), token.encode()) for each in given)


async def stream(view: RunView) -> AsyncIterator[str]:
    """Server-sent events: first a snapshot of the run, then what is new, each second."""
    sent = await asyncio.to_thread(view.read)
    yield encode_event("snapshot", await asyncio.to_thread(view.snapshot, sent))
    while True:
        await asyncio.sleep(UPDATE_SECONDS)
        now = await asyncio.to_thread(view.read)
        new, sent = view.between(sent, now), now
        # A comment finds out that the reader has gone.
        yield encode_event("more", new) if any(new.values()) else ": nothing new\n\n"


def encode_event(name: str, values: dict[str, Any]) -> str:
    """A server-sent event with values as JSON."""
    return f"event: {name}\ndata: {json.dumps(values, allow_nan=False, separators=(',', ':'))}\n\n"


def serve(run_dir: Path, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until interrupted. `announce` gets the URL to open. Raises InputError if there is no run."""
    view = RunView(run_dir)
    view.read()
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    app = build_app(view, token)
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(MISSING.format(error.name)) from None
    shown = f"[{host}]" if ":" in host else host
    announce(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
    # No access log: it would hold the token.
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=2)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
