"""NDCG, recall at k, SiMix and proxies transcribed as loops over Python floats, with gradients derived by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .literal import Mask, Matrix, Step, ValueAndGradient, flat, members, queries_with, sigmoid, step, zeros

# gain(rank, number of positives) of a positive, and its derivative by the rank
Gain = Callable[[float, int], float]


def loss_from_ranks(
    s: Matrix, P: Mask, N: Mask, h_pos: Step, dh_pos: Step, h_neg: Step, dh_neg: Step, gain: Gain, slope: Gain
) -> ValueAndGradient:
    """1 - the mean over queries of sum_k gain(rank(k)); rank(k) = 1 + h_pos over the other positives + h_neg over N."""
    gradient, counting, total = zeros(s), queries_with(P), 0.0
    for i in counting:
        positives, negatives = members(P[i]), members(N[i])
        value = 0.0
        for k in positives:
            rank = 1.0
            for j in positives:
                if j != k:
                    rank += h_pos(s[i][j] - s[i][k])
            for j in negatives:
                rank += h_neg(s[i][j] - s[i][k])
            value += gain(rank, len(positives))
            for j in positives + negatives:
                if j != k:
                    dh = dh_pos if j in positives else dh_neg
                    push = -slope(rank, len(positives)) * dh(s[i][j] - s[i][k]) / len(counting)
                    gradient[i][j] += push
                    gradient[i][k] -= push
        total += (1 - value) / len(counting)
    return total, gradient


def h_minus(tau: float, rho: float, delta: float | None) -> tuple[Step, Step]:
    """Eq. (4), the tie given to its second branch, and its derivative."""
    where = tau * math.log(0.99 / 0.01) if delta is None else delta

    def h(t: float) -> float:
        if t < 0:
            return sigmoid(t / tau)
        return sigmoid(t / tau) + 0.5 if t <= where else rho * (t - where) + sigmoid(where / tau) + 0.5

    def dh(t: float) -> float:
        return rho if t > where else sigmoid(t / tau) * sigmoid(-t / tau) / tau

    return h, dh


def discount(place: float) -> float:
    return 1 / math.log2(1 + place)


def ndcg_gain(rank: float, size: int) -> float:
    return discount(rank) / sum(discount(j) for j in range(1, size + 1))


def ndcg_slope(rank: float, size: int) -> float:
    """d (1 / log2(1 + r)) / dr = -log2(1 + r)^-2 / ((1 + r) ln 2)."""
    fall = -1 / (math.log2(1 + rank) ** 2 * (1 + rank) * math.log(2))
    return fall / sum(discount(j) for j in range(1, size + 1))


def exact_ndcg(s: Matrix, P: Mask, N: Mask) -> float:
    return 1 - loss_from_ranks(s, P, N, step, flat, step, flat, ndcg_gain, ndcg_slope)[0]


def supndcg(
    s: Matrix, P: Mask, N: Mask, tau: float = 0.01, rho: float = 100.0, delta: float | None = None
) -> ValueAndGradient:
    return loss_from_ranks(s, P, N, step, flat, *h_minus(tau, rho, delta), ndcg_gain, ndcg_slope)


def recall_gains(ks: Sequence[int], temperatures: Sequence[float], reachable: bool) -> tuple[Gain, Gain]:
    """sigmoid((K - r) / T) / |P| (or / min(K, |P|)), the mean over K; its derivative has -sigmoid' / T."""

    def gain(rank: float, size: int) -> float:
        total = 0.0
        for k, t in zip(ks, temperatures, strict=True):
            total += sigmoid((k - rank) / t) / (min(k, size) if reachable else size)
        return total / len(ks)

    def slope(rank: float, size: int) -> float:
        total = 0.0
        for k, t in zip(ks, temperatures, strict=True):
            near = sigmoid((k - rank) / t)
            total -= near * (1 - near) / t / (min(k, size) if reachable else size)
        return total / len(ks)

    return gain, slope


def recall_at_k(
    s: Matrix,
    P: Mask,
    N: Mask,
    ks: Sequence[int] = (1, 2, 4, 8, 16),
    tau: float = 0.01,
    temperatures: Sequence[float] | None = None,
    reachable: bool = False,
) -> ValueAndGradient:
    """Patel et al. 2022: every other item counts by sigmoid(t / tau), positive or negative."""

    def h(t: float) -> float:
        return sigmoid(t / tau)

    def dh(t: float) -> float:
        return sigmoid(t / tau) * sigmoid(-t / tau) / tau

    gains = recall_gains(ks, [1.0] * len(ks) if temperatures is None else temperatures, reachable)
    return loss_from_ranks(s, P, N, h, dh, h, dh, *gains)


def suprecall(s: Matrix, P: Mask, N: Mask) -> ValueAndGradient:
    """The recall of SupRank: step H+, H- of Eq. (4), divided by min(K, |P|)."""
    gains = recall_gains((1, 2, 4, 8, 16), [1.0] * 5, True)
    return loss_from_ranks(s, P, N, step, flat, *h_minus(0.01, 100.0, None), *gains)


def proxies(s: Matrix, classes: Sequence[int], temperature: float = 0.05) -> ValueAndGradient:
    """-mean log softmax(s / temperature) at the class of each row; d/ds_c = (p_c - [c is the class]) / temperature."""
    total, gradient = 0.0, zeros(s)
    for i, row in enumerate(s):
        top = max(row)
        powers = [math.exp((x - top) / temperature) for x in row]
        for c, power in enumerate(powers):
            share = power / sum(powers)
            gradient[i][c] = (share - (c == classes[i])) / temperature / len(s)
            if c == classes[i]:
                total -= math.log(share) / len(s)
    return total, gradient


def mixed_scores(
    queries: Matrix, gallery: Matrix, labels: list[int], item_labels: list[int], own: list[int], parts: Sequence[float]
) -> tuple[Matrix, Mask, Mask, list[int]]:
    """SiMix with vectors: unit vectors of every two queries of a class are mixed and not normalised again; then dot
    products of all. Returns scores, P (without the query itself), N, and where every query stands."""

    def unit(x: list[float]) -> list[float]:
        length = math.sqrt(sum(a * a for a in x))
        return [a / length for a in x]

    rows, columns = [unit(x) for x in queries], [unit(x) for x in gallery]
    row_labels, column_labels, places = list(labels), list(item_labels), list(own)
    pairs = [(x, z) for x in range(len(labels)) for z in range(x + 1, len(labels)) if labels[x] == labels[z]]
    for (x, z), a in zip(pairs, parts, strict=True):
        rows.append([a * p + (1 - a) * q for p, q in zip(rows[x], rows[z], strict=True)])
        row_labels.append(labels[x])
        places.append(-1)
        if own[x] >= 0 and own[z] >= 0:
            places[-1] = len(columns)
            columns.append([a * p + (1 - a) * q for p, q in zip(columns[own[x]], columns[own[z]], strict=True)])
            column_labels.append(labels[x])
    s = [[sum(p * q for p, q in zip(r, c, strict=True)) for c in columns] for r in rows]
    P = [
        [a == b and j != place for j, b in enumerate(column_labels)]
        for a, place in zip(row_labels, places, strict=True)
    ]
    N = [[a != b for b in column_labels] for a in row_labels]
    return s, P, N, places
