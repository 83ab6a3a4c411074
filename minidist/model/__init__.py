"""A plain decoder transformer that never mentions ranks, its loss, and its FLOP counts."""
