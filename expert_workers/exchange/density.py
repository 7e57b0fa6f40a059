"""When rows whose splits every rank knows go through one all-to-all instead of one message per pair. Pure."""

MIN_RANKS = 8
MIN_SHARE = 0.9
"""Of the pairs of two ranks. Over gloo, messages between pairs cost time by their number, an all-to-all costs the same
however many pairs have rows. Medians of `tests/exchange_table.py`, there and back: where all pairs have rows of up to
16 KB, the all-to-all takes 0.80 to 0.84 of the time on 16 ranks, 0.89 to 0.92 on 8; with 64 KB, or on 4 ranks, 0.93 to
1.02; where three quarters have rows it gains nothing anywhere. NCCL was not measured."""


def all_to_all_pays(num_pairs: int, ep_size: int) -> bool:
    """num_pairs: pairs of two ranks with rows, in the whole group. Every rank must come to the same answer."""
    return ep_size >= MIN_RANKS and num_pairs >= MIN_SHARE * ep_size * (ep_size - 1)
