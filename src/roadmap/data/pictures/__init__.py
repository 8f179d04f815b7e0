"""From files to pixels: decoding, and packs of decoded pictures."""
