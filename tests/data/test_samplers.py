"""Properties of the two samplers, on random classes and on the real lists of SOP."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roadmap.data.batches.samplers import CategoryPairs, MPerClass
from roadmap.data.datasets import dataset


@st.composite
def settings(draw):
    """Uneven classes with odd labels in random order, and a batch that they can fill."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=12))
    names = draw(st.permutations([7 * i + 10**12 for i in range(len(sizes))]))
    labels = np.repeat(names, sizes)
    labels = labels[np.random.Generator(np.random.PCG64(draw(st.integers(0, 99)))).permutation(len(labels))]
    per_class = draw(st.integers(1, 4))
    classes = draw(st.integers(1, len(sizes)))
    return labels, classes * per_class, per_class, draw(st.integers(1, 7)), draw(st.integers(0, 10**6))


@given(settings(), st.integers(0, 50))
def test_every_batch_has_distinct_classes_with_m_pictures_each(setting, epoch):
    labels, batch_size, per_class, batches, seed = setting
    sizes = collections.Counter(labels.tolist())
    for batch in MPerClass(labels, batch_size, per_class, batches, seed).epoch_batches(epoch):
        groups = batch.reshape(-1, per_class)
        group_labels = labels[groups]
        assert (group_labels == group_labels[:, :1]).all()
        assert len(set(group_labels[:, 0].tolist())) == batch_size // per_class
        for group, label in zip(groups.tolist(), group_labels[:, 0].tolist(), strict=True):
            shown = collections.Counter(group)
            if sizes[label] >= per_class:
                assert max(shown.values()) == 1
            else:  # too small: all of it, as evenly as it goes
                assert len(shown) == sizes[label]
                assert max(shown.values()) - min(shown.values()) <= 1


@given(settings(), st.integers(1, 6))
def test_classes_are_visited_equally_often_in_an_epoch_and_over_epochs(setting, epochs):
    labels, batch_size, per_class, batches, seed = setting
    sampler = MPerClass(labels, batch_size, per_class, batches, seed)
    total = collections.Counter(dict.fromkeys(labels.tolist(), 0))
    for epoch in range(epochs):
        visits = collections.Counter(labels[sampler.epoch_batches(epoch).ravel()].tolist())
        once = [visits[label] // per_class for label in total]
        assert max(once) - min(once) <= 1
        total.update(visits)
        counts = [count // per_class for count in total.values()]
        assert max(counts) - min(counts) <= 1


@given(settings())
def test_a_class_shows_all_its_pictures_before_it_repeats_one(setting):
    labels, batch_size, per_class, batches, seed = setting
    order = MPerClass(labels, batch_size, per_class, batches, seed).epoch_batches(0).reshape(-1, per_class)
    for label in np.unique(labels):
        size = int((labels == label).sum())
        shown = [picture for group in order.tolist() if labels[group[0]] == label for picture in group]
        if size >= per_class:
            counts = collections.Counter(shown)
            assert max(counts.values(), default=0) <= -(-len(shown) // size)


@given(settings(), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 5))
def test_ranks_take_slices_of_one_global_batch(setting, world_size, epoch):
    labels, batch_size, per_class, batches, seed = setting
    alone = MPerClass(labels, batch_size, per_class, batches, seed)
    if batch_size % world_size:
        with pytest.raises(ValueError, match="cannot be shared equally"):
            MPerClass(labels, batch_size, per_class, batches, seed, world_size)
        return
    shares = []
    for rank in range(world_size):
        sampler = MPerClass(labels, batch_size, per_class, batches, seed, world_size, rank)
        sampler.seek(epoch * batches)
        shares.append(np.asarray(list(sampler)))
    np.testing.assert_array_equal(np.concatenate(shares, axis=1), alone.epoch_batches(epoch))


@given(settings(), st.integers(0, 30))
def test_a_number_resumes_exactly(setting, stop):
    labels, batch_size, per_class, batches, seed = setting
    whole = MPerClass(labels, batch_size, per_class, batches, seed)
    sequence = [batch for _ in range(31 // batches + 2) for batch in whole]
    first = MPerClass(labels, batch_size, per_class, batches, seed)
    seen = []
    while len(seen) < stop:
        for batch in first:
            seen.append(batch)
            if len(seen) == stop:
                break
    assert first.position == stop
    resumed = MPerClass(labels, batch_size, per_class, batches, seed)
    resumed.seek(first.position)
    assert seen + list(resumed) == sequence[: stop + batches - stop % batches]


def test_the_order_is_the_same_on_every_machine():
    # written down once: a change here breaks the resuming of every run that was ever started
    sampler = MPerClass(np.repeat(np.arange(5), 3), batch_size=6, per_class=2, batches=2, seed=333)
    assert sampler.epoch_batches(1).tolist() == [[13, 14, 11, 9, 1, 0], [12, 14, 4, 3, 6, 7]]


def test_class_sets_are_thousands_and_not_three():
    labels = np.repeat(np.arange(100), 58)
    sampler = MPerClass(labels, 128)
    sets = {tuple(sorted(set(labels[batch].tolist()))) for e in range(25) for batch in sampler.epoch_batches(e)}
    assert len(sets) == 25 * len(sampler) > 1_000
    first, second = sampler.epoch_batches(0), MPerClass(labels, 128, seed=1).epoch_batches(0)
    assert (first != second).any()


def test_an_epoch_covers_nearly_all_pictures():
    labels = np.repeat(np.arange(100), 58)
    assert len(np.unique(MPerClass(labels, 128).epoch_batches(3))) > 0.95 * len(labels)


@st.composite
def pair_settings(draw):
    classes = draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    category_of = np.repeat(np.arange(len(classes)), classes)
    sizes = np.asarray(draw(st.lists(st.integers(1, 5), min_size=len(category_of), max_size=len(category_of))))
    labels = np.repeat(np.arange(len(category_of)) * 3 + 1, sizes)
    per_side = draw(st.integers(1, min(classes)))
    return labels, np.repeat(category_of, sizes), per_side, draw(st.integers(1, 3)), draw(st.integers(1, 4))


@given(pair_settings(), st.integers(0, 20), st.integers(0, 20))
def test_all_pairs_meet_equally_often_half_a_batch_each(setting, seed, epoch):
    labels, categories, per_side, per_class, per_pair = setting
    sampler = CategoryPairs(labels, categories, per_side, per_class, per_pair, seed)
    count = len(np.unique(categories))
    batches, pairs = sampler.epoch_batches(epoch), sampler.epoch_pairs(epoch)
    assert len(batches) == len(sampler) == count * (count - 1) // 2 * per_pair
    met = collections.Counter(pairs)
    assert len(met) == count * (count - 1) // 2
    assert set(met.values()) == {per_pair}
    for batch, pair in zip(batches, pairs, strict=True):
        halves = batch.reshape(2, per_side, per_class)
        for half, category in zip(halves, pair, strict=True):
            assert (categories[half] == category).all()
            assert (labels[half] == labels[half][:, :1]).all()
            assert len(np.unique(labels[half][:, 0])) == per_side
            for group in half:
                size = int((labels == labels[group[0]]).sum())
                assert len(set(group.tolist())) == min(per_class, size)


@given(pair_settings(), st.integers(1, 4))
def test_within_a_category_classes_take_turns(setting, epochs):
    labels, categories, per_side, per_class, per_pair = setting
    sampler = CategoryPairs(labels, categories, per_side, per_class, per_pair)
    seen = np.concatenate([labels[sampler.epoch_batches(epoch).ravel()] for epoch in range(epochs)])
    for category in np.unique(categories):
        visits = [int((seen == label).sum()) for label in np.unique(labels[categories == category])]
        assert max(visits) - min(visits) <= per_class


def test_pairs_come_in_another_order_every_epoch_and_resume():
    labels = np.repeat(np.arange(24), 4)
    sampler = CategoryPairs(labels, labels // 24 * 0 + labels // 6, 2, 2, 3)
    assert sampler.epoch_pairs(0) != sampler.epoch_pairs(1)
    whole = [batch for _ in range(2) for batch in sampler]
    sampler.seek(7)
    assert list(sampler) == whole[7:18]
    assert sampler.position == 18
    assert list(sampler) == whole[18:]


def test_sop_as_in_the_paper(outside_data):
    train = dataset("sop", outside_data / "sop").split("train")
    sampler = CategoryPairs(train.labels, train.categories)
    assert (len(sampler.pairs), len(sampler), sampler.batch_size) == (66, 660, 128)
    batch = sampler.epoch_batches(0)[5]
    assert [len(np.unique(train.categories[half])) for half in np.split(batch, 2)] == [1, 1]
    assert [len(np.unique(train.labels[half])) for half in np.split(batch, 2)] == [16, 16]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MPerClass([0, 1], 3, 2), "batch_size must be a multiple of per_class, got 3 and 2"),
        (lambda: MPerClass([0, 0, 1], 12, 4), "needs 3 classes, there are 2"),
        (lambda: MPerClass([0.5, 1.0], 2, 1), "labels must be N > 0 integers"),
        (lambda: MPerClass([], 2, 1), "labels must be N > 0 integers"),
        (lambda: MPerClass([0, 1], 2, 1, batches=0), "batches must be at least 1"),
        (lambda: MPerClass([0, 1], 2, 1, world_size=2, rank=2), "got rank 2 of 2"),
        (lambda: CategoryPairs([0, 1], [0, 0], 1, 1), "at least 2 categories, there is 1; use MPerClass"),
        (lambda: CategoryPairs([0, 0, 1], [0, 1, 1], 1, 1), "class 0 lies in more than one category"),
        (lambda: CategoryPairs([0, 1, 2], [0, 1, 1], 2, 1), r"category -> classes is \{0: 1\}"),
        (lambda: CategoryPairs([0, 1], [0], 1, 1), r"one integer per picture \(2\)"),
        (lambda: CategoryPairs([0, 1], [0, 1], 1, 1, 0), "must be at least 1"),
        (lambda: list(MPerClass([0, 1], 2, 1, seed=-1)), "must be >= 0"),
    ],
)
def test_what_is_refused_says_why(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "sampler", [MPerClass(np.arange(8) // 2, 4, 2), CategoryPairs(np.arange(8) // 2, np.arange(8) // 4, 2, 2)]
)
def test_one_way_to_say_where_a_run_stands(sampler):
    sampler.seek(3)
    assert sampler.position == 3
    with pytest.raises(AttributeError):
        sampler.position = 4
    with pytest.raises(ValueError, match="a position is a number of batches handed out, got -1"):
        sampler.seek(-1)
    assert sampler.position == 3
