"""What the losses refuse, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roadmap.losses import (
    ROADMAP,
    BlackBoxAP,
    Calibration,
    FastAP,
    HordeContrastive,
    RecallAtK,
    SmoothAP,
    SoftBinAP,
    SupAP,
    SupNDCG,
    SupRank,
    TripletSCT,
    average_precision,
    blackboxap,
    calibration,
    fastap,
    recall_at_k,
    saturation_point,
    smoothap,
    softbinap,
    supap,
    supndcg,
    suprank,
    triplet_sct,
)


def two_classes() -> SupRank:
    return SupRank(2, 3)


def suprank_of_scores(scores: Any, positives: Any, negatives: Any) -> torch.Tensor:
    return suprank(scores, positives, negatives, torch.rand(2, 4), torch.tensor([0, 3]))


LOSSES = [ROADMAP, SupAP, Calibration, SmoothAP, FastAP, SoftBinAP, BlackBoxAP]
LOSSES += [SupNDCG, RecallAtK, TripletSCT, HordeContrastive, two_classes]
FUNCTIONS = [supap, smoothap, calibration, fastap, softbinap, blackboxap, average_precision]
FUNCTIONS += [supndcg, recall_at_k, triplet_sct, suprank_of_scores]

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 0, 1, 1])
ZERO = X * torch.tensor([1, 1, 0, 0])[:, None]
NAN = X.clone().index_fill_(0, torch.tensor(1), torch.nan)
INF = X.clone().index_fill_(0, torch.tensor(3), torch.inf)
G, GY = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 0, 1, 2])

BAD_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a list": (([[1.0]], Y), {}, TypeError, "embeddings must be a torch.Tensor, got list"),
    "1-D": ((X[0], Y), {}, ValueError, r"embeddings must have shape \(items, dimensions\), got \(3,\)"),
    "3-D": ((X[None], Y), {}, ValueError, r"got \(1, 4, 3\)"),
    "integers": ((X.long(), Y), {}, TypeError, r"embeddings must be floating point .*got torch.int64"),
    "complex": ((X.to(torch.complex64), Y), {}, TypeError, "must be floating point"),
    "no dimensions": ((X[:, :0], Y), {}, ValueError, r"embeddings has no dimensions: its shape is \(4, 0\)"),
    "label list": ((X, [0, 0, 1, 1]), {}, TypeError, "labels must be a torch.Tensor of integers, got list"),
    "label column": ((X, Y[:, None]), {}, ValueError, r"labels must be 1-D.*got shape \(4, 1\); use labels.flatten"),
    "one-hot labels": ((X, torch.eye(4)), {}, ValueError, r"labels must be 1-D.*labels.argmax\(1\)"),
    "float labels": ((X, Y.float()), {}, TypeError, r"labels must hold integers.*got torch.float32; use labels.long"),
    "bool labels": ((X, Y.bool()), {}, TypeError, "labels must hold integers.*got torch.bool"),
    "too few labels": ((X, Y[:3]), {}, ValueError, "labels has 3 entries but embeddings has 4 rows"),
    "labels elsewhere": ((X, Y.to("meta")), {}, ValueError, "labels is on meta but embeddings is on cpu"),
    "zero vectors": ((ZERO, Y), {}, ValueError, r"embeddings\[2\] is a zero vector.*\(2 of 4 rows"),
    "NaN": ((NAN, Y), {}, ValueError, r"embeddings\[1\] holds NaN or infinity \(1 of 4 rows"),
    "infinity": ((INF, Y), {}, ValueError, r"embeddings\[3\] holds NaN or infinity"),
    "overflow": ((torch.full((4, 3), 3e38), Y), {}, ValueError, r"embeddings\[0\] has a norm that overflows"),
    "too short": ((torch.full((4, 3), 1e-41), Y), {}, ValueError, r"embeddings\[0\] is so short that its gradient"),
    "gallery without labels": ((X, Y), {"ref_emb": G}, ValueError, "ref_emb was given without ref_labels"),
    "labels without gallery": ((X, Y), {"ref_labels": GY}, ValueError, "ref_labels was given without ref_emb"),
    "gallery of another model": (
        (X, Y),
        {"ref_emb": G[:, :2], "ref_labels": GY},
        ValueError,
        "embeddings have 3 dimensions but ref_emb has 2; both must come from the same model",
    ),
    "gallery 1-D": ((X, Y), {"ref_emb": G[0], "ref_labels": GY}, ValueError, "ref_emb must have shape"),
    "gallery of integers": ((X, Y), {"ref_emb": G.long(), "ref_labels": GY}, TypeError, "ref_emb must be floating"),
    "gallery elsewhere": (
        (X, Y),
        {"ref_emb": G.to("meta"), "ref_labels": GY.to("meta")},
        ValueError,
        "ref_emb is on meta but embeddings are on cpu",
    ),
    "gallery zero vector": ((X, Y), {"ref_emb": ZERO, "ref_labels": Y}, ValueError, r"ref_emb\[2\] is a zero vector"),
    "gallery label count": ((X, Y), {"ref_emb": G, "ref_labels": Y}, ValueError, "ref_labels has 4 entries"),
    "gallery label column": ((X, Y), {"ref_emb": G, "ref_labels": GY[:, None]}, ValueError, "ref_labels must be 1-D"),
    "unlike pairs": ((X, Y, (Y, Y, Y[:1])), {}, ValueError, r"pairs \(4,\) anchors with \(1,\) items; each has one"),
    "a query that is not there": ((X, Y, (Y + 3, Y, Y)), {}, ValueError, "names query 4, but they are 0 to 3"),
    "an item from the end": ((X, Y, (Y, Y, Y - 1)), {}, ValueError, "names gallery item -1, but they are 0 to 3"),
    "two index tensors": ((X, Y, (Y, Y)), {}, ValueError, "indices_tuple must be triplets.*got 2 tensors"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(loss: Callable[[], torch.nn.Module], name: str) -> None:
    args, kwargs, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        loss()(*args, **kwargs)


S = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
P = torch.tensor([[True, False, False], [False, True, False]])
BAD_SCORES: dict[str, tuple[tuple[Any, Any, Any], type[Exception], str]] = {
    "a list": (([[0.5]], P, ~P), TypeError, "scores must be a torch.Tensor, got list"),
    "1-D": (
        (S[0], P[0], ~P[0]),
        ValueError,
        r"scores must have shape \(queries, gallery\), got \(3,\); use scores\[None",
    ),
    "integers": ((S.long(), P, ~P), TypeError, "scores must be floating point, got torch.int64"),
    "mask of integers": ((S, P.long(), ~P), TypeError, "positives must be a bool mask, got torch.int64"),
    "mask is a list": ((S, P, [[True]]), TypeError, "negatives must be a bool mask, got list"),
    "mask of another shape": ((S, P, ~P[:1]), ValueError, r"negatives has shape \(1, 3\) but scores has \(2, 3\)"),
    "mask elsewhere": ((S, P.to("meta"), ~P), ValueError, "positives is on meta but scores is on cpu"),
    "overlapping masks": ((S, P, torch.ones_like(P)), ValueError, "an item is both in positives and in negatives"),
    "NaN": ((S * torch.nan, P, ~P), ValueError, r"scores\[0, 0\] is nan; scores must be finite"),
}


@pytest.mark.parametrize("loss", FUNCTIONS)
@pytest.mark.parametrize("name", BAD_SCORES)
def test_bad_scores(loss: Callable[..., torch.Tensor], name: str) -> None:
    args, error, message = BAD_SCORES[name]
    with pytest.raises(error, match=message):
        loss(*args)


BAD_SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    *[(loss, {"tau": 0}, ValueError, "tau must be > 0, got 0") for loss in (ROADMAP, SupAP, SmoothAP)],
    *[(loss, {"tau": -0.01}, ValueError, "tau must be > 0, got -0.01") for loss in (ROADMAP, SupAP, SmoothAP)],
    (SupAP, {"tau": float("nan")}, ValueError, "tau must be finite, got nan"),
    (SupAP, {"tau": "0.01"}, TypeError, "tau must be a number, got str '0.01'"),
    (SupAP, {"tau": True}, TypeError, "tau must be a number, got bool True"),
    (SupAP, {"rho": -1}, ValueError, "rho must be >= 0, got -1"),
    (ROADMAP, {"rho": float("inf")}, ValueError, "rho must be finite, got inf"),
    (SupAP, {"delta": -0.1}, ValueError, "delta must be >= 0, got -0.1"),
    (SupAP, {"include_self": 1}, TypeError, "include_self must be True or False, got int 1"),
    (FastAP, {"include_self": None}, TypeError, "include_self must be True or False, got NoneType None"),
    (saturation_point, {"tau": 0.01, "epsilon": 0.5}, ValueError, "epsilon must be < 0.5"),
    (saturation_point, {"tau": 0.01, "epsilon": 0}, ValueError, "epsilon must be > 0"),
    (ROADMAP, {"lam": 1.1}, ValueError, r"lam must be <= 1: the loss is \(1 - lam\) SupAP \+ lam calibration, got 1.1"),
    (ROADMAP, {"lam": -0.1}, ValueError, "lam must be >= 0, got -0.1"),
    *[
        (loss, {"alpha": 0.6, "beta": 0.9}, ValueError, "beta must be < alpha .*got alpha=0.6, beta=0.9")
        for loss in (ROADMAP, Calibration)
    ],
    (Calibration, {"alpha": 0.6, "beta": 0.6}, ValueError, "beta must be < alpha"),
    (Calibration, {"alpha": 1.5}, ValueError, r"cosine scores in \[-1, 1\], got alpha=1.5"),
    (Calibration, {"beta": -1.5}, ValueError, r"cosine scores in \[-1, 1\]"),
    (Calibration, {"average": "mean"}, ValueError, "average must be 'violating' or 'all', got 'mean'"),
    (FastAP, {"bins": 0}, ValueError, "bins must be >= 1, got 0"),
    (FastAP, {"bins": 10.0}, TypeError, "bins must be an int, got float 10.0"),
    (SoftBinAP, {"bins": 1}, ValueError, "bins must be >= 2, got 1"),
    (BlackBoxAP, {"lam": 0}, ValueError, "lam must be > 0, got 0"),
    (BlackBoxAP, {"margin": -0.1}, ValueError, "margin must be >= 0, got -0.1"),
    (BlackBoxAP, {"perturbation": "gauss"}, ValueError, "perturbation must be 'fixed' or 'random', got 'gauss'"),
]


@pytest.mark.parametrize(
    ("made", "settings", "error", "message"), BAD_SETTINGS, ids=[f"{b[0].__name__} {b[1]}" for b in BAD_SETTINGS]
)
def test_bad_settings(made: Callable[..., Any], settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**settings)


BAD_FUNCTION_SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (supap, {"tau": 0}, "tau must be > 0"),
    (supap, {"rho": -1}, "rho must be >= 0"),
    (supap, {"delta": -1}, "delta must be >= 0"),
    (smoothap, {"tau": -1}, "tau must be > 0"),
    (calibration, {"alpha": 0.5}, "beta must be < alpha"),
    (calibration, {"average": "none"}, "average must be 'violating' or 'all'"),
    (fastap, {"bins": 0}, "bins must be >= 1"),
    (softbinap, {"bins": 1}, "bins must be >= 2"),
    (blackboxap, {"lam": 0}, "lam must be > 0"),
    (blackboxap, {"margin": -1}, "margin must be >= 0"),
    (blackboxap, {"perturbation": None}, "perturbation must be 'fixed' or 'random', got None"),
    (average_precision, {"reduction": "sum"}, "reduction must be 'mean' or 'none', got 'sum'"),
]


@pytest.mark.parametrize(("loss", "settings", "message"), BAD_FUNCTION_SETTINGS)
def test_bad_settings_of_functions(loss: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(S, P, ~P, **settings)


@pytest.mark.parametrize("loss", LOSSES)
def test_settings_are_shown(loss: Callable[[], torch.nn.Module]) -> None:
    shown = repr(loss())
    assert any(f"{name}=" in shown for name in ("tau", "alpha", "bins", "lam", "margin"))
