"""A small world to serve: drawn pictures of three colours, an encoder that sees colour, and real sockets."""

from __future__ import annotations

import io
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from roadmap.embeddings import Embeddings
from roadmap.search import Index
from roadmap.search.service import Limits

from ...waiting import PATIENCE

ABOUT = {"model": "c" * 64, "name": "colours", "crop": {"image": 8}, "precision": "32"}
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (30, 60, 220)}
EACH = 8


class ColourEncoder:
    """The mean colours of a 4 x 4 grid: an encoder whose answers a person can foresee."""

    side = 64

    def __init__(self, name: str = "colours") -> None:
        self.about = {**ABOUT, "name": name}
        self.batches: list[int] = []

    def embed(self, pictures: Sequence[Image.Image]) -> Embeddings:
        self.batches.append(len(pictures))
        grids = [np.asarray(one.convert("RGB").resize((4, 4), Image.Resampling.BOX), np.float32) for one in pictures]
        vectors = torch.from_numpy(np.stack(grids).reshape(len(grids), -1) / 255 - 0.5)
        return Embeddings(torch.nn.functional.normalize(vectors), torch.full((len(grids),), -1), about=self.about)

    def description(self) -> Mapping[str, Any]:
        return self.about


def drawn(colour: tuple[int, int, int], seed: int = 0, size: tuple[int, int] = (48, 40)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-25, 26, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(colour) + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def halves() -> Image.Image:
    """Blue on the left, red on the right, 80 x 40."""
    both = Image.new("RGB", (80, 40), COLOURS["blue"])
    both.paste(COLOURS["red"], (40, 0, 80, 40))
    return both


def make_index(folder: Path, pictures: Path, encoder: ColourEncoder | None = None, engine: str = "exact") -> Index:
    """24 pictures below `pictures`, indexed with the column `year`."""
    encoder = encoder or ColourEncoder()
    names, images, labels = [], [], []
    for number, (label, colour) in enumerate(COLOURS.items()):
        (pictures / label).mkdir(parents=True, exist_ok=True)
        for i in range(EACH):
            name = f"{label}/{i}.png"
            images.append(drawn(colour, 10 * number + i))
            images[-1].save(pictures / name)
            names.append(name)
            labels.append(number)
    vectors = encoder.embed(images).vectors
    about = {**encoder.about, "root": str(pictures)}
    index = Index.create(folder, about, vectors.shape[1], engine=engine, columns={"year": "integer"})
    rows = Embeddings(vectors, torch.tensor(labels), tuple(names), tuple(COLOURS), about)
    index.add(rows, {"year": [2000 + i % EACH for i in range(len(names))]})
    index.build()
    return index


def patient(**limits: Any) -> Limits:
    """Limits, in which no answer is too late."""
    return Limits(**{"seconds": PATIENCE, **limits})


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def rest_of(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes; it must."""
    found = b""
    while part := connection.recv(65_536):
        found += part
    return found


def conversation(address: str, sent: bytes) -> bytes:
    """Bytes to a real socket, and everything that comes back."""
    with connected(address) as connection:
        connection.sendall(sent)
        return rest_of(connection)
