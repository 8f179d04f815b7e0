"""Some queries of a run and what it finds for them, as a picture for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roadmap.data import Records, picture_key
from roadmap.engine.job import Job
from roadmap.engine.pictures import Pictures
from roadmap.evaluation import Evaluation

QUERIES, ANSWERS = 8, 7
TILE = 96  # pixels that a side has, at least; less than twice as many
FRAME, GAP = 3, 2
GREY, GREEN, RED = (160, 160, 160), (40, 160, 60), (200, 40, 40)


def show_retrievals(job: Job, tests: Mapping[str, Evaluation]) -> None:
    """A picture for each test set, where TensorBoard is there to show it."""
    if not job.run.board.is_there():
        return
    for records in job.splits.tests:
        image = retrieval_image(job.pictures, records, tests[records.name])
        if image is not None:
            job.run.board.add_picture(f"retrievals/{records.name}", job.state.step, image)


def retrieval_image(pictures: Pictures, records: Records, evaluation: Evaluation) -> NDArray[np.uint8] | None:
    """(H, W, 3): a row for each of some queries, from the first to the last; what is found is framed green or red.

    None where pictures cannot be told by their names, or can no longer be read.
    """
    if evaluation.ids is None or evaluation.gallery_ids is None or not evaluation.neighbours.shape[1]:
        return None
    rows = np.unique(np.linspace(0, len(evaluation.ids) - 1, QUERIES).round().astype(np.int64))
    found = evaluation.neighbours[torch.from_numpy(rows), :ANSWERS].cpu().numpy()
    names = [evaluation.ids[row] for row in rows] + [evaluation.gallery_ids[place] for place in found.ravel()]
    place = {picture_key(records, i): i for i in range(len(records))}
    crops = pictures.centres(records.select([place[name] for name in names]))
    if len(crops) != len(names):
        return None
    labels = evaluation.labels.cpu().numpy()[rows]
    others = evaluation.gallery_labels.cpu().numpy()[found]
    lines = []
    for i, row in enumerate(found):
        answers = crops[len(rows) + i * len(row) :][: len(row)]
        right = [GREY if labels[i] < 0 else GREEN if label == labels[i] else RED for label in others[i]]
        tiles = [_tile(crops[i], GREY), *map(_tile, answers, right)]
        lines.append(np.concatenate([tile for tile, there in zip(tiles, [True, *(row >= 0)], strict=True) if there], 1))
    widest = max(line.shape[1] for line in lines)
    image: NDArray[np.uint8] = np.concatenate(
        [np.pad(line, ((0, 0), (0, widest - line.shape[1]), (0, 0))) for line in lines]
    )
    return image


def _tile(crop: Tensor, colour: tuple[int, int, int]) -> NDArray[np.uint8]:
    """A picture (3, S, S) in 0..1 as (S', S', 3) with a frame of the colour."""
    every = max(1, crop.shape[1] // TILE)  # a thumbnail will do, and is written in no time
    inside = (crop[:, ::every, ::every].permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    side = inside.shape[0] + 2 * FRAME + GAP
    tile = np.full((side, side, 3), 255, dtype=np.uint8)
    tile[: side - GAP, : side - GAP] = colour
    tile[FRAME : FRAME + inside.shape[0], FRAME : FRAME + inside.shape[1]] = inside
    return tile
