"""The figures of the documentation: each script draws, and the numbers on them are those of the losses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from roadmap.losses import smoothap, supap

pytest.importorskip("matplotlib")
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DRAWN = [
    "architecture",
    "bench_losses",
    "delta_choice",
    "juxtaposed_batches",
    "rank_functions",
    "speed",
    "toy_gradients",
]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"figure_{name}", FIGURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*DRAWN, "scale", "scale_dark", "speed_dark"])
def test_draws_and_its_picture_is_committed(name: str, tmp_path: Path) -> None:
    from matplotlib import pyplot as plt

    if name.startswith("scale") and not list(RESULTS.glob("scale_*_cuda.csv")):
        pytest.skip("benchmarks/bench_scale.py was not run on a GPU")
    with plt.rc_context():
        dark = name.removesuffix("_dark")
        figure = script(dark).figure(dark=True) if dark != name else script(name).figure()
        for copy in ("first.svg", "second.svg"):
            figure.savefig(tmp_path / copy, metadata={"Date": None})
        plt.close(figure)
    drawn = (tmp_path / "first.svg").read_bytes()
    assert drawn == (tmp_path / "second.svg").read_bytes()  # no date, no random name: a redrawn figure is no change
    # Letters are drawn as shapes and named in comments: the same words stand on the committed picture.
    words = re.findall(rb"<!-- (.*?) -->", drawn)
    assert len(words) > 10
    assert words == re.findall(rb"<!-- (.*?) -->", (FIGURES / f"{name}.svg").read_bytes()), (
        f"docs/figures/{name}.svg is not what {name}.py draws; run: make figures"
    )


def test_the_table_of_speed_is_what_was_measured() -> None:
    page = (FIGURES.parent / "speed.md").read_text(encoding="utf-8")
    assert script("speed").table() in page
    assert script("speed").start_table() in page


def test_pictures_of_the_documentation_exist() -> None:
    pages = [FIGURES.parents[1] / "README.md", FIGURES.parent / "maths.md"]
    linked = [page.parent / path for page in pages for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())]
    assert len(linked) >= 5
    assert [path for path in linked if not path.is_file()] == []


def test_the_tables_of_scale_are_those_that_were_measured() -> None:
    if not list(RESULTS.glob("scale_*_cuda.csv")):
        pytest.skip("benchmarks/bench_scale.py was not run on a GPU")
    module = script("scale")
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), "run: python docs/figures/scale.py"


def test_a_tenth_is_passed_between_two_that_were_measured() -> None:
    module = script("scale")
    rows = [{"gpus": gpus, "between_share": share} for gpus, share in (("1", "0"), ("8", "0.05"), ("32", "0.15"))]
    assert module.crossing(rows, "between") == "about 20 GPUs"
    assert module.crossing(rows[:2], "between") == "more than 8"
    assert module.crossing(rows[2:], "between") == "32 GPUs"


def test_toy_gradients_are_those_of_the_losses() -> None:
    module = script("toy_gradients")
    for panel, loss in (("SmoothAP", smoothap), ("SupAP", supap)):
        scores = torch.tensor([module.SCORES], dtype=torch.float64, requires_grad=True)
        value = loss(scores, module.POSITIVES, ~module.POSITIVES)
        (gradient,) = torch.autograd.grad(value, scores)
        assert module.loss_and_gradient(panel)[0] == pytest.approx(value.item())
        assert module.loss_and_gradient(panel)[1] == pytest.approx(gradient[0].tolist())
    assert module.exact_loss() == pytest.approx(5 / 12)
    value, gradient = module.loss_and_gradient("SmoothAP with H⁺")
    assert value < module.exact_loss()
    assert max(map(abs, gradient)) < 1e-4


def test_juxtaposed_batches_are_perfect_alone_and_the_worst_case_together() -> None:
    module = script("juxtaposed_batches")
    apart, calibrated = module.SETTINGS.values()
    for batch in (*apart, *calibrated):
        assert module.ap(batch, module.POSITIVES) == 1
    assert module.gap(apart) == pytest.approx(1 - (1 + 1 + 3 / 5 + 4 / 6 + 5 / 9 + 6 / 10) / 6, abs=1e-6)  # Eq. (8)
    assert module.gap(calibrated) == 0
    assert all(module.calibration_loss(batch) > 0 for batch in apart)
    assert all(module.calibration_loss(batch) == 0 for batch in calibrated)


def test_push_of_the_delta_figure() -> None:
    module = script("delta_choice")
    t = torch.tensor([0.2], dtype=torch.float64)
    assert module.push(t, "SmoothAP").item() < 1e-6
    assert module.push(t, "SupAP").item() > 0.1
    assert module.slope(torch.tensor([module.DELTA], dtype=torch.float64)).item() == pytest.approx(0.99)
