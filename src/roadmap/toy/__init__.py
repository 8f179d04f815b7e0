"""The losses at work on a toy set: paper Fig. 1 and supplementary A in motion. Run: python -m roadmap.toy --out toy

There is no model: the embeddings themselves are moved by gradient descent, from the same start, through the same
batches and with the same learning rate, under each loss. What is measured is the exact AP of the whole set, which no
loss ever sees, beside the exact AP inside batches, which is all that a loss sees.
"""
