"""Chosen keys over latents on Hopper GPUs: rows that lists name, gathered for the consumers of `mla_hopper`."""
