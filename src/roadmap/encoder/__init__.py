"""A model ready for pictures: weights, crop, precision and device, together -> Embeddings.

    encoder = Encoder.open("runs/first")        # or a checkpoint, or the name of a timm model
    encoder.embed(["a.jpg", "b.jpg"]).vectors   # (2, D), of length 1

Training's own evaluation, the command line and a program of one's own embed pictures through it, so that the same run
gives the same bits everywhere.
"""

from roadmap.encoder.encoder import Encoder, centre_crop
from roadmap.encoder.vectors import embeddings_of

__all__ = ["Encoder", "centre_crop", "embeddings_of"]
