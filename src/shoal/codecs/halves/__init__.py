"""Two-byte floats: fp16 and bf16."""
