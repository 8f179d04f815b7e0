"""A model in an ONNX file, as `export` writes it: what goes in, what it is of, and how pictures are cut for it."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roadmap.config.settings import ModelSettings, SettingError

KEY, FORMAT = "roadmap", 1
INPUT, OUTPUT = "images", "vectors"
CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class OnnxFacts:
    """What the file says of itself, beside its graph: plain JSON values.

    Attributes:
        digest: what tells its vectors from others'. In float32 that of the model it was made from, whose vectors they
            are; in int8 one of its own.
        name: of the model it was made from.
        architecture: of its network.
        dim: of its vectors.
        precision: "32" or "int8".
        image, resize, side, squeeze: how pictures are cut.
        mean, std: by which they are normalised.
    """

    digest: str
    name: str
    architecture: str
    dim: int
    precision: str
    image: int
    resize: int
    side: int
    squeeze: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def text(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)

    @classmethod
    def of_text(cls, text: str | None, path: Path) -> OnnxFacts:
        try:
            content = json.loads(text or "")
            if content.pop("format") != FORMAT:
                raise ValueError("written by another version of this program")
            (a, b, c), (d, e, f) = content.pop("mean"), content.pop("std")
            return cls(mean=(a, b, c), std=(d, e, f), **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not say how pictures are cut for it: it was not written by roadmap export ({error})"
            ) from error


class OnnxModel(nn.Module):
    """Images (B, 3, S, S) -> unit vectors (B, dim), through ONNX Runtime; has what a `Retriever` says of itself."""

    def __init__(self, path: Path, cuda: bool = False) -> None:
        super().__init__()
        self.session = session_of(path, cuda)
        texts = self.session.get_modelmeta().custom_metadata_map
        self.facts = OnnxFacts.of_text(texts.get(KEY), path)
        self.settings = ModelSettings(self.facts.architecture)
        self.image, self.dim = self.facts.image, self.facts.dim
        self.mean, self.std = self.facts.mean, self.facts.std

    def forward(self, images: Tensor) -> Tensor:
        (found,) = self.session.run([OUTPUT], {INPUT: images.detach().cpu().float().contiguous().numpy()})
        return torch.from_numpy(found).to(images.device)


def session_of(path: Path, cuda: bool = False) -> Any:
    """A file in ONNX Runtime, on as many threads as torch has.

    Raises:
        ImportError: it is not installed; says how to install it.
        ValueError: the file is no model.
    """
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(f"{path} needs onnxruntime: pip install 'roadmap-retrieval[export]'") from error
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    there = runtime.get_available_providers()
    if cuda and CUDA not in there:
        raise SettingError(
            "hardware.device", "hardware.device=cuda: this onnxruntime has no GPU; install onnxruntime-gpu, or use cpu"
        )
    try:
        return runtime.InferenceSession(
            str(path), options, providers=[*([CUDA] if cuda else []), "CPUExecutionProvider"]
        )
    except Exception as error:  # its own exceptions have no common kind
        raise ValueError(f"{path} could not be opened as an ONNX model: {str(error)[:200]}") from error
