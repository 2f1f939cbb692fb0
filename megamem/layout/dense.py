"""The dense mask of a layout: the reference that tests compare against. Nothing else may build one."""

import torch
from torch import Tensor

from megamem.layout.layout import Layout


def dense_mask(layout: Layout) -> Tensor:
    """Bool `[S, S]`, True where the query of that row sees the key of that column."""
    mask_SS = torch.zeros(layout.length, layout.length, dtype=torch.bool)
    for edge in layout.edges:
        query, key = layout.segments[edge.query], layout.segments[edge.key]
        for i in range(query.length):
            first, last = edge.relation.visible_keys(query.position + i, key)
            mask_SS[query.start + i, key.start + first : key.start + last] = True
    return mask_SS
