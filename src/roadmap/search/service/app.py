"""The application: routes, the gate before them, errors in words, the page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from roadmap import __version__
from roadmap.names import printable
from roadmap.search.index import Index
from roadmap.search.manifest import check_origin
from roadmap.search.service import changing, searching
from roadmap.search.service.asking import PROBLEMS, service_of
from roadmap.search.service.core import Embedder, Served, Service, labels_of
from roadmap.search.service.gate import Gate, Rates
from roadmap.search.service.limits import Limits, Refusal
from roadmap.search.service.metrics import Metrics
from roadmap.search.service.schema import IndexFacts, ServiceFacts, State
from roadmap.search.vectors import DamagedError

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/api.js": ("api.js", "text/javascript; charset=utf-8"),
    "/query.js": ("query.js", "text/javascript; charset=utf-8"),
    "/results.js": ("results.js", "text/javascript; charset=utf-8"),
    "/filters.js": ("filters.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
OPEN = (*PAGE, "/health", "/ready")  # answered without a key
MOST_LABELS = 2_000  # that the page offers to filter by

PARSING = "There was an error parsing the body"  # the framework's words
UNREADABLE = "the body of the request cannot be read: it is not the JSON or the form that its header says it is"
# where the framework's own words say nothing to a person
NO_OBJECT = "must be a JSON object"
NO_JSON = f"the body of the request {NO_OBJECT}, with the header content-type: application/json"
NO_FILE = "must be a file, not text; with curl -F NAME=@FILE"
NOTHING = "there is nothing at this path; /api/openapi.json has all that can be asked"
NOT_THIS_WAY = "this path is not asked in this way, but with {}"

general = APIRouter()


def application(
    indexes: Index | Mapping[str, Index],
    encoder: Embedder | Mapping[str, Embedder | None] | None = None,
    limits: Limits | None = None,
    *,
    pictures: Path | str | Mapping[str, Path | str | None] | None = None,
    key: str | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The service as an ASGI application, for `serve` or for any other server.

    Args:
        indexes: one, or several by the names they are served under. They are closed with the application.
        encoder: of the model that made the vectors, for all indexes or by their names; anything with `embed` and
            `description`. None: the index is searched by rows, vectors and metadata alone.
        limits: see `Limits`.
        pictures: the folder that ids are relative to, for all or by name; None for what the index says.
        key: that requests must bring as `Authorization: Bearer KEY`; None for none.
        hosts: names that the service goes by; None for any.

    Raises:
        ValueError: an encoder is not of the model that made the vectors, or the key cannot be sent by every client.
    """
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError("the key must be of letters, digits and signs of ASCII, with no blank at its ends")
    named = {indexes.folder.name or "index": indexes} if isinstance(indexes, Index) else dict(indexes)
    served = [_served(name, index, _one(encoder, name), _one(pictures, name)) for name, index in named.items()]
    limits, metrics = limits or Limits(), Metrics()
    rates = Rates(limits.rate, limits.burst)
    service = Service(served, limits, metrics)

    @asynccontextmanager
    async def lifespan(running: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(service.warm)
        tasks = [asyncio.create_task(work()) for work in running.state.background]
        yield
        for task in tasks:
            task.cancel()
        service.close()

    app = FastAPI(
        title="roadmap search",
        version=__version__,
        description='Nearest pictures by a trained model. Errors are `{"error": ...}`, in words.',
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.state.service, app.state.rates, app.state.metrics = service, rates, metrics
    app.state.background = []  # what a server does beside answering
    app.add_middleware(Gate, limits=limits, metrics=metrics, rates=rates, key=key, hosts=hosts, open_paths=OPEN)
    for router in (general, searching.router, changing.router):
        app.include_router(router)
    _add_page(app)
    _add_errors(app)
    return app


@general.get("/health", summary="The process answers", tags=["state"])
async def health() -> State:
    return State(status="ok")


@general.get("/ready", summary="Queries are taken", tags=["state"], responses={503: PROBLEMS[503]})
async def ready(request: Request) -> State:
    service = service_of(request)
    with service.places.take(1):  # full: told to come back, as a query would be
        return State(status="ready")


@general.get("/metrics", summary="For Prometheus", tags=["state"], response_class=Response, responses=PROBLEMS)
def metrics(request: Request) -> Response:
    found: Metrics = request.app.state.metrics
    return Response(found.text(), media_type=found.type)


@general.get("/api/indexes", summary="What is served, and within which limits", tags=["state"], responses=PROBLEMS)
def indexes(request: Request) -> ServiceFacts:
    service = service_of(request)
    return ServiceFacts(indexes=[_facts(one) for one in service.served.values()], limits=vars(service.limits))


def _facts(served: Served) -> IndexFacts:
    index, about = served.index, served.index.manifest.about
    labels = labels_of(served)
    return IndexFacts(
        name=served.name,
        vectors=len(index),
        dim=index.manifest.dim,
        engine=index.manifest.engine,
        columns=dict(index.manifest.columns),
        labels=labels if len(labels) <= MOST_LABELS else [],
        model=about.get("model"),
        model_name=about.get("name"),
        pictures=served.encoder is not None,
        shown=served.root is not None,
        writable=index.storage.writable,
    )


def _one(what: Any, name: str) -> Any:
    return what.get(name) if isinstance(what, Mapping) else what


def _served(name: str, index: Index, encoder: Embedder | None, pictures: Path | str | None) -> Served:
    if encoder is not None:
        check_origin(index.manifest.about, encoder.description(), f"queries to {name} by this encoder")
    root = pictures if pictures is not None else index.manifest.about.get("root")
    return Served(name, index, encoder, None if root is None else Path(root))


def _add_page(app: FastAPI) -> None:
    """The files of the page, read once; a request names one of them or nothing."""
    folder = files("roadmap.search.service") / "page"

    def route(path: str, content: bytes, media_type: str) -> None:
        async def answer() -> Response:
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

        app.add_api_route(path, answer, include_in_schema=False, methods=["GET"])

    for path, (name, media_type) in PAGE.items():
        route(path, (folder / name).read_bytes(), media_type)


def _add_errors(app: FastAPI) -> None:
    async def refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return _problem(error.status, error.reason, error.retry)

    async def framework(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        own = {
            (400, PARSING): UNREADABLE,
            (404, "Not Found"): NOTHING,
            (405, "Method Not Allowed"): NOT_THIS_WAY.format((error.headers or {}).get("Allow", "another method")),
        }
        said = own.get((error.status_code, error.detail), str(error.detail))
        return _problem(error.status_code, said, headers=error.headers)

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _problem(422, _words(error.errors()))

    async def unreadable(_: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("the index cannot be read: %s", error)
        return _problem(503, "the index cannot be read at the moment; the service's log says why", retry=10)

    app.add_exception_handler(Refusal, refusal)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, invalid)
    for kind in (DamagedError, TimeoutError):
        app.add_exception_handler(kind, unreadable)


def _problem(
    status: int, reason: str, retry: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    more = dict(headers or {}) | ({} if retry is None else {"retry-after": str(retry)})
    if status in (408, 413):
        more["connection"] = "close"  # the rest of the request is not read
    return JSONResponse({"error": printable(reason)}, status, headers=more)  # a stranger's text need not be valid


def _words(errors: Sequence[Any]) -> str:
    """What was wrong with a request, without repeating it."""
    said = []
    for one in errors[:5]:
        place = ".".join(str(part) for part in one["loc"] if part not in ("body", "query", "path"))
        detail = f" ({one['ctx']['error']})" if one["type"] == "json_invalid" else ""
        if "UploadFile" in one["msg"]:
            said.append(f"{place} {NO_FILE}")
        elif one["type"] == "model_attributes_type":
            said.append(f"{place} {NO_OBJECT}" if place else NO_JSON)
        else:
            said.append(f"{place}: {one['msg']}{detail}" if place else f"{one['msg']}{detail}")
    return "; ".join(said)
