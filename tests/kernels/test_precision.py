"""Float32 in full, for everybody inside at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from roadmap.kernels.precision import at_least_float32, full_float32

from ..waiting import PATIENCE


@pytest.fixture(autouse=True)
def _setting_put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_inside_it_is_whole_and_outside_as_before(setting: str) -> None:
    torch.set_float32_matmul_precision(setting)
    with full_float32():
        assert torch.get_float32_matmul_precision() == "highest"
        with full_float32():
            pass
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == setting


def test_the_first_to_leave_lowers_nothing_for_those_inside() -> None:
    """One thread enters, another enters and leaves in between: the first still computes in full, and the user's setting
    comes back only with the last."""
    torch.set_float32_matmul_precision("medium")
    inside, go = threading.Event(), threading.Event()
    seen: list[str] = []

    def first() -> None:
        with full_float32():
            inside.set()
            go.wait(PATIENCE)
            seen.append(torch.get_float32_matmul_precision())

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(PATIENCE)
    with full_float32():
        pass
    go.set()
    thread.join()
    assert seen == ["highest"]
    assert torch.get_float32_matmul_precision() == "medium"


def test_an_earlier_one_may_leave_first() -> None:
    """The thread that changed the setting leaves while another is inside."""
    torch.set_float32_matmul_precision("medium")
    inside, go, left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with full_float32():
            inside.set()
            go.wait(PATIENCE)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(PATIENCE)
    with full_float32():
        go.set()
        assert left.wait(PATIENCE)
        assert torch.get_float32_matmul_precision() == "highest"
    thread.join()
    assert torch.get_float32_matmul_precision() == "medium"


def test_many_threads_at_once() -> None:
    torch.set_float32_matmul_precision("high")
    wrong: list[str] = []

    def work() -> None:
        for _ in range(200):
            with full_float32():
                if torch.get_float32_matmul_precision() != "highest":
                    wrong.append("lowered")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert torch.get_float32_matmul_precision() == "high"


def test_an_error_inside_puts_the_setting_back() -> None:
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(KeyError), full_float32():
        raise KeyError
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="an older torch has one setting")
def test_the_finer_setting_of_a_backend_is_raised_and_put_back() -> None:
    """Set beside the older one, so that torch no longer says what holds."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with full_float32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("given", "wide"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_at_least_float32(given: torch.dtype, wide: torch.dtype) -> None:
    assert at_least_float32(torch.zeros(2, dtype=given)).dtype == wide
