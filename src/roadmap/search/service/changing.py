"""Routes that change an index: rows with vectors, pictures, removal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from anyio import to_thread
from fastapi import APIRouter, File, Form, Query, UploadFile
from torch import Tensor

from roadmap.search.service.asking import PROBLEMS, Asked, OneIndex, parsed
from roadmap.search.service.limits import Refusal, faults_of_the_request
from roadmap.search.service.schema import Changed, RowsRequest

router = APIRouter(prefix="/api/indexes/{index}", responses=PROBLEMS, tags=["change"])


@dataclass(frozen=True)
class _Rows:
    """As `roadmap.embeddings.Embeddings`, of vectors that a client sent or the service made."""

    vectors: Tensor
    labels: Tensor
    ids: tuple[str, ...]
    about: dict[str, Any]
    class_names: tuple[str, ...] = ("",)  # labels come with the metadata, by name


@router.post("/rows", summary="Add rows with vectors")
async def add_rows(asked: OneIndex, request: RowsRequest) -> Changed:
    asked.check_writable()
    asked.charge(len(request.ids), "rows")
    if len(request.ids) != len(request.vectors):
        raise Refusal(422, f"{len(request.ids)} ids for {len(request.vectors)} vectors; each needs one")
    if len({len(vector) for vector in request.vectors}) != 1:
        raise Refusal(422, "vectors must all have the same number of dimensions")
    vectors = torch.tensor(request.vectors, dtype=torch.float64)
    about = dict(asked.served.index.manifest.about) | {"model": request.model}
    return await _add(asked, vectors, request.ids, about, request.metadata, request.replace)


@router.post("/pictures", summary="Add pictures: they are embedded; the files are not kept")
async def add_pictures(
    asked: OneIndex,
    pictures: Annotated[list[UploadFile], File(min_length=1)],
    ids: Annotated[str, Form(description="JSON: one id for each picture.")],
    metadata: Annotated[str | None, Form(description="JSON: column -> one value for each picture.")] = None,
    replace: Annotated[bool, Form()] = False,
) -> Changed:
    asked.check_writable()
    asked.charge(len(pictures), "pictures")
    names, columns = parsed(ids, "ids", asked.limits), parsed(metadata, "metadata", asked.limits) or {}
    if not isinstance(names, list) or len(names) != len(pictures) or not all(isinstance(n, str) for n in names):
        raise Refusal(422, f"ids must be a JSON list of {len(pictures)} texts, one for each picture")
    if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
        raise Refusal(422, 'metadata must be a JSON object such as {"label": ["owl", "tit"]}')
    with asked.service.places.take(len(pictures)):
        contents = [(await one.read(), None) for one in pictures]
        vectors, _, _ = await asked.service.pictures(asked.served, contents, asked.wait)
    about = dict(asked.served.index.manifest.about)
    return await _add(asked, torch.from_numpy(vectors), names, about, columns, replace)


@router.delete("/rows", summary="Remove rows")
async def remove_rows(
    asked: OneIndex,
    id: Annotated[list[str], Query(min_length=1, description="Once for each row.")],
    missing: Annotated[str, Query(pattern="^(raise|ignore)$", description="Ids that are not there.")] = "raise",
) -> Changed:
    asked.check_writable()
    asked.charge(len(id), "rows")
    index = asked.served.index
    with faults_of_the_request():
        removed = await to_thread.run_sync(lambda: index.remove(list(dict.fromkeys(id)), missing=missing))
    return Changed(changed=removed, vectors=await to_thread.run_sync(len, index))


async def _add(
    asked: Asked, vectors: Tensor, ids: list[str], about: dict[str, Any], metadata: dict[str, list[Any]], replace: bool
) -> Changed:
    index = asked.served.index
    labels = torch.full((len(ids),), -1)  # without a label, where the metadata gives none
    rows = _Rows(vectors, labels, tuple(ids), about)
    with faults_of_the_request():
        count = await to_thread.run_sync(lambda: index.add(rows, metadata, replace=replace))
    return Changed(changed=len(ids), vectors=count)
