"""Pictures -> unit vectors: backbone, pooling, head; where the weights come from, and checkpoints of all of it.

from roadmap.models import retriever
from roadmap.config.settings import ModelSettings

model = retriever(ModelSettings(name="resnet50", weights="resnet50.pth", pooling="max", layer_norm=True, dim=512))
model(images)   # (B, 3, 224, 224), normalised by model.mean and model.std -> (B, 512)
"""

from roadmap.models.beginning import retriever
from roadmap.models.checkpoints import load_checkpoint, save_checkpoint
from roadmap.models.network import Retriever
from roadmap.models.weight_files import WeightsError

__all__ = ["Retriever", "WeightsError", "load_checkpoint", "retriever", "save_checkpoint"]
