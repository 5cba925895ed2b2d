"""Chosen keys: one program for each query token and block of heads, which gathers the keys that a list names."""
