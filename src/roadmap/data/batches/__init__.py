"""From pixels to batches: who meets in a batch, how pictures are cut, and how they are delivered."""
