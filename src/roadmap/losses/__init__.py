"""What is minimised: the losses of ROADMAP and the AP baselines it is compared with.

Every loss is called as `loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)` and needs only
torch and numpy. Each is also a pure function of scores and masks, under its lower-case name. Losses of
pytorch-metric-learning stand behind the same call in `roadmap.losses.pml`, which is imported by name.
"""

from roadmap.losses.binned_ap import FastAP, SoftBinAP, fastap, softbinap
from roadmap.losses.blackbox_ap import BlackBoxAP, blackboxap
from roadmap.losses.clustered import ClusteredLoss
from roadmap.losses.decomposable import SupRank, suprank
from roadmap.losses.distributed import Distributed
from roadmap.losses.graded_ndcg import GradedNDCG, gradedndcg, ndcg
from roadmap.losses.happier import HAPPIER
from roadmap.losses.hierarchical_ap import HierarchicalAP, h_ap, hierarchicalap
from roadmap.losses.high_order import HORDE
from roadmap.losses.horde_contrastive import HordeContrastive
from roadmap.losses.matryoshka import Matryoshka
from roadmap.losses.memory import Memory
from roadmap.losses.rank_ap import SmoothAP, SupAP, saturation_point, smoothap, supap
from roadmap.losses.rank_ndcg import SupNDCG, supndcg
from roadmap.losses.rank_recall import RecallAtK, recall_at_k
from roadmap.losses.roadmap import ROADMAP
from roadmap.losses.selective_triplets import TripletSCT, triplet_sct
from roadmap.losses.spherical import SphericalConstraint
from roadmap.losses.thresholds import Calibration, calibration
from roadmap.losses.two_pass import TwoPass
from roadmap.metrics.counted import average_precision

__all__ = [
    "HAPPIER",
    "HORDE",
    "ROADMAP",
    "BlackBoxAP",
    "Calibration",
    "ClusteredLoss",
    "Distributed",
    "FastAP",
    "GradedNDCG",
    "HierarchicalAP",
    "HordeContrastive",
    "Matryoshka",
    "Memory",
    "RecallAtK",
    "SmoothAP",
    "SoftBinAP",
    "SphericalConstraint",
    "SupAP",
    "SupNDCG",
    "SupRank",
    "TripletSCT",
    "TwoPass",
    "average_precision",
    "blackboxap",
    "calibration",
    "fastap",
    "gradedndcg",
    "h_ap",
    "hierarchicalap",
    "ndcg",
    "recall_at_k",
    "saturation_point",
    "smoothap",
    "softbinap",
    "supap",
    "supndcg",
    "suprank",
    "triplet_sct",
]
