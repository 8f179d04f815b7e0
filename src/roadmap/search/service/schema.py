"""What goes over the wire."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Where = Annotated[
    dict[str, Any],
    Field(description='Which rows may be found, such as {"label": "owl", "year": {">=": 2020}}; {} lets all pass.'),
]
Vector = Annotated[list[FiniteFloat], Field(min_length=1, max_length=65_536)]  # longer than any model's
Box = Annotated[
    list[FiniteFloat],
    Field(min_length=4, max_length=4, description="x, y, width, height in pixels of the upright picture."),
]


class Strict(BaseModel):
    """A misspelt field is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Query(Strict):
    """By a row that is in the index, by a part of its picture, or by a vector."""

    id: str | None = None
    box: Box | None = None
    vector: Vector | None = None


class SearchRequest(Strict):
    queries: list[Query] = Field(min_length=1)
    k: int = Field(default=10, ge=1, description="Results for each query.")
    offset: int = Field(default=0, ge=0, description="Results to leave out: the next page starts at offset + k.")
    where: Where = Field(default_factory=dict)
    expect: str | None = Field(default=None, description="An id: each answer says at which rank and score it stands.")
    model: str | None = Field(default=None, description="Digest of the vectors' model; another's are refused.")


class ListRequest(Strict):
    where: Where = Field(default_factory=dict)
    k: int = Field(default=10, ge=1)
    offset: int = Field(default=0, ge=0)


class RowsRequest(Strict):
    ids: list[str] = Field(min_length=1)
    vectors: list[Vector] = Field(min_length=1)
    model: str = Field(description="Digest of the model that made the vectors, as `about.model` of the index.")
    metadata: dict[str, list[Any]] = Field(
        default_factory=dict, description="Column -> one value for each row, `label` among them."
    )
    replace: bool = Field(default=False, description="Rows that are there get the new vector; else refused.")


class Found(BaseModel):
    id: str
    score: float | None = Field(description="Cosine with the query, at most 1; null in a list, which has no query.")
    metadata: dict[str, Any]


class Expected(BaseModel):
    id: str
    rank: int | None = Field(description="1 is first; exact, whatever the engine. Null: it is not in the index.")
    score: float | None
    among: int = Field(description="Rows that may be found.")
    passes: bool = Field(description="Whether the filter lets it pass; else the rank is the one it would have.")


class Answer(BaseModel):
    results: list[Found]
    more: bool = Field(description="Whether another page follows.")
    expected: Expected | None = None


class Took(BaseModel):
    """Milliseconds; of a query that waited for others, the waiting is in `total` alone."""

    decode: float = 0.0
    embed: float = 0.0
    search: float = 0.0
    total: float = 0.0


class SearchResponse(BaseModel):
    index: str
    answers: list[Answer]
    took: Took


class ListResponse(BaseModel):
    index: str
    count: int = Field(description="Rows that pass the filter.")
    results: list[Found]
    more: bool


class Changed(BaseModel):
    changed: int = Field(description="Rows that were added or removed.")
    vectors: int = Field(description="Rows that the index holds now.")


class IndexFacts(BaseModel):
    name: str
    vectors: int
    dim: int
    engine: str
    columns: dict[str, str] = Field(description="Column -> text, integer, real or boolean.")
    labels: list[str] = Field(description="Labels that may be filtered by; empty where there are very many.")
    model: str | None = Field(description="Digest of the model that made the vectors.")
    model_name: str | None
    pictures: bool = Field(description="Whether pictures can be searched by: a model is loaded.")
    shown: bool = Field(description="Whether the pictures of the rows can be shown.")
    writable: bool


class ServiceFacts(BaseModel):
    indexes: list[IndexFacts]
    limits: dict[str, int | float]


class State(BaseModel):
    status: str


class Problem(BaseModel):
    """Every error, in words."""

    error: str
