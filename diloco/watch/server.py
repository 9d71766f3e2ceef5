"""The web server of the page: read-only unless --control is given, on loopback by default,
elsewhere with a token.
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diloco.errors import ConfigError
from diloco.watch.control import Control, Wish
from diloco.watch.feed import Feed
from diloco.watch.prometheus import metrics_text
from diloco.watch.view.overlay import list_others, read_losses
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from diloco.watch.view.state import state_now
from outer.errors import OuterError, first_line

PAGE = Path(__file__).with_name("page")
FILES = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "drawing.js": "text/javascript",
    "panels.js": "text/javascript",
    "overview.js": "text/javascript",
    "losses.js": "text/javascript",
    "save.js": "text/javascript",
    "prediction.js": "text/javascript",
    "control.js": "text/javascript",
    "compare.js": "text/javascript",
    "uplot-1.6.32.iife.min.js": "text/javascript",
    "uplot-1.6.32.min.css": "text/css",
}
Route = Callable[..., Awaitable[Any]]
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]"]
MAX_WISH_BYTES = 1 << 12
MISSING = (
    "the page of `diloco watch` needs {}, which is not installed; pip install fastapi uvicorn (or "
    "'diloco[web]'), or give --text or --json"
)


def build_app(
    views: Sequence[RunView],
    token: str | None,
    control: Control | None = None,
    *,
    is_local: bool = True,
) -> Any:
    """Build the FastAPI application of the page of one run, or of two runs side by side.

    With a token, every request must contain it. `control`: what the page of one run may do besides
    showing it; needs a token. `is_local`: answer only requests that address this machine by a name
    of loopback.

    Raises ConfigError if FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI
        from fastapi.responses import PlainTextResponse
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import Response
    except ImportError as error:
        raise ConfigError(MISSING.format(error.name)) from None
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if token is not None and not is_known(request, token):
            return PlainTextResponse(
                "the token is missing or wrong: open the URL that diloco watch printed\n", 403
            )
        response = await call_next(request)
        response.headers.update(HEADERS)
        if token is not None and "token" in request.query_params:
            response.set_cookie("diloco_watch", token, httponly=True, samesite="strict")
        return response

    app.middleware("http")(guard)
    if is_local:  # Protects against pages of other sites whose host names resolve to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    predictions = [RunPrediction(view) for view in views]
    routes = figure_routes(predictions)
    if len(views) == 1:
        operator = None if control is None else control.operator
        routes |= page_routes("/", "index.html") | {
            "/events": event_route(predictions[0], operator)
        }
        routes |= {"/other": other_route(views[0].run_dir)}
    else:
        routes |= page_routes("/", "compare.html")
        for number, prediction in enumerate(predictions):
            routes |= page_routes(f"/run/{number}/", "index.html") | {
                f"/run/{number}/events": event_route(prediction)
            }
            routes |= {f"/run/{number}/other": other_route(prediction.view.run_dir)}
    for path, handler in routes.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    if control is not None:
        assert token is not None, "an application with a control needs a token"
        app.add_api_route("/act", act_route(control), methods=["POST"], response_model=None)
    return app


def page_routes(place: str, name: str) -> dict[str, Route]:
    """Return the routes of a page at a path that ends with a slash, and of its files below that
    path.
    """
    from fastapi.responses import FileResponse, PlainTextResponse
    from starlette.responses import Response

    async def page() -> Response:
        return FileResponse(PAGE / name, media_type="text/html")

    async def file(name: str) -> Response:
        if name not in FILES:
            return PlainTextResponse("no such file\n", 404)
        return FileResponse(PAGE / name, media_type=FILES[name])

    return {place: page, place + "page/{name}": file}


def act_route(control: Control) -> Route:
    """Return a route that takes a Wish. It answers with a text, with the word that confirms it, or
    with an error.
    """
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    async def act(request: Request) -> Response:
        # A page of another site cannot send this header without a preflight request, which is not
        # answered.
        if request.headers.get("x-diloco-control") != "1":
            return JSONResponse({"error": "the header x-diloco-control is missing"}, 403)
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_WISH_BYTES:
                return JSONResponse({"error": f"a request has at most {MAX_WISH_BYTES} bytes"}, 413)
        try:
            return JSONResponse(
                dict(await asyncio.to_thread(control.answer, Wish.model_validate_json(body)))
            )
        except ValidationError as error:
            return JSONResponse({"error": f"not a valid request: {error.errors()[0]['msg']}"}, 422)
        except OuterError as error:
            return JSONResponse({"error": first_line(error)}, 409)

    return act


def event_route(prediction: RunPrediction, operator: str | None = None) -> Route:
    """Return the route of the stream of a run's events."""
    from fastapi.responses import StreamingResponse
    from starlette.responses import Response

    feed = Feed(prediction, operator)

    async def events() -> Response:
        return StreamingResponse(feed.events(), media_type="text/event-stream")

    return events


def other_route(run_dir: Path) -> Route:
    """Return the route of the held-out losses of another run in the same folder of runs."""
    from starlette.responses import JSONResponse, Response

    runs = run_dir.resolve().parent

    async def other(name: str) -> Response:
        if name not in await asyncio.to_thread(list_others, run_dir):
            return JSONResponse({"error": "no such run"}, 404)
        return JSONResponse(await asyncio.to_thread(read_losses, runs / name))

    return other


def figure_routes(predictions: Sequence[RunPrediction]) -> dict[str, Route]:
    """Return the routes of the state as JSON and of the figures for Prometheus."""
    from fastapi.responses import PlainTextResponse
    from starlette.responses import Response

    async def read() -> None:
        for prediction in predictions:
            await asyncio.to_thread(prediction.view.read)

    async def state() -> Response:
        await read()
        found = [await asyncio.to_thread(prediction.state) for prediction in predictions]
        text = json.dumps(found[0] if len(found) == 1 else found, allow_nan=False)
        return Response(text, media_type="application/json")

    async def metrics() -> Response:
        await read()
        return PlainTextResponse(
            metrics_text([state_now(prediction.view) for prediction in predictions])
        )

    return {"/state": state, "/metrics": metrics}


def is_known(request: Any, token: str) -> bool:
    """Return whether the request contains the token: in its query, in its cookie, or as a bearer
    token.
    """
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = (request.query_params.get("token", ""), request.cookies.get("diloco_watch", ""), bearer)
    return any(hmac.compare_digest(each.encode(), token.encode()) for each in given)


def serve(
    views: Sequence[RunView],
    host: str,
    port: int,
    announce: Callable[[str], None],
    control: Control | None = None,
) -> None:
    """Serve the page until interrupted. `announce` gets the URL to open."""
    is_local = is_loopback(host)
    token = None if is_local and control is None else secrets.token_urlsafe(24)
    app = build_app(views, token, control, is_local=is_local)
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(MISSING.format(error.name)) from None
    # No access log, because it would contain the token.
    settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 2}
    with listen(host, port) as listener, suppress(KeyboardInterrupt):
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{port}/" + (f"?token={token}" if token else ""))
        uvicorn.Server(uvicorn.Config(app, **settings)).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections. Raises ConfigError if the address is in use or not
    this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        cause = error.strerror or str(error)
        raise ConfigError(
            f"--host, --port: cannot listen on {host}:{port}: {cause}; choose others"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
