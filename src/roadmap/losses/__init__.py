"""What is minimised: the losses of ROADMAP and the AP baselines it is compared with.

Every loss is called as `loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)` and needs only
torch and numpy. Each is also a pure function of scores and masks, under its lower-case name. Losses of
pytorch-metric-learning stand behind the same call in `roadmap.losses.pml`, which is imported by name.
"""

from roadmap.losses.binned_ap import FastAP, SoftBinAP, fastap, softbinap
from roadmap.losses.blackbox_ap import BlackBoxAP, blackboxap
from roadmap.losses.decomposable import SupRank, suprank
from roadmap.losses.distributed import Distributed
from roadmap.losses.memory import Memory
from roadmap.losses.rank_ap import SmoothAP, SupAP, saturation_point, smoothap, supap
from roadmap.losses.rank_ndcg import SupNDCG, binary_ndcg, supndcg
from roadmap.losses.rank_recall import RecallAtK, recall_at_k
from roadmap.losses.roadmap import ROADMAP
from roadmap.losses.thresholds import Calibration, calibration
from roadmap.losses.two_pass import TwoPass
from roadmap.metrics.counted import average_precision

__all__ = [
    "ROADMAP",
    "BlackBoxAP",
    "Calibration",
    "Distributed",
    "FastAP",
    "Memory",
    "RecallAtK",
    "SmoothAP",
    "SoftBinAP",
    "SupAP",
    "SupNDCG",
    "SupRank",
    "TwoPass",
    "average_precision",
    "binary_ndcg",
    "blackboxap",
    "calibration",
    "fastap",
    "recall_at_k",
    "saturation_point",
    "smoothap",
    "softbinap",
    "supap",
    "supndcg",
    "suprank",
]
