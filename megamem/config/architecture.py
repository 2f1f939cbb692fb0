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
    attention: Literal["full", "causal", "block"] = Field("full", description="block: block-causal")
    block_length: PositiveInt | None = Field(None, description="tokens of a block, counted from the sequence's start")
    shifted_logits: bool = Field(False, description="a token is predicted by the hidden state of the one before it")
    # None: the model's files name none. A causal model has no mask.
    mask_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    init_std: float = 0.02

    @property
    def sequence_attention(self) -> str:
        """How a sequence attends, as `layout.packing.sequence_layout` reads it."""
        return f"block:{self.block_length}" if self.attention == "block" else self.attention

    def padded_vocab(self, tensor: int) -> int:
        """Embedding rows held by the model: a multiple of 128 and of the tensor-parallel size.

        128 so that checkpoints keep one shape at every usual tensor-parallel size.
        """
        unit = 128
        while unit % tensor:
            unit += 128
        return -(-self.vocab_rows // unit) * unit
