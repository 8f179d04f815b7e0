"""The start of a run: what is imported and packed before its network is there, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roadmap.engine import ahead, fit
from roadmap.engine.ahead import imports_of
from roadmap.engine.compiling import COMPILER, PAYS
from roadmap.models import WeightsError
from tests.engine.worlds import tiny, write_classes

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_only_what_a_run_may_use_is_imported(tmp_path: Path) -> None:
    def imports(device: torch.device = CPU, steps: int = PAYS, **changed: object) -> list[str]:
        return imports_of(tiny(tmp_path, tmp_path / "run", **changed), device, steps)

    vit = {"model__name": "vit_tiny_patch16_224"}
    assert imports() == []
    assert imports(hardware__compile="default") == [COMPILER]
    assert imports(**vit) == ["timm"]
    assert imports(GPU, **vit) == ["timm", COMPILER]
    assert imports(GPU, PAYS - 1, **vit) == ["timm"]
    assert imports(GPU, hardware__compile="no", **vit) == ["timm"]
    assert imports(GPU, model__freeze_backbone=True, hardware__compile="blocks", **vit) == ["timm"]


def test_modules_are_imported_meanwhile_and_those_that_cannot_be_are_passed_over(tmp_path: Path) -> None:
    """A torchvision that does not fit torch raises RuntimeError, not ImportError: whoever needs it says so, once."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    code = (
        "import sys; from roadmap.engine.ahead import import_thread; "
        "thread = import_thread(['no_such_module', 'broken_module', 'timm']); "
        "thread.join(); print('timm' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "True"
    assert not done.stderr


@pytest.mark.parametrize("soon", [True, False])
def test_long_packing_waits_until_the_weights_were_found(
    soon: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROADMAP_CACHE", str(tmp_path / "cache"))
    if not soon:
        monkeypatch.setattr(ahead, "SOON", 0)
    settings = tiny(
        write_classes(tmp_path / "pictures", range(12)), tmp_path / "run", model__weights="nowhere.safetensors"
    )
    with pytest.raises((WeightsError, OSError), match=r"nowhere\.safetensors"):
        fit(settings, quiet=True)
    assert bool([*tmp_path.glob("cache/**/pack.json")]) is soon
    assert not (tmp_path / "run").exists()
