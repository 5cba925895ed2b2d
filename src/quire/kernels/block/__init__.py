"""The block kernel: one program for each row block and KV head."""
