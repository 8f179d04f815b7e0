"""What a model's forward pass depends on besides its weights and its input, so that it can be run again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


class Surroundings:
    """Random numbers, running statistics, autocast, and training or evaluation mode, as they are when this is made.

    Only buffers of modules in training mode are looked at: in evaluation mode statistics stand still. Random numbers
    are torch's, of the CPU and of the GPUs that the model lies on.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._gpus = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
        kinds = {"cpu", *(t.device.type for t in tensors if t.device.type != "meta")}
        self._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in sorted(kinds)]
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [b for module, training in self._modes if training for b in module.buffers(recurse=False)]

    def random(self) -> list[Tensor]:
        """The state of the random numbers now."""
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpus)]

    def set_random(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        for gpu, values in zip(self._gpus, state[1:], strict=True):
            torch.cuda.set_rng_state(values, gpu)

    def statistics(self) -> list[Tensor]:
        """Copies of the buffers now."""
        return [buffer.detach().clone() for buffer in self._buffers]

    def set_statistics(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            # past autograd's count of changes, as batch normalisation itself does: other graphs of this model stay good
            buffer.data.copy_(value)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The autocast of then. Casts are not kept: one that was made without a graph would cut the next graph off."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Modes of then; whatever is drawn or counted within leaves no trace. The autocast of then is not here: it is
        for passes forwards (`autocast`), and would bring gradients of float32 layers down to its type."""
        random, statistics = self.random(), self.statistics()
        modes = [(module, module.training) for module, _ in self._modes]
        try:
            _set_modes(self._modes)
            yield
        finally:
            _set_modes(modes)
            self.set_random(random)
            self.set_statistics(statistics)


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training != training:
            module.training = training
