"""Tables and figures as rows to run: each published number has one, and what stands in for something says so."""

from __future__ import annotations

import copy

import pytest

from roadmap.config.composition import check_loss, settings_from
from roadmap.config.settings import SettingError
from roadmap.experiments import definitions
from roadmap.experiments.definitions import NOT_HERE, Row, experiment, experiment_names
from roadmap.experiments.published import numbers

PAPER = [*(f"table{i}" for i in range(1, 11)), "fig4a", "fig4b", "fig4c", "fig5", "fig13a", "fig13b"]


def rows_of(name: str, dataset: str | None = None, backbone: str | None = None) -> list[Row]:
    return list(experiment(name, dataset, backbone).rows)


def test_every_published_number_belongs_to_one_row_of_one_experiment() -> None:
    assert set(PAPER) < set(experiment_names())
    told = [number for name in experiment_names() for row in rows_of(name) for number in row.numbers]
    assert len(told) == len(set(told))
    assert set(told) == {number for number in numbers() if number.table != "authors"}  # which are not the paper's


def test_every_method_of_the_paper_is_here() -> None:
    assert {row.name for name in PAPER for row in rows_of(name) if row.why_not} == set()


def test_what_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = copy.deepcopy(definitions._definitions())
    del found["table4"]["rows"]["MIC"]
    monkeypatch.setattr(definitions, "_definitions", lambda: found)
    assert {(row.name, row.why_not) for row in rows_of("table4") if row.why_not} == {("MIC", NOT_HERE)}


def kinds() -> dict[tuple[str, ...], Row]:
    """A row for every loss, and for every set of options that rows give it."""
    rows = [row for name in experiment_names() for row in rows_of(name) if not row.why_not]
    texts = {row: [text for text in row.overrides[1:] if not text.startswith("data.batch_size")] for row in rows}
    return {
        tuple(text if text.startswith("loss=") else text.partition("=")[0] for text in told): row
        for row, told in texts.items()
    }


@pytest.mark.parametrize("row", kinds().values(), ids=lambda row: row.key)
def test_the_settings_of_every_kind_of_row_are_understood(row: Row) -> None:
    settings = settings_from(row.overrides)
    check_loss(settings)
    assert f"loss={settings.loss['name']}" in row.overrides
    assert row.batch_size in (None, settings.data.batch_size)
    if "2048-d" in row.backbone:
        assert settings.model.dim == 2048


def test_rows_say_what_the_paper_says() -> None:
    keys = {row.name: row.key for row in rows_of("fig4a")}
    assert keys["roadmap lam=0.2"] == "inaturalist_resnet50,data.batch_size=224,loss=roadmap,loss.lam=0.2"
    alpha = settings_from(["loss=roadmap"]).loss["alpha"]
    for row in rows_of("fig4c"):
        if "alpha-beta" in row.name:
            beta = float(row.overrides[-1].removeprefix("loss.beta="))
            assert alpha - beta == pytest.approx(float(row.name.partition("=")[2]))
    assert all("loss.delta=0.05" in row.overrides for row in rows_of("fig13a"))
    assert rows_of("table8", "cub")[1].key == "cub_resnet50_table4,model.dim=2048,loss=roadmap"
    assert rows_of("table4", "cub", "deit")[0].overrides[1] == "data.batch_size=384"


def test_tables_share_the_runs_they_have_in_common() -> None:
    one, three, six = ({row.key for row in rows_of(name, "cub")} for name in ("table1", "table3", "table6"))
    assert "cub_resnet50,data.batch_size=64,loss=roadmap" in one & three
    assert {row.key for row in rows_of("fig5", "cub")} <= three | six
    assert {row.key for row in rows_of("table10", "cub")} <= six
    assert [row.name for row in rows_of("table10", "cub")] == ["supap", "roadmap"]


def test_what_stands_in_for_something_says_so() -> None:
    assert all(row.stand_in == "" for name in experiment_names() for row in rows_of(name))
    assert {row.stand_in for row in rows_of("table3", "glyphs")} == {
        "glyphs in place of cub, its small network in place of resnet50"
    }
    assert [row.key for row in rows_of("table3", "glyphs")] == [
        f"glyphs,data.batch_size=64,loss={loss}" for loss in ("smoothap", "supap", "roadmap")
    ]
    assert {row.stand_in for row in rows_of("fig4b", "cub")} == {"cub in place of inaturalist"}
    assert {row.key.partition(",")[0] for row in rows_of("fig4b", "cub")} == {"cub_resnet50"}
    swapped = rows_of("table5", "cub", "vits")
    assert {row.stand_in for row in swapped} == {"vits in place of resnet50"}
    assert len(swapped) == 5
    assert [number.table for row in swapped for number in row.numbers] == ["5"] * 10
    assert not any("model." in row.key for row in rows_of("table8", "glyphs"))


def test_rows_are_chosen_by_name() -> None:
    rows = experiment("table5", "cub", "resnet50_head", ["roadmap", "smoothap"]).rows
    assert [row.key for row in rows] == [
        f"cub_resnet50_head,data.batch_size=128,loss={loss}" for loss in ("smoothap", "roadmap")
    ]


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(SettingError, match="unknown experiment 'tabel3', did you mean 'table3'?"):
        experiment("tabel3")
