"""What a model family's Hugging Face config says about shapes, in megamem's own words."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Architecture(BaseModel):
    """Shapes and fixed choices of one checkpoint; read from its `config.json` by the family's ModelSpec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt
    hidden: PositiveInt
    ffn: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocab_rows: PositiveInt = Field(description="rows of the embedding and of the output matrix in the files")
    norm_eps: float = 1e-5
    positions: Literal["rope", "learned"] = Field("rope", description="learned: a table of max_positions rows")
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    max_positions: PositiveInt = 4096
    attention: Literal["full", "causal", "block"] = "full"
    mask_id: int
    eos_id: int
    pad_id: int
    init_std: float = 0.02

    def padded_vocab(self, tensor: int) -> int:
        """Embedding rows held by the model: a multiple of 128 and of the tensor-parallel size.

        128 so that checkpoints keep one shape at every usual tensor-parallel size.
        """
        unit = 128
        while unit % tensor:
            unit += 128
        return -(-self.vocab_rows // unit) * unit
