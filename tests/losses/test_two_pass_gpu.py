"""Two passes on a real GPU: its random numbers, its autocast, its memory, and backward in autograd's own thread."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from roadmap.losses import ROADMAP, TwoPass

pytestmark = pytest.mark.gpu
LABELS = torch.arange(32) // 4


def model(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 16)
    ).cuda()


def pictures() -> Tensor:
    return torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_value_gradient_statistics_and_random_state_are_those_of_one_pass(precision: torch.dtype) -> None:
    results = []
    for two in (False, True):
        net, images = model(), pictures().cuda()
        if precision == torch.float64:
            net, images = net.double(), images.double()
        torch.manual_seed(5)
        half = precision in (torch.bfloat16, torch.float16)
        with torch.autocast("cuda", precision, enabled=half):
            if two:
                value = TwoPass(ROADMAP(), net, 12)(images, LABELS.cuda())
            else:
                value = ROADMAP()(torch.cat([net(part) for part in images.split(12)]), LABELS.cuda())
        state = torch.cuda.get_rng_state()
        (8 * value).backward()
        assert torch.equal(torch.cuda.get_rng_state(), state)
        results.append((value.detach(), [w.grad for w in net.parameters()], list(net.buffers()), state))
    (value, gradients, buffers, state), (ours, our_gradients, our_buffers, our_state) = results
    assert torch.equal(state, our_state)
    near = 1e-10 if precision == torch.float64 else 1e-5 if precision == torch.float32 else 2e-2
    torch.testing.assert_close(ours, value, rtol=0, atol=near)
    for a, b in zip([*our_gradients, *our_buffers], [*gradients, *buffers], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=near * max(1.0, float(b.abs().max())))


def test_pictures_in_host_memory_go_over_chunk_by_chunk() -> None:
    net = model().eval()
    TwoPass(ROADMAP(), net, 8)(pictures(), LABELS.cuda()).backward()
    ours = [w.grad.clone() for w in net.parameters()]
    net.zero_grad()
    ROADMAP()(net(pictures().cuda()), LABELS.cuda()).backward()
    for a, weight in zip(ours, net.parameters(), strict=True):
        torch.testing.assert_close(a, weight.grad, rtol=1e-4, atol=1e-6)


def test_other_pictures_the_second_time_give_nan_and_make_nobody_wait() -> None:
    net = model().eval()
    times = iter([pictures(), pictures().flip(0)])
    TwoPass(ROADMAP(), net, 8)(lambda: next(times).cuda(), LABELS.cuda()).backward()
    assert all(weight.grad.isnan().any() for weight in net.parameters())


def test_a_batch_of_many_chunks_takes_the_memory_of_one() -> None:
    def peak(count: int, two: bool) -> int:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(16))).cuda()
        chunks = [torch.randn(2048, 512) for _ in range(count)]
        labels = torch.arange(2048 * count, device="cuda") // 4
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if two:
            TwoPass(ROADMAP(), net, 2048)(chunks, labels).backward()
        else:
            ROADMAP()(net(torch.cat(chunks).cuda()), labels).backward()
        return torch.cuda.max_memory_allocated() - before

    assert peak(8, two=True) < 0.5 * peak(8, two=False)
