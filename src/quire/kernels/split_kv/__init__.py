"""The split-KV kernel: each program owns an equal partition of the batch's KV tiles, for one KV head."""
