"""Routes that search: by uploaded pictures, by rows and vectors, by metadata; and the pictures of rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from anyio import to_thread
from fastapi import APIRouter, File, Form, Query, Response, UploadFile

from roadmap.data.pictures.images import Box
from roadmap.names import printable
from roadmap.search.listing import rows_where
from roadmap.search.manifest import check_origin
from roadmap.search.service.asking import PROBLEMS, Asked, OneIndex, boxes_of, where_of
from roadmap.search.service.core import take_up_changes
from roadmap.search.service.limits import Refusal, faults_of_the_request
from roadmap.search.service.pictures import box_within, edges, picture_file
from roadmap.search.service.schema import (
    Answer,
    Expected,
    Found,
    ListRequest,
    ListResponse,
    SearchRequest,
    SearchResponse,
    Took,
)
from roadmap.search.service.schema import Query as OneQuery
from roadmap.search.vectors import Floats, unit_queries

router = APIRouter(prefix="/api/indexes/{index}", responses=PROBLEMS, tags=["search"])
Rows = list[tuple[list[dict[str, Any]], list[float]]]


@router.post("/search/pictures", summary="Search by uploaded pictures, or by boxes on them")
async def search_by_pictures(
    asked: OneIndex,
    pictures: Annotated[list[UploadFile], File(description="One picture or several.", min_length=1)],
    boxes: Annotated[
        str | None, Form(description="JSON: for each picture [x, y, width, height] in upright pixels, or null.")
    ] = None,
    k: Annotated[int, Form(ge=1)] = 10,
    offset: Annotated[int, Form(ge=0)] = 0,
    where: Annotated[str | None, Form(description="JSON: a filter.")] = None,
    expect: Annotated[str | None, Form()] = None,
) -> SearchResponse:
    began = time.perf_counter()
    asked.charge(len(pictures))
    asked.check_page(k, offset)
    condition = where_of(where, asked.limits)
    cuts = [edges(box) for box in boxes_of(boxes, len(pictures), asked.limits)]
    with faults_of_the_request():
        asked.served.index.selection(condition)  # before the work of embedding
    with asked.service.places.take(len(pictures)):
        contents = [(await one.read(), cut) for one, cut in zip(pictures, cuts, strict=True)]
        vectors, decode, embed = await asked.service.pictures(asked.served, contents, asked.wait)
        page = SearchRequest(queries=[OneQuery()] * len(pictures), k=k, offset=offset, where=condition, expect=expect)
        return await _response(asked, vectors, page, Took(decode=decode, embed=embed), began)


@router.post("/search", summary="Search by rows of the index, parts of their pictures, or vectors")
async def search(asked: OneIndex, request: SearchRequest) -> SearchResponse:
    began = time.perf_counter()
    asked.charge(len(request.queries))
    asked.check_page(request.k, request.offset)
    if request.model is not None:
        _check_model(asked, request.model)
    with asked.service.places.take(len(request.queries)):
        vectors, took = await _vectors(asked, request.queries)
        return await _response(asked, vectors, request, took, began)


@router.post("/list", summary="Rows by their metadata, in the order they came")
async def list_rows(asked: OneIndex, request: ListRequest) -> ListResponse:
    asked.check_page(request.k, request.offset)
    with asked.service.places.take(1):
        rows, count = await to_thread.run_sync(_listed, asked, request.where, request.k, request.offset)
    found = [Found(id=row["id"], score=None, metadata=row) for row in rows]
    more = request.offset + len(found) < min(count, asked.limits.depth)
    return ListResponse(index=asked.served.name, count=count, results=found, more=more)


@router.get(
    "/picture",
    summary="The picture of a row, made small",
    response_class=Response,
    responses={200: {"content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def picture(
    asked: OneIndex,
    id: str,
    side: Annotated[int, Query(ge=16, description="Its longest side.")] = 320,
) -> Response:
    content, (width, height) = await asked.service.picture(asked.served, id, min(side, asked.limits.side), asked.wait)
    headers = {"cache-control": "private, max-age=300", "x-original-size": f"{width}x{height}"}
    return Response(content, media_type="image/jpeg", headers=headers)


def _listed(asked: Asked, where: Mapping[str, Any], k: int, offset: int) -> tuple[list[dict[str, Any]], int]:
    take_up_changes(asked.served)
    with faults_of_the_request():
        return rows_where(asked.served.index, where, k, offset)


def _check_model(asked: Asked, model: str) -> None:
    about = asked.served.index.manifest.about
    with faults_of_the_request():
        check_origin({"model": about.get("model")}, {"model": model}, "these vectors")


async def _vectors(asked: Asked, queries: list[OneQuery]) -> tuple[Floats, Took]:
    """The vectors of queries; those of rows are read, those of parts of pictures are computed together."""
    took = Took()
    found, files = await to_thread.run_sync(_known, asked, queries)
    if files:
        contents = list(files.values())
        vectors, took.decode, took.embed = await asked.service.pictures(asked.served, contents, asked.wait)
        found |= dict(zip(files, vectors, strict=True))
    return np.stack([found[place] for place in range(len(queries))]), took


def _known(asked: Asked, queries: list[OneQuery]) -> tuple[dict[int, Floats], dict[int, tuple[Path, Box | None]]]:
    """By the place of the query: vectors that need no model, and files with a box for the others."""
    index, root = asked.served.index, asked.served.root
    found: dict[int, Floats] = {}
    files: dict[int, tuple[Path, Box | None]] = {}
    for place, query in enumerate(queries):
        if (query.id is None) == (query.vector is None) or (query.box is not None and query.id is None):
            raise Refusal(422, f"queries[{place}]: give an id, an id and a box, or a vector")
        with faults_of_the_request():
            if query.vector is not None:
                found[place] = unit_queries(np.asarray(query.vector, np.float64), index.manifest.dim)[0]
            elif query.box is None:
                found[place] = index.vectors_of([query.id or ""])[0]
            else:
                path, part = picture_file(index, query.id or "", root)
                files[place] = path, box_within(part, edges(query.box))
    return found, files


async def _response(asked: Asked, vectors: Floats, page: SearchRequest, took: Took, began: float) -> SearchResponse:
    k, offset = page.k, page.offset
    rows, took.search = await asked.service.answers(asked.served, vectors, k + 1, offset, page.where, asked.wait)
    expected = await _expected(asked, vectors, page)
    answers = []
    for (found, scores), where_it_stands in zip(rows, expected, strict=True):
        results = [Found(id=row["id"], score=score, metadata=row) for row, score in zip(found, scores, strict=True)]
        more = len(results) > k and offset + k < asked.limits.depth
        answers.append(Answer(results=results[:k], more=more, expected=where_it_stands))
    took.total = 1e3 * (time.perf_counter() - began)
    return SearchResponse(index=asked.served.name, answers=answers, took=took)


async def _expected(asked: Asked, vectors: Floats, page: SearchRequest) -> list[Expected | None]:
    index, id = asked.served.index, page.expect
    if not id:
        return [None] * len(vectors)
    if id not in await to_thread.run_sync(index.storage.rows.slots_of, [id]):
        count = await to_thread.run_sync(len, index)
        return [Expected(id=printable(id), rank=None, score=None, among=count, passes=False)] * len(vectors)
    found: list[Expected | None] = []
    for vector in vectors:
        with faults_of_the_request():
            rank = await to_thread.run_sync(index.rank_of, vector, id, page.where)
        found.append(Expected(id=id, **vars(rank)))
    return found
