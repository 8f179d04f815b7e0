"""What the paper's numbers say of each other: the errata of docs/maths.md that follow from published.csv."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy.stats import t

from roadmap.experiments.published import Number, lines_of, numbers

PAGE = (Path(__file__).parents[2] / "docs" / "maths.md").read_text(encoding="utf-8")


def value(table: str, row: str, dataset: str, metric: str = "mAP@R", **about: object) -> str:
    """The one number that is printed there."""
    (found,) = {
        number.value
        for number in numbers()
        if (number.table, number.row, number.dataset, number.metric) == (table, row, dataset, metric)
        and all(getattr(number, name) == wanted for name, wanted in about.items())
    }
    return found


def increase(dataset: str, batch: int) -> float:
    """Of mAP@R from SupAP to ROADMAP, in percent, by Tables 3 and 6."""
    table = "3" if batch == 64 else "6"
    supap, roadmap = (float(value(table, row, dataset, batch_size=batch)) for row in ("supap", "roadmap"))
    return 100 * (roadmap - supap) / supap


def printed(dataset: str, batch: int) -> float:
    return float(value("fig5", "roadmap", dataset, "increase of mAP@R in %", batch_size=batch))


@pytest.mark.parametrize(
    ("dataset", "batch", "figure", "tables"),
    [("cub", 384, 2.0, 0.4), ("cub", 224, 2.3, 1.5), ("sop", 32, 2.4, 1.5), ("inaturalist", 384, 3.2, 2.2)],
)
def test_fig_5_does_not_follow_from_the_tables(dataset: str, batch: int, figure: float, tables: float) -> None:
    assert (printed(dataset, batch), round(increase(dataset, batch), 1)) == (figure, tables)


def follows(dataset: str, batch: int) -> bool:
    """Whether some numbers that round to the printed ones have this increase."""
    table = "3" if batch == 64 else "6"
    supap, roadmap = (value(table, row, dataset, batch_size=batch) for row in ("supap", "roadmap"))
    half = [0.5 * 10 ** -len(text.partition(".")[2]) for text in (supap, roadmap)]
    least = 100 * ((float(roadmap) - half[1]) / (float(supap) + half[0]) - 1)
    most = 100 * ((float(roadmap) + half[1]) / (float(supap) - half[0]) - 1)
    return least - 0.05 <= printed(dataset, batch) <= most + 0.05


def test_where_fig_5_follows_from_the_tables() -> None:
    every = [(dataset, batch) for dataset in ("cub", "sop", "inaturalist") for batch in (32, 64, 128, 224, 384)]
    assert [place for place in every if follows(*place)] == [("cub", 64), ("sop", 64), ("sop", 384)]
    assert "Of the 15 bars of Fig. 5 only CUB at 64 and SOP at 64 and 384 can follow" in PAGE


def test_fig_4_shows_supap_at_another_rho() -> None:
    assert value("fig4a", "roadmap lam=0.0", "inaturalist") == value("fig4c", "supap", "inaturalist") == "26.13"
    assert value("fig4b", "supap rho=1.0", "inaturalist") == "26.13"
    assert value("fig4b", "supap rho=100", "inaturalist") == "26.32"  # the rho of everything else, as in Table 6
    assert value("6", "supap", "inaturalist", batch_size=224) == "26.32"


def test_fig_13_shows_tau_at_another_rho() -> None:
    assert value("fig13a", "supap tau=0.01", "sop") == value("fig13b", "supap rho=1.0", "sop") == "55.28"
    assert value("fig13b", "supap rho=100", "sop") == value("6", "supap", "sop", batch_size=128) == "55.65"


def test_cub_with_deit_has_two_values_at_batch_128() -> None:
    five, seven = (float(value(table, "roadmap", "cub", backbone="deit", batch_size=128)) for table in ("5", "7"))
    assert (five, seven) == (36.30, 35.76)
    (number,) = [n for n in numbers() if (n.table, n.value) == ("5", "36.30")]
    assert (five - seven) / float(number.spread) > 6  # standard deviations


def test_table_4_cuts_what_table_8_rounds() -> None:
    for dataset, cut, whole in (("sop", "83.1", "83.19"), ("inaturalist", "69.1", "69.19")):
        assert value("4", "roadmap", dataset, "R@1", backbone="resnet50") == cut
        assert value("8", "roadmap", dataset, "R@1", backbone="resnet50") == whole


def test_table_4_has_softbin_at_batch_64() -> None:
    assert value("4", "softbinap", "cub", "R@1") == value("1", "softbinap", "cub", "R@1") == "61.2"


def test_table_3_has_eight_tenths_where_the_text_has_nine() -> None:
    smoothap, supap = (float(value("3", row, "cub", "R@1")) for row in ("smoothap", "supap"))
    assert supap - smoothap == pytest.approx(0.8)


def test_smoothap_on_inaturalist_has_two_values() -> None:
    assert [value(table, "smoothap", "inaturalist", "R@1") for table in "13"] == ["59.8", "59.7"]


def test_xbm_takes_two_days_not_three() -> None:
    assert round(float(value("2", "XBM", "inaturalist", "minutes per epoch")) * 90 / 60) == 51


def test_table_4_has_a_recall_below_that_of_smoothap() -> None:
    found = [value("4", row, "sop", "R@100", backbone="resnet50") for row in ("roadmap", "smoothap")]
    assert found == ["96.3", "96.6"]


def test_fig_4a_is_half_as_high_at_the_end_of_its_stable_range() -> None:
    last, printed_supap = (float(value("fig4a", f"roadmap lam={lam}", "inaturalist")) for lam in (0.8, 0.0))
    supap = float(value("6", "supap", "inaturalist", batch_size=224))
    assert (round(last - printed_supap, 1), round(last - supap, 1)) == (0.8, 0.6)


def test_fig_4b_begins_below_smoothap() -> None:
    least = [float(value("fig4b", f"supap rho={rho}", "inaturalist")) for rho in (0.03, 0.1)]
    assert least == [26.00, 26.02]
    assert max(least) < float(value("6", "smoothap", "inaturalist", batch_size=224)) == 26.08


def test_table_5_has_less_on_inaturalist_than_the_text() -> None:
    for metric, gain in (("mAP@R", 2.7), ("R@1", 3.7)):
        every = {n.row: float(n.value) for n in numbers() if (n.table, n.dataset, n.backbone, n.metric)
                 == ("5", "inaturalist", "resnet50", metric)}  # fmt: skip
        ours = every.pop("roadmap")
        assert max(every, key=lambda row: every[row]) == "smoothap"
        assert round(ours - every["smoothap"], 1) == gain


def test_supap_gains_less_than_the_text_says() -> None:
    printed_there = {
        (n.dataset, n.backbone, n.batch_size, n.metric, n.row): float(n.value) for n in numbers() if n.table in "67"
    }
    gains = {key[:4]: printed_there[(*key[:4], "supap")] - x for key, x in printed_there.items() if "smoothap" in key}
    assert round(gains.pop(least := min(gains, key=lambda key: gains[key])), 2) == 0.09
    assert least == ("cub", "deit", 224, "R@1")
    on_inaturalist = {key: gain for key, gain in gains.items() if key[0] == "inaturalist"}
    assert min(on_inaturalist, key=lambda key: gains[key]) == ("inaturalist", "resnet50", 224, "mAP@R")
    assert round(min(on_inaturalist.values()), 2) == 0.24


def test_fig_13b_is_best_at_a_thousand() -> None:
    every = {n.row: n.value for n in numbers() if n.table == "fig13b"}
    assert max(every, key=lambda row: float(every[row])) == "supap rho=1000"
    assert (every["supap rho=1000"], every["supap rho=10000"]) == ("55.84", "55.66")


def test_what_the_p_values_of_table_5_ask_of_its_runs() -> None:
    five = {(n.dataset, n.backbone, n.metric, n.row): n for n in numbers() if n.table == "5"}
    asked = {}
    for (*place, row), other in five.items():
        if row == "roadmap":
            continue
        ours = five[(*place, "roadmap")]
        a, b = float(ours.spread), float(other.spread)
        most = (float(ours.value) - float(other.value)) * 5**0.5 / t.isf(0.0005, 4)  # spread of the differences
        asked[(*place, row)] = (a**2 + b**2 - most**2) / (2 * a * b)
    needed = {key: round(correlation, 2) for key, correlation in asked.items() if correlation > 0}
    place = ("cub", "resnet50", "R@1")
    assert needed == {(*place, "smoothap"): 0.65, (*place, "blackboxap"): 0.15}


def test_how_many_runs_a_number_is_of() -> None:
    def runs(source: str) -> int:
        return Number("1", "x", "cub", "resnet50", None, "R@1", "1", "", source).runs

    assert (runs("trained for the paper"), runs("trained for the paper, five runs"), runs("a; 4 seeds")) == (1, 5, 4)
    assert {number.runs for number in numbers() if number.table == "5"} == {5}
    assert {number.runs for number in numbers() if number.spread} == {4, 5}


def test_figures_are_told_with_a_recipe() -> None:
    shown = lines_of(["Published: sop resnet50, fig13b"])
    assert "Fig. 13b, batch 128: supap rho=100  mAP@R 55.65  (trained for the paper)" in shown
