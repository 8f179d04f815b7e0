"""A loss of the first d dimensions for several d at once: vectors can then be cut (Kusupati et al., NeurIPS 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from torch import Tensor, nn

from roadmap.losses.arguments import check_count, check_number
from roadmap.losses.comparison import Comparison
from roadmap.losses.distributed import Distributed, against_memory, takes_own, takes_paths
from roadmap.losses.metric_learning import check_instance, check_module
from roadmap.losses.terms import Terms


class Matryoshka(nn.Module):
    """sum_d w_d loss(first d dimensions), called as the loss itself is. The loss normalises each prefix apart.

    Args:
        loss: any loss without weights of a given embedding size; or, for those that have such (proxies), a function
            that makes the loss of d dimensions: `lambda d: proxy_nca(num_classes=100, embedding_size=d)`.
        dims: the d, each once; embeddings have at least as many dimensions as the largest.
        weights: w_d, 1 for each unless told.

    Wrappers go around it: `Memory(Distributed(Matryoshka(ROADMAP(), [64, 128])), 60_000)` gathers and holds the whole
    vectors once. A loss that is sums over queries stays one: each process computes the rows of its own queries.

    >>> import torch
    >>> from roadmap.losses import ROADMAP
    >>> loss = Matryoshka(ROADMAP(), dims=[4, 8, 16])
    >>> loss(torch.randn(8, 16, requires_grad=True), torch.arange(8) // 2).backward()
    """

    def __init__(
        self,
        loss: nn.Module | Callable[[int], nn.Module],
        dims: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_instance("loss", loss)
        self.dims, self.weights = _checked_dims(dims, weights)
        made = [loss] if isinstance(loss, nn.Module) else [loss(d) for d in self.dims]
        for one in made:
            check_module("loss", one)
            _check_inside(one)
        sizes = [getattr(one, "embedding_size", None) for one in made]
        if isinstance(loss, nn.Module) and sizes[0] is not None:
            raise ValueError(
                f"{type(loss).__name__} has weights for embeddings of {sizes[0]} dimensions, and each of {dims} needs "
                "its own; give a function that makes the loss of d dimensions: Matryoshka(lambda d: ..., dims)"
            )
        if any(size not in (None, d) for size, d in zip(sizes, self.dims, strict=False)):
            raise ValueError(f"the losses were made for embeddings of {sizes} dimensions, but dims are {self.dims}")
        self.losses = nn.ModuleList(made)  # one for all, or one for each
        self.embedding_size: int | None = None if sizes[0] is None else max(self.dims)

    def extra_repr(self) -> str:
        return f"dims={self.dims}, weights={self.weights}"

    @property
    def takes_paths(self) -> bool:
        """Whether the loss compares by a tree of labels."""
        return takes_paths(self.losses[0])

    @property
    def takes_own(self) -> bool:
        """Whether the loss can tell a query from its own place in a gallery."""
        return takes_own(self.losses[0])

    @property
    def whole_batch(self) -> bool:
        """Whether the loss makes something of any two queries, so that no process can do with its own rows."""
        return any(getattr(loss, "whole_batch", False) for loss in self.losses)

    @property
    def against_memory(self) -> nn.Module:
        """What a memory compares with earlier batches: without what the loss adds for the batch alone."""
        parts = [against_memory(loss) for loss in self.losses]
        if all(part is loss for part, loss in zip(parts, self.losses, strict=True)):
            return self
        of_size = dict(zip(self.dims, parts, strict=False))
        return Matryoshka(parts[0] if len(parts) == 1 else of_size.__getitem__, self.dims, self.weights)

    def _each(self) -> Iterator[tuple[int, float, nn.Module]]:
        losses = self.losses if len(self.losses) == len(self.dims) else repeat(self.losses[0])
        return zip(self.dims, self.weights, losses, strict=False)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Sequence[Tensor] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        self._check_width("embeddings", embeddings)
        if ref_emb is not None:
            self._check_width("ref_emb", ref_emb)
        places = {} if own is None else {"own": own}
        values = []
        for d, weight, loss in self._each():
            gallery = None if ref_emb is None else _prefix(ref_emb, d)
            values.append(weight * loss(_prefix(embeddings, d), labels, indices_tuple, gallery, ref_labels, **places))
        total: Tensor = sum(values[1:], start=values[0])
        return total

    def _check_width(self, name: str, x: Tensor) -> None:
        if isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] < max(self.dims):
            raise ValueError(
                f"{name} have {x.shape[1]} dimensions, fewer than the {max(self.dims)} of dims={self.dims}"
            )

    @property
    def terms(self) -> Callable[[Comparison], Terms]:
        """The terms of every prefix, one after the other; there are none where the loss has none."""
        if not all(hasattr(loss, "terms") for loss in self.losses):
            raise AttributeError(f"{type(self.losses[0]).__name__} is no sum over queries")
        return self._terms

    def _terms(self, c: Comparison) -> Terms:
        self._check_width("embeddings", c.embeddings)
        parts = []
        for d, _, loss in self._each():
            gallery = None if c.ref_emb is None else _prefix(c.ref_emb, d)
            prefix = dataclasses.replace(c, embeddings=_prefix(c.embeddings, d), ref_emb=gallery)
            parts.append(loss.terms(prefix))  # type: ignore[operator]
        return Terms.concatenation(*parts)

    def value(self, terms: Terms) -> Tensor:
        """The loss that `terms` come to; they may be sums over several comparisons."""
        width = len(terms.counts) // len(self.dims)
        values = []
        for i, (_, weight, loss) in enumerate(self._each()):
            here = slice(i * width, (i + 1) * width)
            values.append(weight * loss.value(Terms(terms.sums[here], terms.counts[here])))  # type: ignore[operator]
        total: Tensor = sum(values[1:], start=values[0])
        return total


def _prefix(x: Tensor, d: int) -> Tensor:
    """The first d dimensions. What is no matrix at all is left to the checks of the loss."""
    return x[:, :d].contiguous() if isinstance(x, Tensor) and x.ndim == 2 else x


def _checked_dims(dims: Sequence[int], weights: Sequence[float] | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
    wanted = tuple(dims)
    for d in wanted:
        check_count("dims", d, at_least=1)
    if not wanted or len(set(wanted)) != len(wanted):
        raise ValueError(f"dims must be one or more different numbers, got {list(wanted)}")
    given = (1.0,) * len(wanted) if weights is None else tuple(weights)
    if len(given) != len(wanted):
        raise ValueError(f"there are {len(wanted)} dims but {len(given)} weights; give one for each")
    for weight in given:
        check_number("weights", weight, at_least=0)
    return wanted, tuple(float(weight) for weight in given)


def _check_inside(loss: nn.Module) -> None:
    if isinstance(loss, Matryoshka):
        raise ValueError("the loss is a Matryoshka already; give all dims to one")
    if isinstance(loss, Distributed) or getattr(loss, "goes_outside", False):
        name = type(loss).__name__
        raise ValueError(f"a {name} goes around, to handle the whole vectors once: write {name}(Matryoshka(...), ...)")
