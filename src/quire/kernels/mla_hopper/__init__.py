"""Multi-head latent attention on Hopper GPUs."""
