"""Backward as a stream of sequence chunks: layers and heads whose memory does not hold S x ffn or S x vocab."""
