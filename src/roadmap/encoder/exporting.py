"""A model as one ONNX file, compared with torch on real pictures before it is kept.

done = export(Encoder.open("runs/first"), "first.onnx", records)
Encoder.open("first.onnx").embed(["a.jpg"])     # the same vectors, without torch's own arithmetic
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roadmap.atomic import whole_file
from roadmap.config.settings import HardwareSettings
from roadmap.embeddings import Embeddings
from roadmap.encoder.encoder import Encoder, Pictures
from roadmap.encoder.onnx_model import INPUT, KEY, OUTPUT, OnnxFacts, OnnxModel
from roadmap.models import Retriever

CPU = torch.device("cpu")
OPSET = 17
LARGEST = 1e-3  # difference of a component from torch's in float32; rounding alone gives a thousandth of it
LEAST = 0.9  # cosine of an int8 vector with torch's, in the median: below, something is wrong, not rounded
CALIBRATION = 128  # pictures that the ranges of int8 activations are taken from
PERCENTILE = (
    99.99  # of the values lie in a range: by the very largest, most values of EfficientNet-Lite0 share few steps
)
# What is computed in int8 of a convolutional network. Pooling and the unit length stay in float32: they cost nothing,
# and all components of a vector would share 256 steps.
WHOLE = ["Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "MaxPool"]


@dataclass(frozen=True, eq=False)
class Exported:
    """What was written and how far it agrees with torch.

    Attributes:
        path: the file.
        torch, onnx: the vectors of the same pictures by both, to be evaluated.
        difference: the largest between two components.
        cosine: the lowest between two vectors of a picture.
    """

    path: Path
    torch: Embeddings
    onnx: Embeddings
    difference: float
    cosine: float


def export(encoder: Encoder, path: str | Path, pictures: Pictures, *, int8: bool = False) -> Exported:
    """Write the encoder's model to an ONNX file that takes any number of pictures at once, float32.

    Args:
        pictures: real ones, on which both are compared, and by which int8 is calibrated.
        int8: whole numbers of 8 bits: a quarter of the space, faster on many processors, and not quite the same
            vectors. Transformers keep activations in float32 between products; convolutions are calibrated.

    Raises:
        ValueError: the file's vectors are not those of torch; nothing is written then.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"{path} must end in .onnx, got {path.suffix or 'no ending'!r}")
    if not isinstance(encoder.model, Retriever):
        raise ValueError(f"{encoder.name} is an ONNX model already; export the model that it was made from")
    model = copy.deepcopy(encoder.model).to(CPU).float().eval()
    plain = dataclasses.replace(encoder, model=model, hardware=HardwareSettings(precision="32"), device=CPU, flip=False)
    with _network_inputs(model, CALIBRATION) as inputs:
        before = plain.embed(pictures, on_error="skip")
    facts = _facts(plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        graph = _graph(model, plain.crop.size)
        if int8:
            graph = _int8_graph(graph, torch.cat(inputs))
            own = hashlib.sha256(graph).hexdigest()
            facts = dataclasses.replace(facts, precision="int8", digest=own)
        _write(graph, facts, Path(temporary))
        after = dataclasses.replace(plain, model=OnnxModel(Path(temporary))).embed(pictures, on_error="skip")
        return _agreement(path, before, after, int8)


def _facts(encoder: Encoder) -> OnnxFacts:
    crop = encoder.crop
    return OnnxFacts(
        encoder.digest,
        encoder.name,
        encoder.model.settings.name,
        encoder.model.dim,
        "32",
        crop.size,
        crop.resize,
        encoder.side,
        crop.squeeze,
        crop.mean,
        crop.std,
    )


@contextlib.contextmanager
def _network_inputs(model: nn.Module, most: int) -> Iterator[list[Tensor]]:
    """The first `most` pictures that go into a model."""
    inputs: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        missing = most - sum(map(len, inputs))
        if missing > 0:
            inputs.append(given[0][:missing].detach().clone())

    hook = model.register_forward_pre_hook(keep)
    try:
        yield inputs
    finally:
        hook.remove()


def _graph(model: nn.Module, image: int) -> bytes:
    """The network as ONNX; the number of pictures is left open."""
    content = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the tracer: what it cannot see is compared on pictures
        torch.onnx.export(
            model,
            (torch.zeros(2, 3, image, image),),
            content,  # type: ignore[arg-type]
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_axes={INPUT: {0: "pictures"}, OUTPUT: {0: "pictures"}},
            opset_version=OPSET,
            dynamo=False,
        )
    return content.getvalue()


class _Reader:
    """Pictures for calibration, as ONNX Runtime asks for them: in batches, of which it wants a range at a time."""

    def __init__(self, images: Tensor) -> None:
        self._batches = [part.numpy() for part in torch.split(images, 16)]
        self._range = iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def set_range(self, start_index: int, end_index: int) -> None:
        self._range = iter(self._batches[start_index:end_index])

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        found = next(self._range, None)
        return None if found is None else {INPUT: found}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes that the quantiser writes to everybody's log, and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _int8_graph(graph: bytes, images: Tensor) -> bytes:
    quantisation: Any = importlib.import_module("onnxruntime.quantization")
    onnx: Any = importlib.import_module("onnx")
    with tempfile.TemporaryDirectory() as folder, _quiet():
        given, prepared, made = (Path(folder) / f"{name}.onnx" for name in ("given", "prepared", "made"))
        given.write_bytes(graph)
        shapes: Any = importlib.import_module("onnxruntime.quantization.shape_inference")
        shapes.quant_pre_process(str(given), str(prepared), skip_symbolic_shape=True)
        kinds = [node.op_type for node in onnx.load(str(prepared)).graph.node]
        if kinds.count("Conv") > kinds.count("MatMul") + kinds.count("Gemm"):
            quantisation.quantize_static(
                str(prepared),
                str(made),
                _Reader(images),
                quant_format=quantisation.QuantFormat.QDQ,
                op_types_to_quantize=WHOLE,
                calibrate_method=quantisation.CalibrationMethod.Percentile,
                # one batch at a time: it would hold what every layer made of all pictures
                extra_options={"CalibPercentile": PERCENTILE, "CalibStridedMinMax": 1},
                per_channel=True,
                activation_type=quantisation.QuantType.QUInt8,
                weight_type=quantisation.QuantType.QInt8,
            )
        else:
            quantisation.quantize_dynamic(
                str(prepared),
                str(made),
                op_types_to_quantize=["MatMul", "Gemm"],
                per_channel=True,
                weight_type=quantisation.QuantType.QInt8,
            )
        return made.read_bytes()


def _write(graph: bytes, facts: OnnxFacts, path: Path) -> None:
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load_model_from_string(graph)
    onnx.helper.set_model_props(model, {KEY: facts.text()})
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def _agreement(path: Path, before: Embeddings, after: Embeddings, int8: bool) -> Exported:
    cosines = (before.vectors * after.vectors).sum(1)
    difference = float((before.vectors - after.vectors).abs().max())
    if int8 and not float(cosines.median()) >= LEAST:
        raise ValueError(
            f"in int8 the vectors are no longer those of the model: half of {len(cosines):,} pictures have a cosine "
            f"below {float(cosines.median()):.3f} with them; export without int8"
        )
    if not int8 and not difference <= LARGEST:
        raise ValueError(
            f"the ONNX model gives other vectors than torch: they differ by up to {difference:.3g} on "
            f"{len(cosines):,} pictures, {LARGEST} is allowed; this network cannot be exported"
        )
    return Exported(path, before, after, difference, float(cosines.min()))
