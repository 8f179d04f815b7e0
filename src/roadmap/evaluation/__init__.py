"""Embeddings -> protocol -> Evaluation: metrics, the values of every query, and what they were measured on.

evaluate(Encoder.open("runs/first"))                        # on the test pictures of the run
evaluate(Encoder.open("resnet50"), dataset("cub", ROOT))    # on a dataset, as the literature does
evaluate(Embeddings.load("vectors.npz"))                    # saved vectors among themselves
evaluate(queries, gallery)                                  # or against others
"""

from roadmap.evaluation.degrees import measured_on
from roadmap.evaluation.evaluation import Evaluation
from roadmap.evaluation.protocol import evaluate, merits, recall_ks, records_of_split, records_to_search

__all__ = ["Evaluation", "evaluate", "measured_on", "merits", "recall_ks", "records_of_split", "records_to_search"]
