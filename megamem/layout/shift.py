"""Which token stands before which: what a model with shifted logits predicts a token from. Pure integers."""

from megamem.layout.layout import Layout


def segment_predecessors(layout: Layout) -> list[tuple[int, int]]:
    """(row index of its first token, row index of the token before that one in its sequence) of every segment.

    Inside a segment the token before is the one at the row index before. A segment at position p > 0 continues one that
    it sees, at that one's position p - 1: several suffixes may continue one prefix. A sequence's first token has none
    before it and stands for itself, as in the published code of Dream (`cat([logits[:, :1], logits[:, :-1]])`). -1, no
    index at all: the segment continues nothing in this row, so that its first token cannot be predicted here.
    """
    return [(segment.start, _predecessor(layout, i)) for i, segment in enumerate(layout.segments)]


def _predecessor(layout: Layout, i: int) -> int:
    segment = layout.segments[i]
    if segment.position == 0:
        return segment.start
    seen = (layout.segments[edge.key] for edge in layout.edges if edge.query == i)
    steps = ((key, segment.position - 1 - key.position) for key in seen)
    return next((key.start + step for key, step in steps if 0 <= step < key.length), -1)
