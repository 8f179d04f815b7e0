"""The losses transcribed from their papers: Python floats and loops over queries i, positives k and items j.

Slow and plain on purpose. Every function takes scores s[i][j] and masks P[i][j], N[i][j] as lists and returns the
value and the gradient dL/ds[i][j], derived by hand beside the formula it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Matrix = list[list[float]]
Mask = list[list[bool]]
ValueAndGradient = tuple[float, Matrix]
Step = Callable[[float], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def zeros(s: Matrix) -> Matrix:
    return [[0.0] * len(row) for row in s]


def members(mask_row: list[bool]) -> list[int]:
    return [j for j, inside in enumerate(mask_row) if inside]


def queries_with(mask: Mask) -> list[int]:
    return [i for i, row in enumerate(mask) if any(row)]


# --- who is compared with whom


def masks(labels: list[int], gallery_labels: list[int] | None, include_self: bool) -> tuple[Mask, Mask]:
    """P and N. Without a gallery every item queries the batch, and is one of its own positives or left out."""
    in_batch = gallery_labels is None
    gallery = labels if gallery_labels is None else gallery_labels
    P = [[a == b for b in gallery] for a in labels]
    N = [[a != b for b in gallery] for a in labels]
    if in_batch and not include_self:
        for i in range(len(labels)):
            P[i][i] = False
    return P, N


def cosines(queries: Matrix, gallery: Matrix) -> Matrix:
    s = []
    for x in queries:
        row = []
        for y in gallery:
            dot = sum(a * b for a, b in zip(x, y, strict=True))
            row.append(dot / math.sqrt(sum(a * a for a in x)) / math.sqrt(sum(b * b for b in y)))
        s.append(row)
    return s


def gradient_of_cosines(ds: Matrix, queries: Matrix, gallery: Matrix) -> tuple[Matrix, Matrix]:
    """dL/dqueries and dL/dgallery from dL/ds: d cos(x, y) / dx = (y/|y| - cos(x, y) x/|x|) / |x|."""
    s = cosines(queries, gallery)
    dq, dg = zeros(queries), zeros(gallery)
    for i, x in enumerate(queries):
        for j, y in enumerate(gallery):
            nx, ny = math.sqrt(sum(a * a for a in x)), math.sqrt(sum(b * b for b in y))
            for d in range(len(x)):
                dq[i][d] += ds[i][j] * (y[d] / ny - s[i][j] * x[d] / nx) / nx
                dg[j][d] += ds[i][j] * (x[d] / nx - s[i][j] * y[d] / ny) / ny
    return dq, dg


# --- ranks: Eqs. (1), (3), (4), (5) and SmoothAP


def ap_loss_from_ranks(
    s: Matrix, P: Mask, N: Mask, h_pos: Step, dh_pos: Step, h_neg: Step, dh_neg: Step
) -> ValueAndGradient:
    """1 - mean AP with rank+(k) = 1 + sum_{j in P, j != k} h_pos(s_j - s_k), rank-(k) = sum_{j in N} h_neg(...).

    precision(k) = rank+ / rank with rank = rank+ + rank-, so d precision = (rank- d rank+ - rank+ d rank-) / rank^2.
    """
    gradient = zeros(s)
    counting = queries_with(P)
    total = 0.0
    for i in counting:
        positives, negatives = members(P[i]), members(N[i])
        for k in positives:
            rank_pos = 1.0
            rank_neg = 0.0
            for j in positives:
                if j != k:
                    rank_pos += h_pos(s[i][j] - s[i][k])
            for j in negatives:
                rank_neg += h_neg(s[i][j] - s[i][k])
            rank = rank_pos + rank_neg
            weight = 1 / (len(positives) * len(counting))
            total += weight * (1 - rank_pos / rank)
            for j in positives:
                if j != k:
                    slope = -weight * rank_neg / rank**2 * dh_pos(s[i][j] - s[i][k])
                    gradient[i][j] += slope
                    gradient[i][k] -= slope
            for j in negatives:
                slope = weight * rank_pos / rank**2 * dh_neg(s[i][j] - s[i][k])
                gradient[i][j] += slope
                gradient[i][k] -= slope
    return total, gradient


def step(t: float) -> float:
    """H of Eq. (3), H(0) = 1."""
    return 1.0 if t >= 0 else 0.0


def flat(t: float) -> float:
    return 0.0


def exact(s: Matrix, P: Mask, N: Mask) -> ValueAndGradient:
    """1 - AP, Eqs. (1) and (3)."""
    return ap_loss_from_ranks(s, P, N, step, flat, step, flat)


def smoothap(s: Matrix, P: Mask, N: Mask, tau: float = 0.01) -> ValueAndGradient:
    def h(t: float) -> float:
        return sigmoid(t / tau)

    def dh(t: float) -> float:
        return sigmoid(t / tau) * sigmoid(-t / tau) / tau

    return ap_loss_from_ranks(s, P, N, h, dh, h, dh)


def supap(
    s: Matrix,
    P: Mask,
    N: Mask,
    tau: float = 0.01,
    rho: float = 100.0,
    delta: float | None = None,
    start: float = 0.5,
    offset: float | None = None,
) -> ValueAndGradient:
    """Eq. (5) with H- of Eq. (4), the tie given to its second branch; delta where the sigmoid is 0.99 unless said.

    The released code has constants of its own for what is added from t = 0 on, and where the linear part begins.
    """
    where = tau * math.log(0.99 / 0.01) if delta is None else delta
    linear_from = sigmoid(where / tau) + start if offset is None else offset

    def h_minus(t: float) -> float:
        if t < 0:
            return sigmoid(t / tau)
        if t <= where:
            return sigmoid(t / tau) + start
        return rho * (t - where) + linear_from

    def dh_minus(t: float) -> float:
        return rho if t > where else sigmoid(t / tau) * sigmoid(-t / tau) / tau

    return ap_loss_from_ranks(s, P, N, step, flat, h_minus, dh_minus)


# --- calibration, Eq. (7), and ROADMAP, Eq. (2)


def calibration_printed(s: Matrix, P: Mask, N: Mask, alpha: float = 0.9, beta: float = 0.6) -> ValueAndGradient:
    """Eq. (7) as printed: each query averages over its pairs; each term over the queries that have such pairs."""
    total, gradient = 0.0, zeros(s)
    for mask, sign, threshold in ((P, -1, alpha), (N, +1, beta)):
        counting = queries_with(mask)
        for i in counting:
            for j in members(mask[i]):
                weight = 1 / (len(counting) * len(members(mask[i])))
                violation = sign * (s[i][j] - threshold)
                if violation > 0:
                    total += weight * violation
                    gradient[i][j] += weight * sign
    return total, gradient


def calibration_violating(s: Matrix, P: Mask, N: Mask, alpha: float = 0.9, beta: float = 0.6) -> ValueAndGradient:
    """Mean over the positives below alpha plus mean over the negatives above beta, in the whole batch."""
    total, gradient = 0.0, zeros(s)
    low = [(i, j) for i, row in enumerate(P) for j in members(row) if s[i][j] < alpha]
    high = [(i, j) for i, row in enumerate(N) for j in members(row) if s[i][j] > beta]
    for i, j in low:
        total += (alpha - s[i][j]) / len(low)
        gradient[i][j] -= 1 / len(low)
    for i, j in high:
        total += (s[i][j] - beta) / len(high)
        gradient[i][j] += 1 / len(high)
    return total, gradient


def weighted_sum(a: float, first: ValueAndGradient, b: float, second: ValueAndGradient) -> ValueAndGradient:
    gradient = [[a * x + b * y for x, y in zip(r, t, strict=True)] for r, t in zip(first[1], second[1], strict=True)]
    return a * first[0] + b * second[0], gradient


# --- histograms: FastAP and SoftBinAP


def fastap(s: Matrix, P: Mask, N: Mask, bins: int = 10) -> ValueAndGradient:
    """Cakir et al. 2019: z = |x - y|^2 = 2 - 2s in [0, 4], nodes l * 4/L for l = 0..L, triangular soft assignment.

    FastAP = 1/N+ sum_l h+_l H+_l / H_l, with H the cumulated histograms (Eq. 10 there).
    """
    width = 4 / bins
    total, gradient = 0.0, zeros(s)
    counting = queries_with(P)
    for i in counting:
        positives, listed = members(P[i]), members(P[i]) + members(N[i])
        z = {j: 2 - 2 * s[i][j] for j in listed}
        nodes = [width * node for node in range(bins + 1)]
        h = [sum(max(0.0, 1 - abs(z[j] - c) / width) for j in listed) for c in nodes]
        h_pos = [sum(max(0.0, 1 - abs(z[j] - c) / width) for j in positives) for c in nodes]
        H = [sum(h[: node + 1]) for node in range(bins + 1)]
        H_pos = [sum(h_pos[: node + 1]) for node in range(bins + 1)]
        ap = sum(h_pos[node] * H_pos[node] / H[node] for node in range(bins + 1) if H[node] > 0) / len(positives)
        total += (1 - ap) / len(counting)
        for j in listed:
            # dz/ds = -2; inside the triangle d weight / dz is -1/width right of the node, +1/width left of it.
            dh = [0.0 if abs(z[j] - c) >= width else (-2 * (-1 if z[j] > c else 1) / width) for c in nodes]
            dh_pos = dh if j in positives else [0.0] * len(nodes)
            dap = 0.0
            for node in range(bins + 1):
                if H[node] > 0:
                    dap += dh_pos[node] * H_pos[node] / H[node]
                    dap += h_pos[node] * sum(dh_pos[: node + 1]) / H[node]
                    dap -= h_pos[node] * H_pos[node] * sum(dh[: node + 1]) / H[node] ** 2
            gradient[i][j] -= dap / (len(positives) * len(counting))
    return total, gradient


def softbinap(s: Matrix, P: Mask, N: Mask, bins: int = 20) -> ValueAndGradient:
    """Revaud et al. 2019: bins b_m = 1 - (m-1) D, D = 2/(M-1), soft assignment max(1 - |s - b_m|/D, 0).

    AP_Q = sum_m precision_m * (increment of recall)_m (Eqs. 5-8 there).
    """
    D = 2 / (bins - 1)
    total, gradient = 0.0, zeros(s)
    counting = queries_with(P)
    for i in counting:
        positives, listed = members(P[i]), members(P[i]) + members(N[i])
        centres = [1 - (m - 1) * D for m in range(1, bins + 1)]

        def soft(x: float, b: float) -> float:
            return max(1 - abs(x - b) / D, 0.0)

        def slope(x: float, b: float) -> float:
            return 0.0 if abs(x - b) >= D else (-1 / D if x > b else 1 / D)

        ap = 0.0
        dap = dict.fromkeys(listed, 0.0)
        for m, b in enumerate(centres):
            above = centres[: m + 1]
            retrieved = sum(soft(s[i][j], c) for j in listed for c in above)
            correct = sum(soft(s[i][j], c) for j in positives for c in above)
            recall_increment = sum(soft(s[i][j], b) for j in positives) / len(positives)
            if retrieved == 0:
                continue
            precision = correct / retrieved
            ap += precision * recall_increment
            for j in listed:
                d_retrieved = sum(slope(s[i][j], c) for c in above)
                d_correct = d_retrieved if j in positives else 0.0
                d_increment = slope(s[i][j], b) / len(positives) if j in positives else 0.0
                dap[j] += (d_correct - precision * d_retrieved) / retrieved * recall_increment
                dap[j] += precision * d_increment
        total += (1 - ap) / len(counting)
        for j in listed:
            gradient[i][j] -= dap[j] / len(counting)
    return total, gradient


# --- blackbox ranks


def blackboxap(s: Matrix, P: Mask, N: Mask, lam: float = 4.0, margin: float = 0.02) -> ValueAndGradient:
    """Rolinek et al. 2020: rk+_k / rk_k, ranks divided by the list's length n, scores moved by the margin.

    dL/ds = (rk(s + lam dL/drk) - rk(s)) / lam, with rk+ held constant (Vlastelica et al. 2020, Algorithm 1).
    """
    total, gradient = 0.0, zeros(s)
    counting = queries_with(P)
    for i in counting:
        positives, listed = members(P[i]), members(P[i]) + members(N[i])
        n = len(listed)
        moved = {j: s[i][j] - margin / 2 if j in positives else s[i][j] + margin / 2 for j in listed}

        def ranks(x: dict[int, float], n: int = n) -> dict[int, float]:
            return {k: sum(1 for j in x if x[j] >= x[k]) / n for k in x}

        rank = ranks(moved)
        rank_pos = ranks({k: moved[k] for k in positives})
        total += (1 - sum(rank_pos[k] / rank[k] for k in positives) / len(positives)) / len(counting)
        d_rank = dict.fromkeys(listed, 0.0)
        for k in positives:
            d_rank[k] = rank_pos[k] / rank[k] ** 2 / len(positives) / len(counting)
        again = ranks({j: moved[j] + lam * d_rank[j] for j in listed})
        for j in listed:
            gradient[i][j] = (again[j] - rank[j]) / lam
    return total, gradient
