"""The split-KV kernel: every program an equal partition of the KV tiles of the whole batch."""
